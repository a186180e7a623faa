import contextlib
import dataclasses
import errno
import fcntl
import gc
import itertools
import json
import os
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from built_runs import sample_from
from conftest import (
    Interrupt,
    compiled_model,
    file_size_limit,
    fit,
    folder_locked_by_another_process,
    is_locked,
    sequential,
    small_data,
    tensorboard,
    user_warnings,
    without_replays,
)
from models import OwnStep
from msgspec import UNSET
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import kmp
from kmp.callbacks import (
    GradientHistogram,
    LossScaleLogger,
    OverflowCounter,
    log_writer,
    recorder,
)
from kmp.callbacks.tensorboard_events import histograms_by_tag, write_histograms
from kmp.records import BIN_COUNT
from kmp.records.exponent_histogram import FIRST_EXPONENT, ZERO_BIN
from kmp.records.jsonl import LogEncoder, to_line
from kmp.records.log_schema import SCHEMA

pytestmark = pytest.mark.usefixtures("enabled")

# The steps of two trainings that follow each other, and of a third, recorded every 10 steps.
TWICE = [1, 2, 4, 8, 10, 20, 21, 22, 24, 28, 30, 40]
THIRD = [41, 42, 44, 48, 50, 60]


def logged_steps(folder):
    return kmp.load_run(folder).series("loss_scale")[0].tolist()


def sampled_steps(folder):
    return [histogram.step for histogram in kmp.load_run(folder).histograms]


def steps_in_tensorboard(folder):
    return [event.step for event in tensorboard(folder, "kmp/log2_loss_scale")]


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32"])
def test_tensorboard_has_no_curve_of_a_loss_scale_that_stays_at_1(policy, tmp_path):
    with kmp.enable(policy):
        callbacks = without_replays(tmp_path, every_n_steps=5)
        history = fit(compiled_model(), callbacks)
    events = EventAccumulator(str(tmp_path), {"tensors": 0}).Reload()
    tags = {*events.Tags()["tensors"]}
    assert {"kmp/overflow_count", "kmp/grad_norm", "kmp/gradient_exponents"} <= tags
    assert not [tag for tag in tags if "scale" in tag]
    assert history["loss_scale"] == [1.0]
    assert kmp.load_run(tmp_path).format.name == policy.removeprefix("mixed_")


def array_of(event):
    return tf.make_ndarray(event.tensor_proto)


def test_files_have_the_records_of_the_callbacks(tmp_path):
    callbacks = without_replays(tmp_path / "logs", every_n_steps=5)
    fit(compiled_model(), callbacks)
    lines = [
        json.loads(line) for line in (tmp_path / "logs" / "kmp.jsonl").read_text().splitlines()
    ]
    assert (lines[0]["kind"], lines[0]["schema"]) == ("header", SCHEMA)
    run, logged = callbacks[0].run, kmp.load_run(tmp_path / "logs")
    encoder = LogEncoder()
    assert lines[1:] == [json.loads(encoder.line(row)) for row in run.rows]
    assert [*map(to_line, run.rows)] == [*map(to_line, logged.rows)]
    assert ["names" in line["sample"] for line in lines[1:] if "sample" in line] == [
        True,
        *[False] * 6,
    ]
    events = EventAccumulator(str(tmp_path / "logs"), {"tensors": 0}).Reload()
    tags = {*events.Tags()["tensors"]}
    assert {
        "kmp/log2_loss_scale",
        "kmp/overflow_count",
        "kmp/grad_zeros",
        "kmp/gradient_exponents",
    } <= tags
    assert [e.step for e in events.Tensors("kmp/log2_loss_scale")] == [1, 2, 4, 5, 10, 15, 20]
    buckets = array_of(events.Tensors("kmp/gradient_exponents")[0])
    assert buckets[:, 2].sum() == run.histograms[0].by_exponent.sum()
    assert buckets[:, 1].tolist() == (buckets[:, 0] + 1).tolist()
    layers = run.samples[0].by_layer()
    # Not numbered on from earlier models.
    by_layer = sorted(tag for tag in tags if tag.startswith("kmp_by_layer/"))
    assert by_layer == ["kmp_by_layer/sequential/dense", "kmp_by_layer/sequential/dense_1"]
    for name, tag in zip(layers, by_layer, strict=True):
        assert array_of(events.Tensors(tag)[0])[:, 2].sum() == layers[name].by_exponent.sum()
        assert events.SummaryMetadata(tag).plugin_data.plugin_name == "histograms"
    assert (
        array_of(events.Tensors("kmp/verdict")[-1]).item().decode()
        == f"```\n{kmp.advise(run)}\n```"
    )


def test_verdict_is_that_of_the_whole_log_and_its_failure_is_a_warning(tmp_path):
    model = compiled_model()
    for _ in range(2):
        fit(model, without_replays(tmp_path, every_n_steps=10))
    first, second = sorted(tensorboard(tmp_path, "kmp/verdict"), key=lambda event: event.step)
    assert (first.step, second.step) == (20, 40)
    assert "of 40 steps" in array_of(second).item().decode()

    def edit(logs):
        with (tmp_path / "kmp.jsonl").open("a") as log:
            log.write("edited\n")

    edited = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: edit(logs))
    with pytest.warns(UserWarning, match="text tab has no verdict: .*JSON is malformed"):
        fit(model, [edited, *without_replays(tmp_path, every_n_steps=10)])
    assert model.optimizer.snapshot().step == 60


def test_histograms_are_of_layers_with_a_finite_gradient_and_zeros_have_a_bucket_of_their_own(
    tmp_path,
):
    variables = {
        "a/kernel": {"inf": 4, "update_norm": 1.0},
        "b/kernel": {"zero": 4, "update_norm": 0.0},
    }
    assert list(histograms_by_tag(sample_from(1, 8.0, variables), {})) == [
        "kmp/gradient_exponents",
        "kmp_by_layer/b",
    ]
    without_update = sample_from(1, 8.0, {"b/kernel": {"zero": 4}})
    assert list(histograms_by_tag(without_update, {})) == ["kmp/gradient_exponents"]
    with tf.summary.create_file_writer(str(tmp_path)).as_default(step=1):
        zeros = np.bincount([ZERO_BIN] * 7, minlength=BIN_COUNT)
        write_histograms(1, {"dead": kmp.records.ExponentHistogram(zeros, step=1, loss_scale=1.0)})
    assert array_of(tensorboard(tmp_path, "dead")[0]).tolist() == [
        [FIRST_EXPONENT - 1, FIRST_EXPONENT, 7]
    ]


def end_of_a_training(folder, stops, is_backup_first=False):
    """Returns the state and the logged steps after two epochs.

    Each of the `stops` but the last interrupts them.
    """
    for stop in stops:
        keras.backend.clear_session()  # equal names
        keras.utils.set_random_seed(0)
        optimizer = kmp.LossScaleOptimizer(
            keras.optimizers.SGD(momentum=0.9), initial_scale=2.0**20, growth_interval=3
        )
        model = compiled_model(optimizer, run_eagerly=True)
        options = {"double_checkpoint": not is_backup_first, "delete_checkpoint": False}
        backup = keras.callbacks.BackupAndRestore(folder / "backup", **options)
        loggers = without_replays(folder, every_n_steps=4)
        callbacks = [backup, *loggers] if is_backup_first else [*loggers, backup]
        with contextlib.suppress(KeyboardInterrupt):
            fit(model, callbacks + [stop] * bool(stop), batches=8, epochs=2)
    variables = [np.asarray(each) for each in (*model.weights, *model.optimizer.variables)]
    return (
        dataclasses.replace(model.optimizer.snapshot(), sample=None),
        variables,
        logged_steps(folder),
    )


def test_run_that_resumes_with_the_backup_of_keras_ends_as_one_that_was_not_interrupted(tmp_path):
    snapshot, variables, steps = end_of_a_training(tmp_path / "whole", [None])
    assert 0 < snapshot.overflow_count < snapshot.step == 16
    for is_backup_first in (False, True):
        folder = tmp_path / f"backup {is_backup_first}"
        resumed = end_of_a_training(folder, [Interrupt(epoch=1), None], is_backup_first)
        assert resumed[0] == snapshot
        np.testing.assert_equal(resumed[1], variables)
        # And the first steps after the resume.
        assert resumed[2] == sampled_steps(folder) == sorted([*steps, 9, 10])


HEADER = f'{{"schema":{SCHEMA},"kind":"header"}}\n'


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"something else, with no end of line", r"kmp.jsonl:1: JSON is malformed"),
        (b'{"step": 1, "loss": 0.5}\n', r"kmp.jsonl:1: Object missing required field `schema`"),
        (HEADER.encode() + b'{"step": 1}\n{"st\n{"step": 2}\n', r"kmp.jsonl:3: JSON is malformed"),
    ],
)
def test_foreign_or_corrupt_log_raises_and_is_unchanged(tmp_path, content, match):
    (tmp_path / "kmp.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=match):
        fit(compiled_model(), [LossScaleLogger(tmp_path)])
    assert (tmp_path / "kmp.jsonl").read_bytes() == content
    assert {path.name for path in tmp_path.iterdir()} == {"kmp.jsonl", ".kmp.lock"}


@pytest.mark.parametrize(
    ("owner", "killed_call", "at"), [(log_writer, "_archive", 1), (LogEncoder, "line", 5)]
)
def test_resume_from_an_older_checkpoint_archives_the_later_records_and_a_kill_meanwhile_loses_none(
    tmp_path, monkeypatch, owner, killed_call, at
):
    model = compiled_model(run_eagerly=True)
    fit(model, without_replays(tmp_path, every_n_steps=2), batches=6)
    model.save(tmp_path / "model.keras")
    fit(model, without_replays(tmp_path, every_n_steps=2), batches=6)
    before = logged_steps(tmp_path)

    def resume():
        loaded = keras.models.load_model(tmp_path / "model.keras")
        fit(loaded, without_replays(tmp_path, every_n_steps=5), batches=6)

    with monkeypatch.context() as patched:
        calls, original = itertools.count(1), getattr(owner, killed_call)

        def kill(*arguments):
            if next(calls) == at:
                raise KeyboardInterrupt
            return original(*arguments)

        patched.setattr(owner, killed_call, kill)
        with pytest.raises(KeyboardInterrupt):
            resume()
    resume()
    assert logged_steps(tmp_path) == steps_in_tensorboard(tmp_path) == [1, 2, 4, 6, 7, 8, 10, 12]
    assert logged_steps(tmp_path / "earlier-1") == before == [1, 2, 4, 6, 7, 8, 10, 12]


def fit_and_get_warnings(folder, model, caplog):
    caplog.clear()
    with caplog.at_level("WARNING", logger="kmp"):
        fit(model, [LossScaleLogger(folder, 10)])
    # TensorFlow warns of frequent retracing, depending on the tests before.
    return [record.getMessage() for record in caplog.records if record.name == "kmp"]


def test_second_fit_continues_the_log_or_archives_one_that_cannot_be_continued_and_says_why(
    tmp_path, caplog
):
    model = compiled_model()
    for _ in range(2):
        assert fit_and_get_warnings(tmp_path, model, caplog) == []
    assert logged_steps(tmp_path) == steps_in_tensorboard(tmp_path) == TWICE
    with (tmp_path / "kmp.jsonl").open("a") as log:
        log.write('{"step": 2')
    assert fit_and_get_warnings(tmp_path, model, caplog) == [
        f"Moved an earlier log to {tmp_path}/earlier-1: it ends in the middle of a line."
    ]
    assert logged_steps(tmp_path) == [*TWICE, *THIRD]
    assert (tmp_path / "earlier-1" / "kmp.jsonl").read_text().endswith('{"step": 2')
    assert fit_and_get_warnings(tmp_path, compiled_model(), caplog) == [
        f"Moved an earlier log to {tmp_path}/earlier-2: it goes beyond step 0."
    ]
    earlier = tmp_path / "earlier-2"
    for folder, steps in ((tmp_path, TWICE[:6]), (earlier, [*TWICE, *THIRD])):
        assert logged_steps(folder) == steps_in_tensorboard(folder) == steps


def test_log_without_records_is_replaced_without_a_warning(tmp_path, caplog):
    model = compiled_model()
    for start, content in ((0, HEADER), (20, HEADER[:15])):
        (tmp_path / "kmp.jsonl").write_text(content)
        assert fit_and_get_warnings(tmp_path, model, caplog) == []
        assert logged_steps(tmp_path) == [start + step for step in TWICE[:6]]
        assert kmp.load_run(tmp_path).settings.optimizer == "SGD"


def test_write_that_fails_before_the_log_is_archived_leaves_it_unchanged(tmp_path):
    fit(compiled_model(run_eagerly=True), [LossScaleLogger(tmp_path)], batches=1)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with file_size_limit(100), pytest.warns(UserWarning, match="stops: .*File too large"):
        fit(compiled_model(run_eagerly=True), [LossScaleLogger(tmp_path)], batches=1)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_notebook_cell_can_run_again_after_an_interrupt_or_a_failure_at_its_first_batch(tmp_path):
    model = compiled_model(run_eagerly=True)
    with pytest.raises(KeyboardInterrupt):
        fit(model, [LossScaleLogger(tmp_path, 2), Interrupt()])
    fit(model, [LossScaleLogger(tmp_path, 5)], batches=6)
    assert logged_steps(tmp_path) == [1, 2, 4, 6, 7, 8, 10, 12]
    with pytest.raises(KeyboardInterrupt):
        fit(compiled_model(run_eagerly=True), [LossScaleLogger(tmp_path, 2), Interrupt()])
    model, (x, _) = compiled_model(run_eagerly=True), small_data()
    with pytest.raises(ValueError, match="incompatible") as caught:
        model.fit(x[:, :3], x[:, 0], verbose=0, callbacks=[LossScaleLogger(tmp_path)])
    # While the traceback holds the callbacks.
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    fit(model, [LossScaleLogger(tmp_path, 5)], batches=6)
    assert logged_steps(tmp_path) == [1, 2, 4, 5, 6]
    assert caught.traceback


def test_log_dir_that_cannot_be_written_raises_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    model = compiled_model()
    with pytest.raises(OSError, match=r"`log_dir` cannot be written.*file/logs"):
        fit(model, [LossScaleLogger(tmp_path / "file" / "logs")])
    assert model.optimizer.snapshot().step == 0


def test_log_dir_that_another_process_uses_raises_and_is_unchanged_until_that_process_is_killed(
    tmp_path,
):
    model = compiled_model()
    fit(model, [LossScaleLogger(tmp_path, 10)])
    before = (tmp_path / "kmp.jsonl").read_bytes()
    with folder_locked_by_another_process(tmp_path) as process:
        with pytest.raises(
            OSError, match="`log_dir` is in use by another process.*Wait until.*another folder"
        ):
            fit(compiled_model(), [LossScaleLogger(tmp_path, 10)])
        fit(model, [LossScaleLogger(tmp_path / "other", 10)])
        assert (tmp_path / "kmp.jsonl").read_bytes() == before
        process.kill()
        process.wait()
        last = LossScaleLogger(tmp_path, 10)
        fit(model, [last])
    assert logged_steps(tmp_path) == [*TWICE[:6], *THIRD]
    assert not is_locked(tmp_path)  # while `last` exists


def open_files(folder):
    """The logs in a folder that this process has open."""
    used = [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()]
    return [name for name in used if name.startswith(str(folder)) and not name.endswith(".lock")]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs a list of open files")
def test_two_callbacks_in_one_folder_are_an_error(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    loggers = [OverflowCounter(tmp_path / "folder", 2), LossScaleLogger(tmp_path / "link", 2)]
    with pytest.raises(
        ValueError, match="`log_dir` is in use by another callback.*Monitor writes all records"
    ):
        fit(compiled_model(run_eagerly=True), loggers)
    assert open_files(tmp_path / "folder") == []
    fit(compiled_model(run_eagerly=True), loggers[1:], batches=4)
    assert logged_steps(tmp_path / "folder") == [1, 2, 4]


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


def test_file_system_without_locks_locks_nothing(tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    assert log_writer.LogWriter.check(tmp_path) is None


def test_full_disk_stops_the_log_and_not_the_training(tmp_path):
    (tmp_path / "kmp.jsonl").symlink_to("/dev/full")
    logger = LossScaleLogger(tmp_path, 1)
    with pytest.warns(
        UserWarning, match=r"Logging to .* stops: .*No space left on device.*Training continues"
    ):
        fit(compiled_model(run_eagerly=True), [logger], batches=3)
    assert logger.run.series("loss_scale")[0].tolist() == [1, 2, 3]


def test_reached_quota_stops_the_log_and_not_the_training_and_a_later_run_continues_the_log(
    tmp_path,
):
    # XLA writes files.
    model, callbacks = (compiled_model(jit_compile=False), [LossScaleLogger(tmp_path, 1)])
    with (
        file_size_limit(4_000),
        pytest.warns(UserWarning, match="Logging .*File too large.*Training continues") as caught,
    ):
        fit(model, callbacks, batches=60)
    assert len(user_warnings(caught)) == 1
    assert model.optimizer.snapshot().step == callbacks[0].run.last("step") == 60
    steps = logged_steps(tmp_path)
    assert steps == list(range(1, len(steps) + 1))
    assert 5 < len(steps) < 60
    fit(model, [LossScaleLogger(tmp_path, 10)])
    assert logged_steps(tmp_path) == [*steps, 61, 62, 64, 68, 70, 80]


@pytest.fixture
def small_budget(monkeypatch):
    """A budget that a few samples exceed."""
    monkeypatch.setattr(recorder, "BUDGET", 4_000)


def test_interval_of_a_long_run_doubles_in_the_log_and_in_memory_and_a_resumed_run_keeps_it(
    tmp_path, small_budget
):
    callbacks, model = without_replays(tmp_path, every_n_steps=1), compiled_model()
    fit(model, callbacks, batches=100)
    run, steps = callbacks[0].run, sampled_steps(tmp_path)
    assert [sample.step for sample in run.samples] == steps
    gaps = [later - earlier for earlier, later in itertools.pairwise(steps)]
    assert gaps == sorted(gaps)
    assert {*gaps[1:-1]} <= {2**doublings for doublings in range(8)}
    assert gaps[-1] >= 4
    assert run.series("loss_scale")[0].tolist() == sorted({*steps, 100})
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 4_000 * 10
    callbacks = without_replays(tmp_path, every_n_steps=1)
    fit(model, callbacks, batches=30)
    after = sampled_steps(tmp_path)[len(steps) :]
    assert after[0] == 101
    assert all(step % gaps[-1] == 0 for step in after[1:])
    assert [sample.step for sample in callbacks[0].run.samples] == after


def test_interval_of_a_run_without_a_log_doubles_too_and_a_new_one_starts_in_full(monkeypatch):
    monkeypatch.setattr(recorder, "BUDGET", 300)
    histogram, reused = (
        GradientHistogram(every_n_steps=1),
        without_replays(every_n_steps=1),
    )
    for _ in range(2):
        model = sequential(keras.layers.Dense(1), run_eagerly=True)
        fit(model, [histogram, *reused], batches=12)
        for callback in (histogram, reused[0]):
            steps = [sample.step for sample in callback.run.samples]
            assert steps[:2] == [1, 2]
            assert len(steps) < 8


def test_samples_of_epochs_without_a_due_step_are_thinned(tmp_path, small_budget):
    callbacks = without_replays(tmp_path, every_n_steps=1000)
    fit(compiled_model(), callbacks, batches=1, epochs=15)
    run = callbacks[0].run
    assert [sample.step for sample in run.samples] == sampled_steps(tmp_path)
    assert 2 < len(run.samples) < 10
    assert run.series("overflow_count")[0].tolist() == list(range(1, 16))  # each epoch has a record


def test_overflow_counts_by_variable_are_recorded_when_they_change(tmp_path):
    optimizer = kmp.LossScaleOptimizer("sgd", initial_scale=2.0**28, growth_interval=2)
    fit(
        compiled_model(optimizer),
        without_replays(tmp_path, every_n_steps=1, on_nonfinite="ignore"),
        batches=20,
    )
    rows = [row for row in kmp.load_run(tmp_path).rows if row.overflow_count is not UNSET]
    counted = [row for row in rows if row.overflows_by_variable]
    overflows = [row.overflow_count for row in counted]
    assert overflows == sorted(set(overflows)) == sorted({row.overflow_count for row in rows} - {0})
    snapshot = optimizer.snapshot()
    assert counted[-1].overflows_by_variable == snapshot.overflows_by_variable
    assert counted[-1].overflow_origins_by_variable == snapshot.overflow_origins_by_variable
    assert (
        sum(snapshot.overflow_origins_by_variable.values())
        == overflows[-1] - snapshot.nonfinite_loss_count
    )


def adds(**values):
    """Returns a callback that adds values to the logs of each epoch."""
    return keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(values))


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_training_whose_first_epoch_has_no_batch_is_logged(tmp_path):
    x, y = small_data(3)
    batches = iter([[], zip(np.split(x, 3), np.split(y, 3), strict=True)])
    shapes = tf.TensorSpec((8, 4), tf.float32), tf.TensorSpec((8,), tf.int32)
    data = tf.data.Dataset.from_generator(lambda: next(batches), output_signature=shapes)
    model = compiled_model(run_eagerly=True)
    model.fit(data, epochs=2, shuffle=False, verbose=0, callbacks=without_replays(tmp_path))
    assert logged_steps(tmp_path) == [1]


def test_metrics_of_epochs_are_recorded_once(tmp_path):
    (x, y), callbacks = small_data(3), without_replays(tmp_path, every_n_steps=5)
    added = adds(text="no number", undefined=float("nan"), huge=1e300)
    options = {"validation_data": (x, y), "epochs": 3, "batch_size": 8, "verbose": 0}
    model = compiled_model(keras.optimizers.SGD(0.25), run_eagerly=True)
    history = model.fit(x, y, callbacks=[added, *callbacks], **options)
    for run in (callbacks[0].run, kmp.load_run(tmp_path)):
        assert [row.epoch for row in run.rows if row.metrics] == [0, 1, 2]
        assert sorted(run.metrics) == ["huge", "learning_rate", "loss", "undefined", "val_loss"]
        for name in ("loss", "val_loss"):
            assert run.metrics[name][1].tolist() == history.history[name]
        assert run.metrics["learning_rate"][1].tolist() == [0.25] * 3
        assert run.metrics["loss"][0].tolist() == [len(x) // 8 * epoch for epoch in (1, 2, 3)]
        assert np.isnan(run.metrics["undefined"][1]).all()
        assert {"epoch", "val_loss"} <= set(run.table().dtype.names)
    assert np.isnan(run.metrics["huge"][1]).all()  # a log cannot hold it


def test_metrics_beyond_a_thousand_are_left_out(tmp_path):
    many = adds(**{f"m{number}": 1.0 for number in range(1100)})
    fit(compiled_model(run_eagerly=True), [many, *without_replays(tmp_path)], batches=2)
    assert len(kmp.load_run(tmp_path).metrics) == 1000


def test_layers_that_the_first_step_builds_have_their_final_paths_also_in_a_second_run(tmp_path):
    class Classifier(keras.Model):
        def __init__(self):
            super().__init__(name="classifier")
            self.hidden, self.unused = (
                keras.layers.Dense(2, name="hidden"),
                keras.layers.Dense(2, name="unused"),
            )

        def build(self, input_shape):
            self.built = True  # but no layer is

        def call(self, x):
            return keras.ops.softmax(self.hidden(x))

    for _ in range(2):
        model = Classifier()
        model.build((None, 4))
        model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
        fit(model, without_replays(tmp_path), batches=2)
        settings = kmp.load_run(tmp_path).settings
        assert settings.layers == {"classifier/hidden": "Dense", "unused": "Dense"}
        assert settings.variable_dtypes == ["float32"]


@pytest.mark.parametrize("trained", [2, 4])
def test_variables_that_a_loop_does_not_pass_to_the_optimizer_are_recorded(trained, tmp_path):
    optimizer = kmp.wrap("sgd")
    layers = [keras.layers.Dense(2, name="first"), keras.layers.Dense(1, name="last")]
    model = keras.Sequential([keras.Input((4,)), *layers], name="net")
    model.compile(optimizer)
    variables = model.trainable_variables[-trained:]
    callbacks = keras.callbacks.CallbackList(without_replays(tmp_path), model=model)
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    for index in range(2):
        callbacks.on_train_batch_begin(index)
        gradients = [tf.ones_like(variable) for variable in variables]
        optimizer.apply(gradients, variables, unscaled=True)
        callbacks.on_train_batch_end(index)
    callbacks.on_train_end()
    settings = kmp.load_run(tmp_path).settings
    missing = ["net/first/kernel", "net/first/bias"] if trained == 2 else []
    assert settings.untrained_variables == missing
    assert settings.next_layers == {"net/first": ["net/last"], "net/last": []}


def test_model_whose_step_calls_only_its_parts_is_recorded(tmp_path):
    class Parts(OwnStep):
        def __init__(self):
            super().__init__()
            layers = [keras.layers.Dense(3), keras.layers.Dense(2, dtype="float32")]
            self.part = keras.Sequential([keras.Input((4,)), *layers])

        def loss_of(self, x, y):
            return keras.ops.mean(self.part(x) ** 2)

    model = Parts()
    model.compile(kmp.wrap("sgd"), run_eagerly=True)
    fit(model, without_replays(tmp_path), batches=2)
    assert not model.built
    assert kmp.load_run(tmp_path).settings.parameters == 23


def test_log_that_is_lost_during_the_training_ends_with_a_warning_and_the_run_has_all(tmp_path):
    lose = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: (tmp_path / "kmp.jsonl").unlink(missing_ok=True)
    )
    callbacks = without_replays(tmp_path, every_n_steps=1)
    with pytest.warns(UserWarning, match="stops: the log was deleted or moved. Training cont"):
        fit(compiled_model(run_eagerly=True), [lose, *callbacks], batches=4)
    assert callbacks[0].run.series("loss_scale")[0].tolist() == [1, 2, 3, 4]


def cut(log, size):
    log.write_bytes(log.read_bytes()[:size])  # the same file


def replaced_by(log, content):
    other = log.with_suffix(".other")
    other.write_bytes(content)
    other.replace(log)


CHANGES = {
    "emptied": (lambda log: cut(log, 0), 0),
    "cut in the header": (lambda log: cut(log, 20), 0),
    "cut in the last record": (lambda log: cut(log, -20), 2),
    "cut after a record": (lambda log: cut(log, log.read_bytes().rindex(b'{"step":3')), 2),
    "saved by an editor": (lambda log: replaced_by(log, log.read_bytes()), 3),
    "without its first lines": (lambda log: replaced_by(log, log.read_bytes()[2000:]), 0),
}


@pytest.mark.parametrize(("change", "kept"), CHANGES.values(), ids=CHANGES)
def test_log_that_another_program_changes_goes_on_with_what_is_left(tmp_path, change, kept):
    log = tmp_path / "kmp.jsonl"
    change_once = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: change(log) if batch == 2 else None
    )
    callbacks = [*without_replays(tmp_path, every_n_steps=1), change_once]
    with pytest.warns(UserWarning, match="truncated or replaced") as caught:
        fit(compiled_model(run_eagerly=True), callbacks, batches=6)
    assert len([each for each in caught if "truncated" in str(each.message)]) == 1
    run, complete = kmp.load_run(tmp_path), callbacks[0].run
    assert f"after the {kept} records" in str(caught[0].message)
    later = [row.step for row in complete.rows if row.step > 3]
    assert [row.step for row in run.rows][kept:] == later
    assert run.header == complete.header
    assert [each.names for each in run.samples] == [run.samples[-1].names] * len(run.samples)
    assert steps_in_tensorboard(tmp_path)[-3:] == [4, 5, 6]


def test_loaded_log_has_all_settings_and_all_keys_of_its_records(tmp_path):
    parts = keras.layers.Dense(4), keras.layers.Dense(1)
    model = sequential(*parts, optimizer=keras.optimizers.SGD(clipnorm=1))
    (monitor,) = kmp.callbacks.defaults(tmp_path, every_n_steps=2)
    model.fit(np.ones((64, 4)), np.ones((64, 1)), batch_size=8, verbose=0, callbacks=[monitor])
    loaded = kmp.load_run(tmp_path)
    assert monitor.run.settings.clips is True
    assert loaded.settings == monitor.run.settings
    assert [*map(to_line, loaded.rows)] == [*map(to_line, monitor.run.rows)]
    assert loaded.replays == monitor.run.replays
