import contextlib
import gc
import json
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import (
    Interrupt,
    compiled_model,
    file_size_limit,
    folder_locked_by_another_process,
    is_locked,
    small_data,
    small_model,
    values,
)

import kmp
from kmp.backend import distribution, model_files
from kmp.callbacks import BackupAndRestore, backup_and_restore

SCRIPT = Path(__file__).parent.parent / "resumed_run.py"
SECONDS = 120
SEED = 0  # of the times at which a run is killed, one in each quarter of it


class KillAtEpoch(keras.callbacks.Callback):
    """Ends training at the beginning of an epoch. The backup files are as after a kill of the process."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise KeyboardInterrupt


def start_run(folder, package="kmp", *steps):
    folder.mkdir(exist_ok=True)
    command = [sys.executable, SCRIPT, folder, package, *steps]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for("begins\n", process)
    return process


def wait_for(expected_line, process):
    output = ""
    for line in process.stdout:
        if line == expected_line:
            return
        output += line
    process.communicate()
    raise AssertionError(output)


def finish_run(folder, package="kmp"):
    """Runs or resumes a training to its end. Returns its final state and the seconds spent in `fit`."""
    process, start = start_run(folder, package), time.monotonic()
    wait_for("ends\n", process)
    seconds = time.monotonic() - start
    process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    with np.load(folder / "result.npz") as file:
        return [file[name] for name in file.files], seconds


def kill_and_resume(folder, seconds):
    process = start_run(folder)
    time.sleep(seconds)
    process.kill()
    process.communicate()
    return finish_run(folder)[0]


def assert_log_has_each_step_once(folder):
    records = kmp.records.Run.load(folder / "log").rows
    steps = [record["step"] for record in records]
    keys = ("loss_scale", "overflow_count", "histogram")
    logged = [(key, record["step"]) for record in records for key in keys if key in record]
    assert len(set(logged)) == len(logged)
    assert steps == sorted(steps)
    assert steps[-1] == 480


@pytest.mark.slow
def test_run_killed_at_any_time_ends_as_an_uninterrupted_run(tmp_path):
    randomizer, quarters = random.Random(SEED), 4
    folders = [tmp_path / str(quarter) for quarter in range(quarters)]
    with ThreadPoolExecutor(2) as pool:
        (expected, seconds), (repeated, _) = pool.map(finish_run, [tmp_path / "first", tmp_path / "second"])
        kill_times = [seconds * (quarter + randomizer.random()) / quarters for quarter in range(quarters)]
        results = list(pool.map(kill_and_resume, folders, kill_times))
    assert all(np.array_equal(first, second) for first, second in zip(expected, repeated, strict=True))
    for result, kill_time, folder in zip(results, kill_times, folders, strict=True):
        message = f"killed after {kill_time:.2f} of {seconds:.2f} s, seed {SEED}"
        for array, expected_array in zip(result, expected, strict=True):
            np.testing.assert_array_equal(array, expected_array, err_msg=message)
        assert_log_has_each_step_once(folder)


@pytest.mark.slow
def test_keras_callback_resumes_within_an_epoch(tmp_path):
    expected, _ = finish_run(tmp_path / "uninterrupted", "keras")
    process = start_run(tmp_path / "killed", "keras", "220")
    process.communicate(timeout=SECONDS)
    assert process.returncode == -signal.SIGKILL
    result, _ = finish_run(tmp_path / "killed", "keras")
    for array, expected_array in zip(result, expected, strict=True):
        np.testing.assert_array_equal(array, expected_array)


def fit(folder, callbacks=(), epochs=4, model=None):
    keras.utils.set_random_seed(0)
    model = model or compiled_model("adam")
    model.fit(*small_data(), shuffle=False, verbose=0, epochs=epochs, callbacks=[BackupAndRestore(folder), *callbacks])
    return values([*model.weights, *model.optimizer.variables, *model.optimizer.counters.weights])


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The state after `fit` that nothing interrupts."""
    with kmp.enable():
        return fit(tmp_path_factory.mktemp("uninterrupted"))


def interrupt_fit(folder, epoch=2, callbacks=()):
    with pytest.raises(KeyboardInterrupt):
        fit(folder, [*callbacks, KillAtEpoch(epoch)])
    return folder / "latest.weights.h5", folder / "training_metadata.json"


def between_weights_and_metadata(weights, metadata):
    metadata.write_text(json.dumps({"epoch": 1, "batch": 0}))


def before_the_metadata(weights, metadata):
    metadata.unlink()


def leftover_of(weights):
    return weights.with_name(f".{weights.name}.01234567.partial")


def during_the_write(weights, metadata):
    leftover_of(weights).write_bytes(weights.read_bytes()[:1000])


def during_the_first_write(weights, metadata):
    content = weights.read_bytes()
    for path in weights.parent.iterdir():
        path.unlink()
    leftover_of(weights).write_bytes(content[:1000])


def during_the_deletion(weights, metadata):
    weights.unlink()
    for path in weights.parent.glob("*.bkp"):
        path.unlink()


@pytest.mark.parametrize(
    "simulate_kill",
    [between_weights_and_metadata, before_the_metadata, during_the_write, during_the_first_write, during_the_deletion],
)
def test_kill_during_a_save_loses_nothing(tmp_path, enabled, simulate_kill, expected):
    simulate_kill(*interrupt_fit(tmp_path / "killed"))
    for value, expected_value in zip(fit(tmp_path / "killed"), expected, strict=True):
        np.testing.assert_array_equal(value, expected_value)
    assert not (tmp_path / "killed").exists()


def test_end_of_training_removes_what_a_killed_process_left(tmp_path, enabled):
    weights, _ = interrupt_fit(tmp_path / "killed")
    leftover_of(weights).write_bytes(b"")
    fit(tmp_path / "killed", epochs=2)  # no epoch is left to save
    assert not (tmp_path / "killed").exists()


def zero_bytes(path, offset, length=2048):
    content = bytearray(path.read_bytes())
    content[offset : offset + length] = bytes(length)
    path.write_bytes(content)


@pytest.mark.parametrize("offset", [0, 6144])
def test_corrupt_backup_is_replaced_by_the_previous_one(tmp_path, enabled, offset, caplog, expected):
    weights, _ = interrupt_fit(tmp_path / "corrupt")
    zero_bytes(weights, offset)
    for value, expected_value in zip(fit(tmp_path / "corrupt"), expected, strict=True):
        np.testing.assert_array_equal(value, expected_value)
    assert "restoring the previous backup" in caplog.text
    assert not (tmp_path / "corrupt").exists()


def test_keras_callback_repeats_an_epoch_after_a_kill_between_its_two_files(tmp_path, enabled):
    """The reason for kmp's callback. If this fails, Keras has fixed the bug."""
    between_weights_and_metadata(*interrupt_fit(tmp_path))
    model = compiled_model("adam")
    model.fit(*small_data(), verbose=0, epochs=4, callbacks=[keras.callbacks.BackupAndRestore(tmp_path)])
    assert model.optimizer.snapshot().step == 25


def test_unreadable_backup_raises_and_is_unchanged(tmp_path, enabled):
    weights, _ = interrupt_fit(tmp_path)
    (tmp_path / "latest.weights.h5.bkp").unlink()
    zero_bytes(weights, 0)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(OSError, match=r"The backup cannot be read \(latest.weights.h5: .*Delete it to start"):
        fit(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_backup_of_another_model_raises_and_is_unchanged(tmp_path, enabled):
    interrupt_fit(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(3), kmp.layers.Softmax()])
    other.compile("adam", "sparse_categorical_crossentropy")
    with pytest.raises(ValueError, match="shape|expected"):
        fit(tmp_path, model=other)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_model_without_a_loss_scale_optimizer_is_backed_up_too(tmp_path):
    model = compiled_model("adam")
    with pytest.raises(KeyboardInterrupt):
        model.fit(*small_data(), verbose=0, epochs=4, callbacks=[BackupAndRestore(tmp_path), KillAtEpoch(2)])
    resumed = compiled_model("adam")
    resumed.fit(*small_data(), verbose=0, epochs=4, callbacks=[BackupAndRestore(tmp_path)])
    assert int(resumed.optimizer.iterations) == 20
    assert not tmp_path.exists()


class CustomTrainStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.net, self.own = small_model(), kmp.wrap("adam", growth_interval=3)

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, self.net(x)))
            scaled = self.own.scale_loss(loss)
        self.own.apply(tape.gradient(scaled, self.net.trainable_variables), self.net.trainable_variables)
        return {"loss": loss}


def test_optimizers_besides_the_compiled_one_resume_if_they_are_built(tmp_path, enabled):
    def train(folder, callbacks=(), build=True):
        keras.utils.set_random_seed(0)
        model = CustomTrainStep()
        model(small_data(1)[0])
        if build:
            model.own.build(model.net.trainable_variables)
        model.compile(None)
        model.fit(*small_data(), shuffle=False, verbose=0, epochs=4, callbacks=[BackupAndRestore(folder), *callbacks])
        return values([*model.weights, *model.own.variables])

    with pytest.warns(
        UserWarning, match=r"optimizers besides `model.optimizer` that are not built.*`build\(variables\)`"
    ):
        expected = train(tmp_path / "uninterrupted", build=False)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "killed", [KillAtEpoch(2)])
    for value, expected_value in zip(train(tmp_path / "killed"), expected, strict=True):
        np.testing.assert_array_equal(value, expected_value)


def test_fit_after_a_resumed_fit_trains_all_its_epochs(tmp_path, enabled):
    interrupt_fit(tmp_path)
    model = compiled_model("adam")
    fit(tmp_path, model=model)
    assert model.optimizer.snapshot().step == 20
    model.fit(*small_data(), verbose=0, epochs=2)
    assert model.optimizer.snapshot().step == 30


def test_keras_callback_and_kmps_callback_read_each_others_backup(tmp_path, enabled):
    pair = (BackupAndRestore, keras.callbacks.BackupAndRestore)
    for writer, reader in (pair, pair[::-1]):
        first, second = compiled_model("adam"), compiled_model("adam")
        with pytest.raises(KeyboardInterrupt):
            first.fit(*small_data(), verbose=0, epochs=4, callbacks=[writer(tmp_path), KillAtEpoch(2)])
        second.fit(*small_data(), verbose=0, epochs=4, callbacks=[reader(tmp_path)])
        assert second.optimizer.snapshot().step == 20


def test_kill_after_the_first_save_within_an_epoch_restarts_the_epoch(tmp_path, enabled):
    with pytest.raises(KeyboardInterrupt):
        compiled_model("adam").fit(
            *small_data(40), batch_size=8, verbose=0, callbacks=[BackupAndRestore(tmp_path, save_freq=4), Interrupt()]
        )
    (tmp_path / "training_metadata.json").unlink()
    resumed = compiled_model("adam")
    resumed.fit(*small_data(40), batch_size=8, verbose=0, callbacks=[BackupAndRestore(tmp_path)])
    assert resumed.optimizer.snapshot().step == 4 + 40
    assert not tmp_path.exists()


def test_backup_within_an_epoch_restarts_the_epoch(tmp_path, enabled):
    model = compiled_model("adam")
    backup = BackupAndRestore(tmp_path, save_freq=7)
    with pytest.raises(KeyboardInterrupt):
        model.fit(*small_data(40), batch_size=8, verbose=0, epochs=2, callbacks=[backup, Interrupt(epoch=1)])
    resumed = compiled_model("adam")
    resumed.fit(*small_data(40), batch_size=8, verbose=0, epochs=2, callbacks=[BackupAndRestore(tmp_path, save_freq=7)])
    assert resumed.optimizer.snapshot().step == 42 + 40


class LimitFileSize(keras.callbacks.Callback):
    """Limits the size of files from an epoch through the end of training."""

    def __init__(self, first_epoch):
        super().__init__()
        self.first_epoch, self.limit = first_epoch, contextlib.ExitStack()

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.first_epoch:
            self.limit.enter_context(file_size_limit(3000))


def test_write_that_fails_keeps_the_last_backup_and_training_continues(tmp_path, enabled, expected):
    """At a file size limit, where HDF5 would end the process."""
    limit = LimitFileSize(first_epoch=1)
    with limit.limit, pytest.warns(UserWarning, match="File too large.*Training continues") as caught:
        interrupt_fit(tmp_path / "limited", epoch=3, callbacks=[limit])
    warnings = [str(warning.message) for warning in caught if "backup" in str(warning.message)]
    assert [message.split(" was ")[0] for message in warnings] == ["The backup of epoch 2", "The backup of epoch 3"]
    assert json.loads((tmp_path / "limited" / "training_metadata.json").read_text())["epoch"] == 1
    assert not list((tmp_path / "limited").glob(".*"))
    for value, expected_value in zip(fit(tmp_path / "limited"), expected, strict=True):
        np.testing.assert_array_equal(value, expected_value)


def test_lack_of_memory_keeps_the_last_backup_and_training_continues(tmp_path, enabled, monkeypatch):
    def fail(*arguments):
        raise MemoryError

    monkeypatch.setattr(model_files, "write_weights", fail)
    model = compiled_model("adam")
    with pytest.warns(UserWarning, match=r"was not written \(MemoryError\). Training continues"):
        fit(tmp_path, model=model, epochs=1)
    assert model.optimizer.snapshot().step == 5


def test_folder_that_another_process_uses_raises_and_is_unchanged(tmp_path, enabled):
    interrupt_fit(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    model = compiled_model("adam")
    weights = values(model.weights)
    gc.collect()  # the interrupted training's lock
    with folder_locked_by_another_process(tmp_path):
        with pytest.raises(OSError, match="`backup_dir` is in use by another process.*Wait until.*another folder"):
            fit(tmp_path, model=model)
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
        for value, expected_value in zip(values(model.weights), weights, strict=True):
            np.testing.assert_array_equal(value, expected_value)
    backup = BackupAndRestore(tmp_path, delete_checkpoint=False)
    model.fit(*small_data(), verbose=0, epochs=4, callbacks=[backup])
    assert model.optimizer.snapshot().step == 20
    assert not is_locked(tmp_path)


def test_worker_that_is_not_the_chief_uses_the_folder_that_the_chief_locks(tmp_path, enabled, monkeypatch):
    monkeypatch.setattr(backup_and_restore, "is_chief", lambda strategy: False)
    model = compiled_model("adam")
    with folder_locked_by_another_process(tmp_path):
        fit(tmp_path, epochs=1, model=model)
    assert model.optimizer.snapshot().step == 5
    assert list(tmp_path.iterdir()) == []


def test_callbacks_of_one_process_share_a_folder_also_after_an_interrupt(tmp_path, enabled):
    model = compiled_model("adam")
    with pytest.raises(KeyboardInterrupt) as interrupt:
        fit(tmp_path, [*kmp.callbacks.defaults(tmp_path), KillAtEpoch(1)], model=model)
    fit(tmp_path, kmp.callbacks.defaults(tmp_path), model=model)
    assert model.optimizer.snapshot().step == 20
    del interrupt  # as in a notebook, its traceback kept the callbacks of the interrupted training
    gc.collect()
    with folder_locked_by_another_process(tmp_path) as process:
        assert process.poll() is None


@pytest.mark.parametrize(("epochs", "raises"), [([4096, 4097], True), ([4097, 4097], False)])
def test_workers_that_would_resume_after_different_epochs_raise(tmp_path, enabled, monkeypatch, epochs, raises):
    monkeypatch.setattr(backup_and_restore, "_gather_from_replicas", lambda strategy, number: epochs)
    expected = pytest.raises(RuntimeError, match="different numbers of epochs, this one after 0. `backup_dir`")
    with expected if raises else contextlib.nullcontext():
        fit(tmp_path, epochs=1)


@pytest.mark.parametrize(
    ("arguments", "error_class", "match"),
    [
        ({"backup_dir": ""}, ValueError, "`backup_dir` must be"),
        ({"backup_dir": 3}, TypeError, "`backup_dir` must be"),
        ({"backup_dir": "a", "save_freq": 0}, ValueError, "`save_freq` must be"),
        ({"backup_dir": "a", "save_freq": "batch"}, TypeError, "`save_freq` must be"),
        (
            {"backup_dir": "a", "save_freq": np.array([1.0, 2.0])},
            TypeError,
            r"`save_freq` must be.*array\(\[1., 2.\]\)",
        ),
        ({"backup_dir": "a", "double_checkpoint": 1}, TypeError, "`double_checkpoint` must be True or False"),
        ({"backup_dir": "a", "delete_checkpoint": "no"}, TypeError, "`delete_checkpoint` must be True or False"),
    ],
)
def test_invalid_argument_raises(arguments, error_class, match):
    with pytest.raises(error_class, match=match):
        BackupAndRestore(**arguments)


def test_model_or_folder_that_cannot_be_backed_up_raises_before_training(tmp_path, enabled):
    unbuilt, without_weights = (keras.Sequential([keras.layers.Dense(2), kmp.layers.Softmax()]) for _ in range(2))
    without_weights.built = True
    for model in (unbuilt, without_weights):
        model.compile("sgd", "sparse_categorical_crossentropy")
        with pytest.raises(ValueError, match="needs a built model"):
            fit(tmp_path, model=model)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        fit(tmp_path / "file")


def test_second_fit_in_one_process_uses_its_own_backup_folder(tmp_path, enabled):
    model = compiled_model("adam")
    model.fit(*small_data(), verbose=0, epochs=2, callbacks=[BackupAndRestore(tmp_path / "a")])
    model.fit(*small_data(), verbose=0, epochs=2, callbacks=[BackupAndRestore(tmp_path / "b")])
    assert model.optimizer.snapshot().step == 20


@pytest.mark.parametrize("number", [0, 5, 4097, 2**24 + 1, 2**63 - 1, -1])
def test_gathered_numbers_are_exact(two_replicas, monkeypatch, number):
    monkeypatch.setattr(distribution, "has_several_workers", lambda strategy: True)
    assert backup_and_restore._gather_from_replicas(two_replicas, number) == [number, number]


def test_single_worker_gathers_its_own_number(two_replicas):
    assert backup_and_restore._gather_from_replicas(two_replicas, 7) == [7]
