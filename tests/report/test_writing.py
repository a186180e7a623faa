"""Loads logs, and writes reports: by a function, and by a callback during training."""

import io
import shutil
import sys
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf
from conftest import compiled_model, file_size_limit, fit, without_replays
from report_runs import Page, healthy_run, write_log
from rich.console import Console

from kmp import report
from kmp.callbacks import Monitor
from kmp.callbacks.report_writer import ReportWriter
from kmp.records import Record


def files_in(folder):
    return [file.name for file in folder.iterdir()]


def test_loading_draws_a_progress_bar_on_a_terminal_only(tmp_path, capsys, monkeypatch):
    paths = [write_log(tmp_path / name, healthy_run()) for name in ("a", "b")]
    report.load(paths)
    assert capsys.readouterr() == ("", "")
    terminal = io.StringIO()
    monkeypatch.setattr(
        "kmp.report.loading.Console", lambda stderr: Console(file=terminal, force_terminal=True)
    )
    report.load(paths)
    assert "Loading" in terminal.getvalue()
    assert "100%" in terminal.getvalue()


def test_runs_are_named_after_their_folders(tmp_path):
    for folder in ("a/one", "a/two", "b/two", "b/x/two"):
        write_log(tmp_path / folder, healthy_run(steps=10))
    shutil.copy(tmp_path / "a/one/kmp.jsonl", tmp_path / "a/other.jsonl")
    paths = ["a/one", "a/two", "b/two/kmp.jsonl", "b/x/two", "a/other.jsonl", "a/one"]
    names = ["one", "a/two", "b/two", "x/two", "other", "one#2"]
    assert list(report.load([tmp_path / path for path in paths])) == names


def test_write_creates_the_folder(without_figures, tmp_path):
    runs = {"first": healthy_run()}
    path = report.write(runs, tmp_path / "new" / "folder" / "r.html")
    assert path.read_text(encoding="utf-8") == report.html(runs)


def test_write_that_fails_is_an_error_and_keeps_the_previous_page(without_figures, tmp_path):
    path = report.write({"first": healthy_run()}, tmp_path / "r.html")
    before = path.read_text(encoding="utf-8")
    message = r"the report cannot be written \(File too large\)"
    with file_size_limit(1000), pytest.raises(OSError, match=message) as raised:
        report.write({"other": healthy_run()}, path)
    assert raised.value.filename == str(path)
    assert path.read_text(encoding="utf-8") == before
    assert files_in(tmp_path) == ["r.html"]


def test_callback_reports_the_completed_epochs_of_the_run_of_the_defaults(
    enabled, without_figures, tmp_path
):
    class FailInSecondEpoch(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise RuntimeError("killed")

    recorders = without_replays(every_n_steps=5, report=str(tmp_path / "r.html"))
    model = compiled_model(run_eagerly=True)
    with pytest.raises(RuntimeError, match="killed"):
        fit(model, [*recorders, FailInSecondEpoch()], batches=5, epochs=2)
    assert len([row for row in recorders[0].run.rows if row.step == 5 and row.loss_scale]) == 1
    assert "steps 5" in Page((tmp_path / "r.html").read_text(encoding="utf-8")).text


def test_reports_take_at_most_five_percent_of_the_time(tmp_path, monkeypatch):
    written, clock = [], SimpleNamespace(now=1000.0)

    def write(runs, path):
        written.append(clock.now)
        clock.now += 2.0

    monkeypatch.setattr("kmp.callbacks.report_writer.time.monotonic", lambda: clock.now)
    monkeypatch.setattr(report, "write", write)
    run = healthy_run()
    writer = ReportWriter(tmp_path / "r.html", run, "model")
    for _ in range(12):
        clock.now += 10.0
        writer.end_epoch()
    assert written == [1010.0, 1052.0, 1094.0]
    writer.end()
    assert len(written) == 3  # no new record
    run.append(Record(step=301))
    writer.end()
    assert len(written) == 4


def test_report_that_cannot_be_written_warns_once_and_training_continues(tmp_path, monkeypatch):
    run = healthy_run()
    writer = ReportWriter(tmp_path / "r.html", run, "model")
    # As if matplotlib could not be imported.
    monkeypatch.setitem(sys.modules, "kmp.report.figures", None)
    warning = r"The report .*r\.html' was not written: import of .* halted.*\. Training continues"
    with pytest.warns(UserWarning, match=warning):
        writer.end_epoch()
    run.append(Record(step=301))
    writer.end()  # a second warning would be an error here


def test_only_the_chief_writes(enabled, tmp_path, monkeypatch):
    monkeypatch.setattr(type(tf.distribute.get_strategy().extended), "should_checkpoint", False)
    callbacks = without_replays(tmp_path / "log", report=tmp_path / "new" / "r.html")
    fit(compiled_model(run_eagerly=True), callbacks, batches=2)
    assert files_in(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("", ValueError),
        ("a.txt", ValueError),
        (".html", ValueError),
        ("https://example.org/r.html", ValueError),
        (3, TypeError),
    ],
)
def test_wrong_path_of_a_report_is_an_error(path, error):
    with pytest.raises(error, match=r"`report` must be the path of a local f.*Received: report="):
        Monitor(report=path)


def test_unwritable_path_is_an_error_before_training_starts(enabled, tmp_path):
    (tmp_path / "file").write_text("")
    callbacks = without_replays(report=tmp_path / "file" / "r.html")
    with pytest.raises(OSError, match="the report cannot be written"):
        fit(compiled_model(run_eagerly=True), callbacks, batches=2)
