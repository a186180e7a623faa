import errno
import json
import os
import subprocess

import keras
import pytest
import tensorflow as tf
from conftest import Interrupt, compiled_model, fit, small_data
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import kmp
from kmp.callbacks import GradientHistogram, LossScaleLogger, OverflowCounter, defaults, log_writer

pytestmark = pytest.mark.usefixtures("enabled")

KEYS = {"loss_scale", "overflow_count", "grad_zeros"}
KINDS = [LossScaleLogger, OverflowCounter, GradientHistogram]


def test_files_hold_what_the_callbacks_read(tmp_path):
    callbacks = defaults(tmp_path / "logs", every_n_steps=5)
    fit(compiled_model(), callbacks)
    lines = [json.loads(line) for line in (tmp_path / "logs" / "kmp.jsonl").read_text().splitlines()]
    assert (lines[0]["kind"], lines[0]["schema"]) == ("header", 2)
    assert lines[1:] == kmp.records.Run.load(tmp_path / "logs").rows
    assert lines[1:] == callbacks[0].run.rows
    events = EventAccumulator(str(tmp_path / "logs"), {"tensors": 0}).Reload()
    assert {"kmp/loss_scale", "kmp/overflow_count", "kmp/grad_zeros", "kmp/gradient_exponents"} <= set(
        events.Tags()["tensors"]
    )
    assert [e.step for e in events.Tensors("kmp/loss_scale")] == [1, 5, 10, 15, 20]
    buckets = tf.make_ndarray(events.Tensors("kmp/gradient_exponents")[0].tensor_proto)
    first = callbacks[2].run.histograms[0]
    assert buckets[:, 2].sum() == first.by_exponent.sum()
    assert buckets[:, 1].tolist() == (buckets[:, 0] + 1).tolist()
    layers = callbacks[2].run.samples[0].by_layer()
    by_layer = {tag.removeprefix("kmp_by_layer/"): tag for tag in events.Tags()["tensors"] if "kmp_by_layer/" in tag}
    assert set(by_layer) == set(layers)
    for name, tag in by_layer.items():
        buckets = tf.make_ndarray(events.Tensors(tag)[0].tensor_proto)
        assert buckets[:, 2].sum() == layers[name].by_exponent.sum()
        assert events.SummaryMetadata(tag).plugin_data.plugin_name == "histograms"


def steps_in_tensorboard(folder):
    events = EventAccumulator(str(folder), {"tensors": 0}).Reload()
    return [event.step for event in events.Tensors("kmp/loss_scale")]


def test_going_back_to_an_older_checkpoint_sets_aside_what_lies_beyond_it(tmp_path):
    model = compiled_model()
    fit(model, defaults(tmp_path / "logs", every_n_steps=10))
    model.save(tmp_path / "model.keras")
    fit(model, defaults(tmp_path / "logs", every_n_steps=10))
    loaded = keras.models.load_model(tmp_path / "model.keras")
    fit(loaded, defaults(tmp_path / "logs", every_n_steps=15))
    assert kmp.records.Run.load(tmp_path / "logs").series("loss_scale")[0].tolist() == [1, 10, 20, 21, 30, 40]
    assert steps_in_tensorboard(tmp_path / "logs") == [1, 10, 20, 21, 30, 40]
    assert kmp.records.Run.load(tmp_path / "logs" / "earlier-1").series("loss_scale")[0].size == 6


@pytest.mark.parametrize("kmp_first", [True, False])
def test_resumed_run_goes_on_in_the_log_wherever_the_backup_callback_stands(tmp_path, kmp_first):
    for stop in (Interrupt(epoch=1), None):
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
        mine = defaults(tmp_path / "logs", every_n_steps=10)
        callbacks = [*mine, backup] if kmp_first else [backup, *mine]
        try:
            fit(compiled_model(), callbacks + [stop] * bool(stop), epochs=3)
        except KeyboardInterrupt:
            continue
    run = kmp.records.Run.load(tmp_path / "logs")
    assert run.series("loss_scale")[0].tolist() == [1, 10, 20, 21, 30, 40, 50, 60]
    assert [histogram.step for histogram in run.histograms] == [1, 10, 20, 21, 30, 40, 50, 60]


HEADER = '{"schema":2,"kind":"header"}\n'


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"something else\n", r"kmp.jsonl:1: not a line of JSON"),
        (b"something else, with no end of line", r"kmp.jsonl:1: not a line of JSON"),
        (b"\xff\xfe\x00binary", r"kmp.jsonl: not a log of kmp \(.*decode"),
        (
            b'{"step": 1, "loss": 0.5}\n',
            r"kmp.jsonl:1: a log of kmp begins with a header.",
        ),
        (b"[" * 100_000, r"kmp.jsonl:1: not a line of JSON"),
        ((HEADER + '{"step": true}\n').encode(), r"kmp.jsonl:2: a reading has an integer `step`"),
        ((HEADER + '{"step": 1, "sample": 5}\n{"step": 2}\n').encode(), r"kmp.jsonl:2: not a sample"),
        ((HEADER + '{"step": 1}\n{"st\n{"step": 2}\n').encode(), r"kmp.jsonl:3: not a line of JSON"),
    ],
)
def test_foreign_or_broken_log_is_an_error_and_stays_as_it_was(tmp_path, content, match):
    (tmp_path / "kmp.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=match):
        fit(compiled_model(), defaults(tmp_path))
    assert (tmp_path / "kmp.jsonl").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["kmp.jsonl"]


@pytest.mark.parametrize("step_of_the_kill", ["_set_aside", "to_line"])
def test_kill_while_a_log_is_taken_up_loses_nothing(tmp_path, monkeypatch, step_of_the_kill):
    model = compiled_model()
    fit(model, defaults(tmp_path, every_n_steps=2))
    model.save(tmp_path / "model.keras")
    fit(model, defaults(tmp_path, every_n_steps=2))

    def resumed():
        fit(keras.models.load_model(tmp_path / "model.keras"), defaults(tmp_path, every_n_steps=10))

    with monkeypatch.context() as patched:
        owner, calls = log_writer, []
        original = getattr(owner, step_of_the_kill)

        def killing(*arguments):
            calls.append(1)
            if len(calls) == (1 if step_of_the_kill == "_set_aside" else 5):
                raise KeyboardInterrupt
            return original(*arguments)

        patched.setattr(owner, step_of_the_kill, killing)
        with pytest.raises(KeyboardInterrupt):
            resumed()
    resumed()
    steps = kmp.records.Run.load(tmp_path).series("loss_scale")[0].tolist()
    assert steps == [1, *range(2, 21, 2), 21, 30, 40]
    assert steps_in_tensorboard(tmp_path) == steps


def logged_again(folder, model, caplog):
    caplog.clear()
    with caplog.at_level("WARNING", logger="kmp"):
        fit(model, defaults(folder, every_n_steps=10))
    return [record.getMessage() for record in caplog.records]


def test_what_a_log_is_set_aside_for_is_said(tmp_path, caplog):
    model = compiled_model()
    assert logged_again(tmp_path, model, caplog) == []
    with (tmp_path / "kmp.jsonl").open("a") as log:
        log.write('{"step": 2')
    assert logged_again(tmp_path, model, caplog) == [
        f"Set aside in {tmp_path}/earlier-1: an earlier log that ends in the middle of a line."
    ]
    assert kmp.records.Run.load(tmp_path).series("loss_scale")[0].tolist() == [1, 10, 20, 21, 30, 40]
    assert logged_again(tmp_path, compiled_model(), caplog) == [
        f"Set aside in {tmp_path}/earlier-2: an earlier log that goes beyond step 0."
    ]


@pytest.mark.parametrize("content", ['{"schema":2,"kind":"header"}\n', '{"schema":2,"ki'])
def test_a_log_without_a_reading_gives_way_in_silence(tmp_path, caplog, content):
    (tmp_path / "kmp.jsonl").write_text(content)
    assert logged_again(tmp_path, compiled_model(), caplog) == []
    assert kmp.records.Run.load(tmp_path).series("loss_scale")[0].tolist() == [1, 10, 20]
    assert kmp.records.Run.load(tmp_path).settings["optimizer"] == "SGD"


def test_disk_that_is_full_before_the_log_is_taken_up_leaves_the_old_one(tmp_path, monkeypatch):
    model = compiled_model()
    fit(model, defaults(tmp_path, every_n_steps=10))
    before = (tmp_path / "kmp.jsonl").read_text()

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(log_writer, "_set_aside", full)
        with pytest.warns(UserWarning, match="stops: .*No space left on device"):
            fit(compiled_model(), defaults(tmp_path, every_n_steps=10))
    assert (tmp_path / "kmp.jsonl").read_text() == before
    fit(model, defaults(tmp_path, every_n_steps=10))
    assert kmp.records.Run.load(tmp_path).series("loss_scale")[0].tolist() == [1, 10, 20, 21, 30, 40]


def test_second_fit_goes_on_in_the_log_and_a_new_model_keeps_the_old_one(tmp_path):
    model = compiled_model()
    for _ in range(2):
        fit(model, defaults(tmp_path, every_n_steps=10))
    assert kmp.records.Run.load(tmp_path).series("loss_scale")[0].tolist() == [1, 10, 20, 21, 30, 40]
    fit(compiled_model(), defaults(tmp_path, every_n_steps=10))
    assert kmp.records.Run.load(tmp_path).series("loss_scale")[0].tolist() == [1, 10, 20]
    assert kmp.records.Run.load(tmp_path / "earlier-1").series("loss_scale")[0].size == 6
    assert steps_in_tensorboard(tmp_path) == [1, 10, 20]
    assert steps_in_tensorboard(tmp_path / "earlier-1") == [1, 10, 20, 21, 30, 40]


def test_notebook_cell_run_again_after_an_interruption_works(tmp_path):
    model = compiled_model()
    with pytest.raises(KeyboardInterrupt):
        fit(model, [*defaults(tmp_path, every_n_steps=2), Interrupt()])
    fit(model, defaults(tmp_path, every_n_steps=10))
    steps = kmp.records.Run.load(tmp_path).series("loss_scale")[0].tolist()
    assert steps == [1, 2, 4, 6, 7, 10, 20, 26]
    with pytest.raises(KeyboardInterrupt):
        fit(compiled_model(), [*defaults(tmp_path, every_n_steps=2), Interrupt()])
    fit(compiled_model(), defaults(tmp_path, every_n_steps=10))
    assert kmp.records.Run.load(tmp_path).series("loss_scale")[0].tolist() == [1, 10, 20]


def test_notebook_cell_that_failed_at_its_first_batch_runs_when_it_is_mended(tmp_path):
    x, _ = small_data()
    with pytest.raises(ValueError, match="incompatible"):
        compiled_model().fit(x[:, :3], x[:, 0], verbose=0, callbacks=defaults(tmp_path))
    fit(compiled_model(), defaults(tmp_path, every_n_steps=10))
    assert kmp.records.Run.load(tmp_path).series("loss_scale")[0].tolist() == [1, 10, 20]


def test_log_with_a_torn_last_line_is_set_aside_and_carried_on(tmp_path, caplog):
    model = compiled_model()
    fit(model, defaults(tmp_path, every_n_steps=10))
    with (tmp_path / "kmp.jsonl").open("a") as log:
        log.write('{"step": 2')
    fit(model, defaults(tmp_path, every_n_steps=10))
    assert kmp.records.Run.load(tmp_path).series("loss_scale")[0].tolist() == [1, 10, 20, 21, 30, 40]
    assert "Set aside in" in caplog.text
    assert (tmp_path / "earlier-1" / "kmp.jsonl").read_text().endswith('{"step": 2')


@pytest.mark.parametrize("kind", KINDS)
def test_log_dir_that_cannot_be_written_fails_before_training(tmp_path, kind):
    (tmp_path / "file").write_text("")
    model = compiled_model()
    fit(model, [])
    with pytest.raises(OSError, match=r"`log_dir` cannot be written.*file/logs"):
        fit(model, [kind(tmp_path / "file" / "logs")])
    assert model.optimizer.snapshot().step == 20
    assert set(fit(model, [kind(tmp_path / "logs")])) & KEYS


def test_disk_that_fills_up_stops_the_log_and_not_the_training(tmp_path):
    (tmp_path / "kmp.jsonl").symlink_to("/dev/full")
    callbacks = defaults(tmp_path, every_n_steps=5)
    model = compiled_model()
    with pytest.warns(UserWarning, match=r"Logging to .* stops: .*No space left on device.*Training goes on") as caught:
        fit(model, callbacks, epochs=2)
    assert len(caught) == 1
    assert model.optimizer.snapshot().step == 40
    assert callbacks[0].run.series("loss_scale")[0].tolist()[-1] == 40
    fit(model, [])


@pytest.fixture
def tiny_disk(tmp_path):
    """A folder with room for 64 KiB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


def test_disk_that_fills_up_leaves_a_log_that_a_later_run_goes_on_in(tiny_disk):
    model, folder = compiled_model(), tiny_disk / "logs"
    with pytest.warns(UserWarning, match="stops.*Training goes on"):
        fit(model, [LossScaleLogger(folder, 1), OverflowCounter(folder, 1)], epochs=20)
    assert model.optimizer.snapshot().step == 400
    for events in folder.glob("events.*"):
        events.unlink()
    read = kmp.records.Run.load(folder, allow_truncated=True).series("loss_scale")[0].tolist()
    assert read == list(range(1, len(read) + 1))
    assert len(read) > 20
    fit(model, defaults(folder, every_n_steps=10))
    assert kmp.records.Run.load(folder).series("loss_scale")[0].tolist() == [*read, 401, 410, 420]
