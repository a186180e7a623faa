import json
import random
import secrets
import shutil
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
from conftest import Interrupt, compiled_model, small_data, small_model, values

import kmp
from kmp.callbacks import BackupAndRestore

SCRIPT = Path(__file__).parent.parent / "resumed_run.py"
SECONDS = 120


class Moment(keras.callbacks.Callback):
    """Ends a training at a moment that the process does not survive, as far as the files are concerned."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise KeyboardInterrupt


def begin(folder, kind="kmp", *steps):
    folder.mkdir(exist_ok=True)
    command = [sys.executable, SCRIPT, folder, kind, *steps]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for("begins\n", process)
    return process


def wait_for(awaited, process):
    told = ""
    for line in process.stdout:
        if line == awaited:
            return
        told += line
    process.communicate()
    raise AssertionError(told)


def to_the_end(folder, kind="kmp"):
    """Runs, or goes on with, a training; returns its state and the seconds it spent in `fit`."""
    process, began = begin(folder, kind), time.monotonic()
    wait_for("ends\n", process)
    seconds = time.monotonic() - began
    process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    with np.load(folder / "result.npz") as file:
        return [file[name] for name in file.files], seconds


def killed_and_resumed(folder, seconds):
    process = begin(folder)
    time.sleep(seconds)
    process.kill()
    process.communicate()
    return to_the_end(folder)[0]


def assert_log_tells_each_step_once(folder):
    rows = kmp.records.Run.load(folder / "log").rows
    told = [(key, row["step"]) for row in rows for key in ("loss_scale", "overflow_count", "histogram") if key in row]
    assert len(set(told)) == len(told)
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    assert rows[-1]["step"] == 480


@pytest.mark.slow
def test_run_killed_at_any_moment_ends_as_the_one_that_was_never_killed(tmp_path):
    seed = secrets.randbits(32)
    print("seed:", seed)
    folders = [tmp_path / str(i) for i in range(10)]
    with ThreadPoolExecutor(2) as pool:
        (expected, seconds), (same, _) = pool.map(to_the_end, [tmp_path / "never", tmp_path / "never again"])
        moments = [random.Random(f"{seed} {i}").uniform(0, seconds) for i in range(10)]
        results = list(pool.map(killed_and_resumed, folders, moments))
    assert all(np.array_equal(one, other) for one, other in zip(expected, same, strict=True))
    for result, moment, folder in zip(results, moments, folders, strict=True):
        for mine, its in zip(result, expected, strict=True):
            np.testing.assert_array_equal(mine, its, err_msg=f"killed after {moment:.2f} of {seconds:.2f} s, {seed=}")
        assert_log_tells_each_step_once(folder)


@pytest.mark.slow
def test_keras_own_callback_resumes_in_mid_epoch_too(tmp_path):
    expected, _ = to_the_end(tmp_path / "never", "keras")
    process = begin(tmp_path / "killed", "keras", "220")
    process.communicate(timeout=SECONDS)
    assert process.returncode == -signal.SIGKILL
    result, _ = to_the_end(tmp_path / "killed", "keras")
    for mine, its in zip(result, expected, strict=True):
        np.testing.assert_array_equal(mine, its)


def fit(folder, callbacks=(), epochs=4, model=None):
    keras.utils.set_random_seed(0)
    model = model or compiled_model("adam")
    model.fit(*small_data(), shuffle=False, verbose=0, epochs=epochs, callbacks=[BackupAndRestore(folder), *callbacks])
    return values([*model.weights, *model.optimizer.variables, *model.optimizer.counters.weights])


def interrupted(folder, epoch=2):
    with pytest.raises(KeyboardInterrupt):
        fit(folder, [Moment(epoch)])
    return folder / "latest.weights.h5", folder / "training_metadata.json"


def between_weights_and_metadata(weights, metadata):
    metadata.write_text(json.dumps({"epoch": 1, "batch": 0}))


def before_the_metadata(weights, metadata):
    metadata.unlink()


def in_the_partial_file(weights, metadata):
    weights.with_name(f"partial-{weights.name}").write_bytes(weights.read_bytes()[:1000])


def at_the_first_one(weights, metadata):
    whole = weights.read_bytes()
    for path in weights.parent.iterdir():
        path.unlink()
    weights.with_name(f"partial-{weights.name}").write_bytes(whole[:1000])


def in_the_deletion(weights, metadata):
    weights.unlink()
    for path in weights.parent.glob("*.bkp"):
        path.unlink()


@pytest.mark.parametrize(
    "moment",
    [between_weights_and_metadata, before_the_metadata, in_the_partial_file, at_the_first_one, in_the_deletion],
)
def test_kill_inside_a_save_loses_nothing(tmp_path, enabled, moment):
    expected = fit(tmp_path / "never")
    moment(*interrupted(tmp_path / "killed"))
    for mine, its in zip(fit(tmp_path / "killed"), expected, strict=True):
        np.testing.assert_array_equal(mine, its)


def zeroed(path, at, length=2048):
    content = bytearray(path.read_bytes())
    content[at : at + length] = bytes(length)
    path.write_bytes(content)


@pytest.mark.parametrize("at", [0, 6144])
def test_backup_that_the_disk_spoilt_gives_way_to_the_one_before_it(tmp_path, enabled, at, caplog):
    expected = fit(tmp_path / "never")
    weights, _ = interrupted(tmp_path / "spoilt")
    zeroed(weights, at)
    for mine, its in zip(fit(tmp_path / "spoilt"), expected, strict=True):
        np.testing.assert_array_equal(mine, its)
    assert "going back to the backup before it" in caplog.text


def test_keras_own_callback_repeats_an_epoch_where_the_kill_came_between_its_two_files(tmp_path, enabled):
    """Why kmp has one: when this fails, Keras has mended it."""
    between_weights_and_metadata(*interrupted(tmp_path))
    model = compiled_model("adam")
    model.fit(*small_data(), verbose=0, epochs=4, callbacks=[keras.callbacks.BackupAndRestore(tmp_path)])
    assert model.optimizer.snapshot().step == 25


def test_backup_that_cannot_be_read_is_an_error_that_leaves_it(tmp_path, enabled):
    weights, _ = interrupted(tmp_path)
    (tmp_path / "latest.weights.h5.bkp").unlink()
    zeroed(weights, 0)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(OSError, match=r"The backup cannot be read \(latest.weights.h5: .*Delete it to start"):
        fit(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_backup_of_another_model_is_an_error_that_leaves_it(tmp_path, enabled):
    interrupted(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(3), kmp.layers.Softmax()])
    other.compile("adam", "sparse_categorical_crossentropy")
    with pytest.raises(ValueError, match="shape|expected"):
        fit(tmp_path, model=other)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_models_without_kmps_optimizer_are_backed_up_as_by_keras(tmp_path):
    model = compiled_model("adam")
    with pytest.raises(KeyboardInterrupt):
        model.fit(*small_data(), verbose=0, epochs=4, callbacks=[BackupAndRestore(tmp_path), Moment(2)])
    again = compiled_model("adam")
    again.fit(*small_data(), verbose=0, epochs=4, callbacks=[BackupAndRestore(tmp_path)])
    assert int(again.optimizer.iterations) == 20
    assert not tmp_path.exists()


class OwnOptimizer(keras.Model):
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


def test_optimizers_of_a_models_own_resume_where_they_are_built_before(tmp_path, enabled):
    def trained(folder, callbacks=(), build=True):
        keras.utils.set_random_seed(0)
        model = OwnOptimizer()
        model(small_data(1)[0])
        if build:
            model.own.build(model.net.trainable_variables)
        model.compile(None)
        model.fit(*small_data(), shuffle=False, verbose=0, epochs=4, callbacks=[BackupAndRestore(folder), *callbacks])
        return values([*model.weights, *model.own.variables])

    with pytest.warns(UserWarning, match=r"optimizers of its own that are not built.*`build\(variables\)`"):
        expected = trained(tmp_path / "never", build=False)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "killed", [Moment(2)])
    for mine, its in zip(trained(tmp_path / "killed"), expected, strict=True):
        np.testing.assert_array_equal(mine, its)


def test_training_after_a_resumed_one_has_all_its_epochs(tmp_path, enabled):
    interrupted(tmp_path)
    model = compiled_model("adam")
    fit(tmp_path, model=model)
    assert model.optimizer.snapshot().step == 20
    model.fit(*small_data(), verbose=0, epochs=2)
    assert model.optimizer.snapshot().step == 30


def test_backup_is_read_by_keras_callback_and_the_other_way_round(tmp_path, enabled):
    pair = (BackupAndRestore, keras.callbacks.BackupAndRestore)
    for writer, reader in (pair, pair[::-1]):
        one, other = compiled_model("adam"), compiled_model("adam")
        with pytest.raises(KeyboardInterrupt):
            one.fit(*small_data(), verbose=0, epochs=4, callbacks=[writer(tmp_path), Moment(2)])
        other.fit(*small_data(), verbose=0, epochs=4, callbacks=[reader(tmp_path)])
        assert other.optimizer.snapshot().step == 20


def test_kill_after_the_first_weights_of_mid_epoch_starts_the_epoch_again(tmp_path, enabled):
    with pytest.raises(KeyboardInterrupt):
        compiled_model("adam").fit(
            *small_data(40), batch_size=8, verbose=0, callbacks=[BackupAndRestore(tmp_path, save_freq=4), Interrupt()]
        )
    (tmp_path / "training_metadata.json").unlink()
    again = compiled_model("adam")
    again.fit(*small_data(40), batch_size=8, verbose=0, callbacks=[BackupAndRestore(tmp_path)])
    assert again.optimizer.snapshot().step == 4 + 40
    assert not tmp_path.exists()


def test_backups_of_mid_epoch_start_the_epoch_again(tmp_path, enabled):
    model = compiled_model("adam")
    backup = BackupAndRestore(tmp_path, save_freq=7)
    with pytest.raises(KeyboardInterrupt):
        model.fit(*small_data(40), batch_size=8, verbose=0, epochs=2, callbacks=[backup, Interrupt(epoch=1)])
    again = compiled_model("adam")
    again.fit(*small_data(40), batch_size=8, verbose=0, epochs=2, callbacks=[BackupAndRestore(tmp_path, save_freq=7)])
    assert again.optimizer.snapshot().step == 42 + 40


def test_full_disk_keeps_the_last_backup_and_the_training(tmp_path, enabled, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    model = compiled_model("adam")
    fit(tmp_path / "whole", [keras.callbacks.LambdaCallback()], epochs=1, model=model)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.warns(UserWarning, match="was not written .*No space left on device.*Training goes on") as caught:
        fit(tmp_path / "full", epochs=2, model=model)
    assert len(caught) == 2
    assert model.optimizer.snapshot().step == 15


@pytest.mark.parametrize(
    ("arguments", "kind", "match"),
    [
        ({"backup_dir": ""}, ValueError, "`backup_dir` must be"),
        ({"backup_dir": 3}, TypeError, "`backup_dir` must be"),
        ({"backup_dir": "a", "save_freq": 0}, ValueError, "`save_freq` must be"),
        ({"backup_dir": "a", "save_freq": "batch"}, TypeError, "`save_freq` must be"),
        ({"backup_dir": "a", "double_checkpoint": 1}, TypeError, "`double_checkpoint` must be True or False"),
        ({"backup_dir": "a", "delete_checkpoint": "no"}, TypeError, "`delete_checkpoint` must be True or False"),
    ],
)
def test_bad_arguments_are_refused(arguments, kind, match):
    with pytest.raises(kind, match=match):
        BackupAndRestore(**arguments)


def test_what_cannot_be_resumed_is_refused_before_it_trains(tmp_path, enabled):
    unbuilt, without_weights = (keras.Sequential([keras.layers.Dense(2), kmp.layers.Softmax()]) for _ in range(2))
    without_weights.built = True
    for model in (unbuilt, without_weights):
        model.compile("sgd", "sparse_categorical_crossentropy")
        with pytest.raises(ValueError, match="needs a model that is built"):
            fit(tmp_path, model=model)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        fit(tmp_path / "file")


def test_second_training_in_one_process_starts_from_its_own_backup(tmp_path, enabled):
    model = compiled_model("adam")
    model.fit(*small_data(), verbose=0, epochs=2, callbacks=[BackupAndRestore(tmp_path / "a")])
    model.fit(*small_data(), verbose=0, epochs=2, callbacks=[BackupAndRestore(tmp_path / "b")])
    assert model.optimizer.snapshot().step == 20
