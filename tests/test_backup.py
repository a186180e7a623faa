import json
import random
import secrets
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import keras
import numpy as np
import pytest
from conftest import compiled_model, small_data, values

import kmp
from kmp.callbacks import BackupAndRestore

SCRIPT = Path(__file__).parent / "resumed_run.py"
SECONDS = 120


class Moment(keras.callbacks.Callback):
    """Ends a training at a moment that the process does not survive, as far as the files are concerned."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise KeyboardInterrupt


def begin(folder, kind="kmp"):
    folder.mkdir(exist_ok=True)
    command = [sys.executable, SCRIPT, folder, kind]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line == "begins\n":
            return process
    raise AssertionError(process.stderr.read())


def to_the_end(folder, kind="kmp"):
    """Runs, or goes on with, a training; returns its state and the seconds it spent in `fit`."""
    process, began = begin(folder, kind), time.monotonic()
    assert process.stdout.readline() == "ends\n", process.stderr.read()
    seconds = time.monotonic() - began
    process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    with np.load(folder / "result.npz") as file:
        return [file[name] for name in file.files], seconds


def killed_and_resumed(folder, seconds, kind="kmp"):
    process = begin(folder, kind)
    time.sleep(seconds)
    process.kill()
    process.communicate()
    return to_the_end(folder, kind)[0]


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
    expected, seconds = to_the_end(tmp_path / "never", "keras")
    result = killed_and_resumed(tmp_path / "killed", seconds / 2, "keras")
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


def truncated(path):
    path.write_bytes(path.read_bytes()[:1000])


def between_weights_and_metadata(weights, metadata):
    metadata.write_text(json.dumps({"epoch": 1, "batch": 0}))


def in_the_metadata(weights, metadata):
    metadata.write_text("")


def in_the_weights(weights, metadata):
    truncated(weights)


def at_the_first_weights(weights, metadata):
    for path in weights.parent.iterdir():
        path.unlink()
    weights.write_bytes(b"\x89HDF")


def in_the_deletion(weights, metadata):
    weights.unlink()


@pytest.mark.parametrize(
    "moment",
    [between_weights_and_metadata, in_the_metadata, in_the_weights, at_the_first_weights, in_the_deletion],
)
def test_kill_inside_a_save_loses_nothing(tmp_path, enabled, moment):
    expected = fit(tmp_path / "never")
    moment(*interrupted(tmp_path / "killed"))
    for mine, its in zip(fit(tmp_path / "killed"), expected, strict=True):
        np.testing.assert_array_equal(mine, its)


def test_keras_own_callback_repeats_an_epoch_where_the_kill_came_between_its_two_files(tmp_path, enabled):
    """Why kmp has one: when this fails, Keras has mended it."""
    between_weights_and_metadata(*interrupted(tmp_path))
    model = compiled_model("adam")
    model.fit(*small_data(), verbose=0, epochs=4, callbacks=[keras.callbacks.BackupAndRestore(tmp_path)])
    assert model.optimizer.snapshot().step == 25


def test_backup_that_cannot_be_read_is_an_error_that_leaves_it(tmp_path, enabled):
    weights, _ = interrupted(tmp_path)
    (tmp_path / "latest.weights.h5.bkp").unlink()
    truncated(weights)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(OSError, match=r"The backup cannot be read .*truncated file.*Delete it to start from the begin"):
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


def test_second_training_in_one_process_starts_from_its_own_backup(tmp_path, enabled):
    model = compiled_model("adam")
    model.fit(*small_data(), verbose=0, epochs=2, callbacks=[BackupAndRestore(tmp_path / "a")])
    model.fit(*small_data(), verbose=0, epochs=2, callbacks=[BackupAndRestore(tmp_path / "b")])
    assert model.optimizer.snapshot().step == 20
