import dataclasses
import errno
import fcntl
import gc
import itertools
import json
import os
import shutil
import subprocess

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import (
    Interrupt,
    compiled_model,
    file_size_limit,
    fit,
    folder_locked_by_another_process,
    is_locked,
    sample_from,
    small_data,
    without_replays,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import kmp
from kmp.callbacks import GradientHistogram, LossScaleLogger, Monitor, OverflowCounter, log_writer
from kmp.callbacks.tensorboard_events import histograms_by_tag, write_histograms
from kmp.records import BIN_COUNT, FIRST_EXPONENT, SCHEMA, ZERO_BIN, LogEncoder

pytestmark = pytest.mark.usefixtures("enabled")

KEYS = {"loss_scale", "overflow_count", "grad_norm"}
LOGGERS = [LossScaleLogger, OverflowCounter, GradientHistogram]


def test_files_have_the_records_of_the_callbacks(tmp_path):
    callbacks = without_replays(tmp_path / "logs", every_n_steps=5)
    fit(compiled_model(), callbacks)
    lines = [json.loads(line) for line in (tmp_path / "logs" / "kmp.jsonl").read_text().splitlines()]
    assert (lines[0]["kind"], lines[0]["schema"]) == ("header", SCHEMA)
    rows = callbacks[0].run.rows
    encoder = LogEncoder()
    assert lines[1:] == [json.loads(encoder.line(row)) for row in rows]
    assert ["names" in line["sample"] for line in lines[1:] if "sample" in line] == [True, False, False, False, False]
    events = EventAccumulator(str(tmp_path / "logs"), {"tensors": 0}).Reload()
    assert {"kmp/log2_loss_scale", "kmp/overflow_count", "kmp/grad_zeros", "kmp/gradient_exponents"} <= set(
        events.Tags()["tensors"]
    )
    assert [e.step for e in events.Tensors("kmp/log2_loss_scale")] == [1, 5, 10, 15, 20]
    buckets = tf.make_ndarray(events.Tensors("kmp/gradient_exponents")[0].tensor_proto)
    first = callbacks[0].run.histograms[0]
    assert buckets[:, 2].sum() == first.by_exponent.sum()
    assert buckets[:, 1].tolist() == (buckets[:, 0] + 1).tolist()
    layers = callbacks[0].run.samples[0].by_layer()
    by_layer = {tag.removeprefix("kmp_by_layer/"): tag for tag in events.Tags()["tensors"] if "kmp_by_layer/" in tag}
    assert set(by_layer) == {"sequential/dense", "sequential/dense_1"}  # not numbered on from earlier models
    for name, tag in zip(layers, sorted(by_layer.values()), strict=True):
        buckets = tf.make_ndarray(events.Tensors(tag)[0].tensor_proto)
        assert buckets[:, 2].sum() == layers[name].by_exponent.sum()
        assert events.SummaryMetadata(tag).plugin_data.plugin_name == "histograms"
    verdict = tf.make_ndarray(events.Tensors("kmp/verdict")[-1].tensor_proto).item().decode()
    assert verdict == f"```\n{kmp.advise(callbacks[0].run)}\n```"


def test_verdict_is_that_of_the_whole_log_and_its_failure_is_a_warning(tmp_path, monkeypatch):
    model = compiled_model()
    for _ in range(2):
        fit(model, without_replays(tmp_path, every_n_steps=10))
    events = EventAccumulator(str(tmp_path), {"tensors": 0}).Reload()
    verdicts = {
        event.step: tf.make_ndarray(event.tensor_proto).item().decode() for event in events.Tensors("kmp/verdict")
    }
    assert list(verdicts) == [20, 40]
    assert "of 40 steps" in verdicts[40]
    monkeypatch.setattr("kmp.callbacks.log_writer.advise", lambda run: 1 // 0)
    with pytest.warns(UserWarning, match="text tab has no verdict: integer division"):
        fit(model, without_replays(tmp_path, every_n_steps=10))
    assert kmp.load_run(tmp_path).rows[-1]["step"] == 60


def test_verdict_of_a_stuck_training_is_written_before_the_error(tmp_path):
    model = compiled_model(kmp.LossScaleOptimizer("sgd", loss_scale=1.0))
    callbacks = without_replays(tmp_path)
    x, y = small_data()
    with pytest.raises(kmp.callbacks.StuckError):
        model.fit(np.full_like(x, np.nan), y, batch_size=8, epochs=40, verbose=0, callbacks=callbacks)
    events = EventAccumulator(str(tmp_path), {"tensors": 0}).Reload()
    assert len(events.Tensors("kmp/verdict")) == 1


def test_layer_without_a_finite_gradient_has_no_histogram():
    variables = {"a/kernel": {"inf": 4, "update_norm": 1.0}, "b/kernel": {"zero": 4, "update_norm": 0.0}}
    assert list(histograms_by_tag(sample_from(1, 8.0, variables), {})) == ["kmp/gradient_exponents", "kmp_by_layer/b"]
    without_update = sample_from(1, 8.0, {"b/kernel": {"zero": 4}})
    assert list(histograms_by_tag(without_update, {})) == ["kmp/gradient_exponents"]


def test_record_between_the_ends_of_two_callbacks_is_written_to_the_same_log(tmp_path):
    model = compiled_model()
    first, last = (LossScaleLogger(tmp_path / "logs", every_n_steps=5) for _ in range(2))

    def train_and_read(logs):
        model.train_on_batch(*small_data(batches=1))
        last.read()

    between = keras.callbacks.LambdaCallback(on_train_end=train_and_read)
    fit(model, [first, between, last])
    assert kmp.load_run(tmp_path / "logs").series("loss_scale")[0].tolist()[-1] == 21
    assert not (tmp_path / "logs" / "earlier-1").exists()


def steps_in_tensorboard(folder):
    events = EventAccumulator(str(folder), {"tensors": 0}).Reload()
    return [event.step for event in events.Tensors("kmp/log2_loss_scale")]


def test_resuming_from_an_older_checkpoint_archives_the_log_and_keeps_records_up_to_it(tmp_path):
    model = compiled_model()
    fit(model, without_replays(tmp_path / "logs", every_n_steps=10))
    model.save(tmp_path / "model.keras")
    fit(model, without_replays(tmp_path / "logs", every_n_steps=10))
    loaded = keras.models.load_model(tmp_path / "model.keras")
    fit(loaded, without_replays(tmp_path / "logs", every_n_steps=15))
    assert kmp.records.Run.load(tmp_path / "logs").series("loss_scale")[0].tolist() == [1, 10, 20, 21, 30, 40]
    assert steps_in_tensorboard(tmp_path / "logs") == [1, 10, 20, 21, 30, 40]
    assert kmp.records.Run.load(tmp_path / "logs" / "earlier-1").series("loss_scale")[0].size == 6


def sampled_steps(folder):
    return [histogram.step for histogram in kmp.load_run(folder).histograms]


@pytest.mark.parametrize("kmp_first", [True, False])
def test_resumed_run_continues_the_log_for_any_position_of_the_backup_callback(tmp_path, kmp_first):
    for stop in (Interrupt(epoch=1), None):
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
        loggers = without_replays(tmp_path / "logs", every_n_steps=10)
        callbacks = [*loggers, backup] if kmp_first else [backup, *loggers]
        try:
            fit(compiled_model(), callbacks + [stop] * bool(stop), epochs=3)
        except KeyboardInterrupt:
            continue
    run = kmp.records.Run.load(tmp_path / "logs")
    assert run.series("loss_scale")[0].tolist() == [1, 10, 20, 21, 30, 40, 50, 60]
    assert [histogram.step for histogram in run.histograms] == [1, 10, 20, 21, 30, 40, 50, 60]


def test_run_that_resumes_with_the_backup_of_keras_ends_as_one_that_was_not_interrupted(tmp_path):
    states = []
    for stops in ([None], [Interrupt(epoch=2), None]):
        for stop in stops:
            keras.backend.clear_session()  # equal names
            keras.utils.set_random_seed(0)
            model = compiled_model(kmp.LossScaleOptimizer("adam", initial_scale=2.0**24, growth_interval=7))
            folder = tmp_path / f"backup-{len(stops)}"
            backup = keras.callbacks.BackupAndRestore(folder, double_checkpoint=True, delete_checkpoint=False)
            try:
                fit(model, [*without_replays(), backup] + [stop] * bool(stop), epochs=4)
            except KeyboardInterrupt:
                continue
        snapshot = dataclasses.replace(model.optimizer.snapshot(), sample=None)
        states.append((snapshot, [np.asarray(each) for each in (*model.weights, *model.optimizer.variables)]))
    (expected, values), (snapshot, resumed) = states
    assert snapshot == expected
    assert 0 < snapshot.overflow_count < snapshot.step == 80
    for value, other in zip(values, resumed, strict=True):
        np.testing.assert_array_equal(value, other)


HEADER = f'{{"schema":{SCHEMA},"kind":"header"}}\n'


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"something else\n", r"kmp.jsonl:1: JSON is malformed"),
        (b"something else, with no end of line", r"kmp.jsonl:1: JSON is malformed"),
        (b"\xff\xfe\x00binary", r"kmp.jsonl:1: JSON is malformed"),
        (
            b'{"step": 1, "loss": 0.5}\n',
            r"kmp.jsonl:1: Object missing required field `schema`",
        ),
        (b"[" * 100_000, r"kmp.jsonl:1: Expected `object`, got `array`"),
        ((HEADER + '{"step": true}\n').encode(), r"kmp.jsonl:2: Expected `int`, got `bool` - at `\$.step`"),
        (
            (HEADER + '{"step": 1, "sample": 5}\n{"step": 2}\n').encode(),
            r"kmp.jsonl:2: Expected `object`, got `int`",
        ),
        ((HEADER + '{"step": 1}\n{"st\n{"step": 2}\n').encode(), r"kmp.jsonl:3: JSON is malformed"),
    ],
)
def test_foreign_or_corrupt_log_raises_and_is_unchanged(tmp_path, content, match):
    (tmp_path / "kmp.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=match):
        fit(compiled_model(), without_replays(tmp_path))
    assert (tmp_path / "kmp.jsonl").read_bytes() == content
    assert {path.name for path in tmp_path.iterdir()} == {"kmp.jsonl", ".kmp.lock"}


@pytest.mark.parametrize(("owner", "killed_call"), [(log_writer, "_archive"), (LogEncoder, "line")])
def test_kill_while_an_earlier_log_is_archived_loses_no_record(tmp_path, monkeypatch, owner, killed_call):
    model = compiled_model()
    fit(model, without_replays(tmp_path, every_n_steps=2))
    model.save(tmp_path / "model.keras")
    fit(model, without_replays(tmp_path, every_n_steps=2))

    def resume():
        fit(keras.models.load_model(tmp_path / "model.keras"), without_replays(tmp_path, every_n_steps=10))

    with monkeypatch.context() as patched:
        calls = []
        original = getattr(owner, killed_call)

        def kill(*arguments):
            calls.append(1)
            if len(calls) == (1 if killed_call == "_archive" else 5):
                raise KeyboardInterrupt
            return original(*arguments)

        patched.setattr(owner, killed_call, kill)
        with pytest.raises(KeyboardInterrupt):
            resume()
    resume()
    steps = kmp.records.Run.load(tmp_path).series("loss_scale")[0].tolist()
    assert steps == [1, *range(2, 21, 2), 21, 30, 40]
    assert steps_in_tensorboard(tmp_path) == steps


def fit_and_get_warnings(folder, model, caplog):
    caplog.clear()
    with caplog.at_level("WARNING", logger="kmp"):
        fit(model, without_replays(folder, every_n_steps=10))
    # TensorFlow warns of frequent retracing, depending on the tests before.
    return [record.getMessage() for record in caplog.records if record.name == "kmp"]


def test_warning_gives_the_reason_why_a_log_is_archived(tmp_path, caplog):
    model = compiled_model()
    assert fit_and_get_warnings(tmp_path, model, caplog) == []
    with (tmp_path / "kmp.jsonl").open("a") as log:
        log.write('{"step": 2')
    assert fit_and_get_warnings(tmp_path, model, caplog) == [
        f"Moved an earlier log to {tmp_path}/earlier-1: it ends in the middle of a line."
    ]
    assert kmp.records.Run.load(tmp_path).series("loss_scale")[0].tolist() == [1, 10, 20, 21, 30, 40]
    assert (tmp_path / "earlier-1" / "kmp.jsonl").read_text().endswith('{"step": 2')
    assert fit_and_get_warnings(tmp_path, compiled_model(), caplog) == [
        f"Moved an earlier log to {tmp_path}/earlier-2: it goes beyond step 0."
    ]


@pytest.mark.parametrize("content", [HEADER, HEADER[:15]])
def test_log_without_records_is_replaced_without_a_warning(tmp_path, caplog, content):
    (tmp_path / "kmp.jsonl").write_text(content)
    assert fit_and_get_warnings(tmp_path, compiled_model(), caplog) == []
    assert kmp.records.Run.load(tmp_path).series("loss_scale")[0].tolist() == [1, 10, 20]
    assert kmp.records.Run.load(tmp_path).settings["optimizer"] == "SGD"


def test_write_that_fails_before_the_log_is_archived_leaves_it_unchanged(tmp_path):
    fit(compiled_model(), without_replays(tmp_path, every_n_steps=10))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with file_size_limit(100), pytest.warns(UserWarning, match="stops: .*File too large"):
        fit(compiled_model(), without_replays(tmp_path, every_n_steps=10))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_second_fit_continues_the_log_and_a_new_model_archives_it(tmp_path):
    model = compiled_model()
    for _ in range(2):
        fit(model, without_replays(tmp_path, every_n_steps=10))
    assert kmp.records.Run.load(tmp_path).series("loss_scale")[0].tolist() == [1, 10, 20, 21, 30, 40]
    fit(compiled_model(), without_replays(tmp_path, every_n_steps=10))
    assert kmp.records.Run.load(tmp_path).series("loss_scale")[0].tolist() == [1, 10, 20]
    assert kmp.records.Run.load(tmp_path / "earlier-1").series("loss_scale")[0].size == 6
    assert steps_in_tensorboard(tmp_path) == [1, 10, 20]
    assert steps_in_tensorboard(tmp_path / "earlier-1") == [1, 10, 20, 21, 30, 40]


def test_notebook_cell_can_run_again_after_an_interrupt(tmp_path):
    model = compiled_model()
    with pytest.raises(KeyboardInterrupt):
        fit(model, [*without_replays(tmp_path, every_n_steps=2), Interrupt()])
    fit(model, without_replays(tmp_path, every_n_steps=10))
    steps = kmp.records.Run.load(tmp_path).series("loss_scale")[0].tolist()
    assert steps == [1, 2, 4, 6, 7, 10, 20, 26]
    with pytest.raises(KeyboardInterrupt):
        fit(compiled_model(), [*without_replays(tmp_path, every_n_steps=2), Interrupt()])
    fit(compiled_model(), without_replays(tmp_path, every_n_steps=10))
    assert kmp.records.Run.load(tmp_path).series("loss_scale")[0].tolist() == [1, 10, 20]


def test_notebook_cell_that_failed_at_its_first_batch_runs_once_it_is_fixed(tmp_path):
    x, _ = small_data()
    with pytest.raises(ValueError, match="incompatible"):
        compiled_model().fit(x[:, :3], x[:, 0], verbose=0, callbacks=without_replays(tmp_path))
    fit(compiled_model(), without_replays(tmp_path, every_n_steps=10))
    assert kmp.records.Run.load(tmp_path).series("loss_scale")[0].tolist() == [1, 10, 20]


@pytest.mark.parametrize("logger", LOGGERS)
def test_log_dir_that_cannot_be_written_raises_before_training(tmp_path, logger):
    (tmp_path / "file").write_text("")
    model = compiled_model()
    fit(model, [])
    with pytest.raises(OSError, match=r"`log_dir` cannot be written.*file/logs"):
        fit(model, [logger(tmp_path / "file" / "logs")])
    assert model.optimizer.snapshot().step == 20
    assert set(fit(model, [logger(tmp_path / "logs")])) & KEYS


def test_log_dir_that_another_process_uses_raises_and_is_unchanged(tmp_path):
    model = compiled_model()
    fit(model, without_replays(tmp_path, every_n_steps=10))
    before = (tmp_path / "kmp.jsonl").read_bytes()
    with folder_locked_by_another_process(tmp_path):
        with pytest.raises(OSError, match="`log_dir` is in use by another process.*Wait until.*another folder"):
            fit(compiled_model(), without_replays(tmp_path, every_n_steps=10))
        fit(compiled_model(), without_replays(tmp_path / "other", every_n_steps=10))
    assert (tmp_path / "kmp.jsonl").read_bytes() == before
    fit(model, without_replays(tmp_path, every_n_steps=10))
    assert kmp.records.Run.load(tmp_path).series("loss_scale")[0].tolist() == [1, 10, 20, 21, 30, 40]


def test_two_paths_to_one_folder_have_one_log_and_one_lock_until_the_last_callback_ends(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    locked = []
    between = keras.callbacks.LambdaCallback(on_train_end=lambda logs: locked.append(is_locked(tmp_path / "folder")))
    loggers = [OverflowCounter(tmp_path / "folder", 10), LossScaleLogger(tmp_path / "link", 10)]
    fit(compiled_model(), [between, loggers[0], between, loggers[1], between])
    assert locked == [True, True, False]
    run = kmp.load_run(tmp_path / "folder")
    assert run.series("overflow_count")[0].tolist() == run.series("loss_scale")[0].tolist() == [1, 10, 20]


def test_log_dir_of_a_killed_process_can_be_used(tmp_path):
    with folder_locked_by_another_process(tmp_path) as process:
        process.kill()
        process.wait()
        fit(compiled_model(), without_replays(tmp_path))


@pytest.mark.filterwarnings("ignore:.*use of fork")
def test_child_process_does_not_keep_the_lock(tmp_path):
    lock = log_writer.LogWriter.check(tmp_path)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.read(reader, 1)
        os._exit(0)
    assert lock.is_locked
    del lock
    gc.collect()
    try:
        assert not is_locked(tmp_path)
    finally:
        os.write(writer, b"x")
        os.waitpid(child, 0)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP])
def test_file_system_without_locks_locks_nothing(tmp_path, monkeypatch, code):
    def fail(*arguments):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", fail)
    assert log_writer.LogWriter.check(tmp_path) is None


def test_full_disk_stops_the_log_and_not_the_training(tmp_path):
    (tmp_path / "kmp.jsonl").symlink_to("/dev/full")
    callbacks = without_replays(tmp_path, every_n_steps=5)
    model = compiled_model()
    with pytest.warns(
        UserWarning, match=r"Logging to .* stops: .*No space left on device.*Training continues"
    ) as caught:
        fit(model, callbacks, epochs=2)
    assert len(caught) == 1
    assert model.optimizer.snapshot().step == 40
    assert callbacks[0].run.series("loss_scale")[0].tolist()[-1] == 40
    fit(model, [])


@pytest.fixture
def tiny_disk(tmp_path):
    """A folder on a disk of 64 KiB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


def test_later_run_continues_the_log_that_a_full_disk_stopped(tiny_disk):
    model, folder = compiled_model(), tiny_disk / "logs"
    with pytest.warns(UserWarning, match="stops.*Training continues"):
        fit(model, [LossScaleLogger(folder, 1), OverflowCounter(folder, 1)], epochs=20)
    assert model.optimizer.snapshot().step == 400
    for events in folder.glob("events.*"):
        events.unlink()
    steps = kmp.records.Run.load(folder, allow_truncated=True).series("loss_scale")[0].tolist()
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 20
    fit(model, without_replays(folder, every_n_steps=10))
    assert kmp.records.Run.load(folder).series("loss_scale")[0].tolist() == [*steps, 401, 410, 420]


@pytest.fixture
def small_budget(monkeypatch):
    """A budget that a few samples exceed."""
    monkeypatch.setattr(Monitor, "budget", 8_000)


def test_interval_of_a_long_run_doubles_in_the_log_and_in_memory(tmp_path, small_budget):
    callbacks = without_replays(tmp_path, every_n_steps=1)
    fit(compiled_model(), callbacks, batches=200)
    run, steps = callbacks[0].run, sampled_steps(tmp_path)
    assert [sample.step for sample in run.samples] == steps
    gaps = [later - earlier for earlier, later in itertools.pairwise(steps)]
    assert gaps == sorted(gaps)
    assert {*gaps[1:-1]} <= {2**doublings for doublings in range(8)}
    assert gaps[-1] >= 4
    assert run.series("loss_scale")[0].tolist() == sorted({*steps, 200})
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 8_000 * 10


def test_resumed_run_continues_with_the_interval_of_its_log(tmp_path, small_budget):
    model = compiled_model()
    fit(model, without_replays(tmp_path, every_n_steps=1), batches=60)
    before = sampled_steps(tmp_path)
    interval = before[-1] - before[-2]
    assert interval >= 4
    callbacks = without_replays(tmp_path, every_n_steps=1)
    fit(model, callbacks, batches=60)
    after = sampled_steps(tmp_path)[len(before) :]
    assert after[0] == 61
    assert all(step % interval == 0 for step in after[1:])
    assert [sample.step for sample in callbacks[0].run.samples] == after


def test_interval_of_a_run_without_a_log_doubles_too_and_a_new_one_starts_in_full(monkeypatch):
    monkeypatch.setattr(Monitor, "budget", 600)
    for reused in ([GradientHistogram(every_n_steps=1)], without_replays(every_n_steps=1)):
        for _ in range(2):
            fit(compiled_model(), reused, batches=60)
            steps = [sample.step for sample in reused[0].run.samples]
            assert steps[:2] == [1, 2]
            assert len(steps) < 25


def test_samples_of_epochs_without_a_due_step_are_thinned(tmp_path, small_budget):
    callbacks = without_replays(tmp_path, every_n_steps=1000)
    fit(compiled_model(), callbacks, batches=2, epochs=40)
    run = callbacks[0].run
    assert [sample.step for sample in run.samples] == sampled_steps(tmp_path)
    assert 2 < len(run.samples) < 25
    assert run.series("overflow_count")[0][-3:].tolist() == [76, 78, 80]  # each epoch has a record


def test_overflow_counts_by_variable_are_recorded_when_they_change(tmp_path):
    optimizer = kmp.LossScaleOptimizer("sgd", initial_scale=2.0**28, growth_interval=2)
    fit(compiled_model(optimizer), without_replays(tmp_path, every_n_steps=1, on_stuck="ignore"), batches=80)
    rows = [row for row in kmp.load_run(tmp_path).rows if "overflow_count" in row]
    counted = [row for row in rows if "overflows_by_variable" in row]
    overflows = [row["overflow_count"] for row in counted]
    assert overflows == sorted(set(overflows)) == sorted({row["overflow_count"] for row in rows} - {0})
    snapshot = optimizer.snapshot()
    assert counted[-1]["overflows_by_variable"] == snapshot.overflows_by_variable
    assert counted[-1]["overflow_origins_by_variable"] == snapshot.overflow_origins_by_variable
    assert sum(snapshot.overflow_origins_by_variable.values()) == overflows[-1] - snapshot.nonfinite_loss_count


def test_metrics_of_epochs_are_recorded_once(tmp_path):
    class Nothing(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs |= {"text": "no number", "undefined": float("nan")}

    x, y = small_data()
    callbacks = without_replays(tmp_path, every_n_steps=5)
    with kmp.enable():
        model = compiled_model(keras.optimizers.SGD(0.25))
    history = model.fit(
        x, y, validation_data=(x, y), epochs=3, batch_size=8, verbose=0, callbacks=[Nothing(), *callbacks]
    )
    for run in (callbacks[0].run, kmp.load_run(tmp_path)):
        assert [row["epoch"] for row in run.rows if "metrics" in row] == [0, 1, 2]
        assert sorted(run.metrics) == ["learning_rate", "loss", "undefined", "val_loss"]
        for name in ("loss", "val_loss"):
            assert run.metrics[name][1].tolist() == history.history[name]
        assert run.metrics["learning_rate"][1].tolist() == [0.25] * 3
        assert run.metrics["loss"][0].tolist() == [len(x) // 8 * epoch for epoch in (1, 2, 3)]
        assert np.isnan(run.metrics["undefined"][1]).all()
        assert {"epoch", "val_loss"} <= set(run.table().dtype.names)


def test_gradient_that_is_all_zero_has_a_bucket_of_its_own(tmp_path):
    with tf.summary.create_file_writer(str(tmp_path)).as_default(step=1):
        zeros = np.bincount([ZERO_BIN] * 7, minlength=BIN_COUNT)
        write_histograms(1, {"dead": kmp.records.ExponentHistogram(zeros, step=1, loss_scale=1.0)})
    tag = EventAccumulator(str(tmp_path), {"tensors": 0}).Reload().Tensors("dead")[0]
    assert tf.make_ndarray(tag.tensor_proto).tolist() == [[FIRST_EXPONENT - 1, FIRST_EXPONENT, 7]]


def test_second_run_of_a_model_that_its_first_step_builds_has_its_layers(tmp_path):
    x, y = small_data()
    for _ in range(2):
        with kmp.enable():
            model = keras.Sequential([keras.layers.Dense(2), kmp.layers.Softmax()])
            model.compile("sgd", "sparse_categorical_crossentropy")
        callbacks = without_replays(tmp_path, every_n_steps=5)
        model.fit(x, y, batch_size=8, verbose=0, callbacks=callbacks)
        settings = kmp.load_run(tmp_path).settings
        assert list(settings["layers"].values()) == ["Dense", "Softmax"]
        assert settings["variable_dtypes"] == ["float32"]


def test_metrics_of_a_second_model_with_the_same_callbacks_are_recorded(tmp_path):
    callbacks = without_replays(tmp_path, every_n_steps=5)
    for _ in range(2):
        fit(compiled_model(), callbacks)
        assert list(callbacks[0].run.metrics) == ["learning_rate", "loss"]


def test_metrics_that_a_log_cannot_hold_are_left_out(tmp_path):
    class Huge(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs |= {"huge": 1e300} | {f"m{number}": 1.0 for number in range(1100)}

    fit(compiled_model(), [Huge(), *without_replays(tmp_path, every_n_steps=5)])
    metrics = kmp.load_run(tmp_path).metrics
    assert len(metrics) == 1000
    assert np.isnan(metrics["huge"][1]).all()


class Harm(keras.callbacks.Callback):
    """Damages the log in the fourth step."""

    def __init__(self, harm):
        super().__init__()
        self.harm = harm

    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            self.harm()


@pytest.mark.parametrize("how", ["folder deleted", "file deleted", "folder moved", "file truncated"])
def test_log_that_is_lost_during_the_training_is_written_again_with_a_warning(tmp_path, how):
    folder, file = tmp_path / "log", tmp_path / "log" / "kmp.jsonl"
    harm = {
        "folder deleted": lambda: shutil.rmtree(folder),
        "file deleted": file.unlink,
        "folder moved": lambda: folder.rename(tmp_path / "moved"),
        "file truncated": lambda: file.write_bytes(b""),
    }[how]
    callbacks = without_replays(folder, every_n_steps=1)
    with pytest.warns(UserWarning, match="was deleted, moved or truncated during the training"):
        fit(compiled_model(), [Harm(harm), *callbacks], batches=8)
    rows = kmp.load_run(folder).rows
    assert [row["step"] for row in rows] == [row["step"] for row in callbacks[0].run.rows]
    assert steps_in_tensorboard(folder) == list(range(1, 9))
