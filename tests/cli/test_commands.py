import importlib
import json
import subprocess
import sys
from pathlib import Path

import keras
import pytest

from kmp.bench import runner
from kmp.bench.timing import Measured, MeasurementError
from kmp.records.jsonl import to_line
from kmp_cli import main


def a_run(folder, schema=2, **row):
    folder.mkdir(parents=True, exist_ok=True)
    header = {"schema": schema, "kind": "header", "settings": {"compute_dtypes": ["float16"], "model": folder.name}}
    reading = {"step": 9, "loss_scale": 2.0**15, "overflow_count": 0, "overflow_rate": 0.0} | row
    (folder / "kmp.jsonl").write_text(to_line(header) + to_line(reading))
    return folder


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["train"], "invalid choice: 'train'"),
        (["demo", "--steps", "0"], "an integer of at least 1, not '0'"),
        (["demo", "--steps", "many"], "an integer of at least 1, not 'many'"),
        (["demo", "--policy", "half"], "mixed_float16"),
        (["demo", "--dataset", "mnist"], "digits"),
        (["report"], "RUN"),
    ],
    ids=str,
)
def test_bad_command_line_is_one_message_and_status_2(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_folder_that_cannot_be_written_is_one_line_and_status_1(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["demo", "--steps", "1", "--out", str(tmp_path / "file" / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("kmp: ")
    assert error.count("\n") == 1
    assert "file/out" in error


def test_report_prints_the_verdict_and_writes_a_page_into_the_runs_folder(tmp_path, capsys):
    run = a_run(tmp_path / "first")
    assert main(["report", str(run)]) == 0
    shown = capsys.readouterr()
    assert "No step of 9 was skipped. No gradients were sampled" in shown.out
    assert shown.out.splitlines()[-1] == f"Report: {run / 'report.html'}"
    assert shown.err == ""
    assert "No step of 9 was skipped." in (run / "report.html").read_text(encoding="utf-8")


def test_report_of_a_log_lies_beside_it(tmp_path):
    run = a_run(tmp_path / "first")
    assert main(["report", str(run / "kmp.jsonl")]) == 0
    assert "<title>kmp report: first</title>" in (run / "report.html").read_text(encoding="utf-8")


def test_report_of_several_runs_lies_in_the_current_folder(tmp_path, capsys, monkeypatch):
    runs = [a_run(tmp_path / name) for name in ("a", "b", "c")]
    monkeypatch.chdir(tmp_path)
    assert main(["report", *map(str, runs)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Report: report.html"
    assert "<title>kmp report: a, b, c</title>" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not (runs[0] / "report.html").exists()


def test_report_goes_where_it_is_told(tmp_path):
    assert main(["report", str(a_run(tmp_path / "a")), "--out", str(tmp_path / "new" / "x.html")]) == 0
    assert (tmp_path / "new" / "x.html").exists()


def test_bad_runs_are_one_line_and_status_1(tmp_path, capsys):
    older, foreign = a_run(tmp_path / "older", schema=1), a_run(tmp_path / "foreign")
    (foreign / "kmp.jsonl").write_text("epoch,loss\n0,0.5\n")
    (tmp_path / "none").mkdir()
    cases = {
        tmp_path / "missing": "missing: No such file or directory",
        tmp_path / "none": "none/kmp.jsonl: No such file or directory",
        older: "schema 1; this version of kmp reads schema 2",
        foreign: "not a line of JSON",
    }
    for run, said in cases.items():
        assert main(["report", str(run)]) == 1
        shown = capsys.readouterr()
        assert shown.err.startswith("kmp: ")
        assert shown.err.count("\n") == 1
        assert said in shown.err
        assert shown.out == ""
        assert not (run / "report.html").exists()


def test_empty_run_is_told(tmp_path, capsys):
    (tmp_path / "kmp.jsonl").write_text(json.dumps({"schema": 2, "kind": "header"}) + "\n")
    assert main(["report", str(tmp_path)]) == 0
    assert "The run is empty: nothing was read." in capsys.readouterr().out


def test_report_that_cannot_be_written_is_one_line_and_status_1(tmp_path, capsys):
    folder = tmp_path / "there.html"
    folder.mkdir()
    assert main(["report", str(a_run(tmp_path / "a")), "--out", str(folder)]) == 1
    error = capsys.readouterr().err
    assert error == f"kmp: {folder}: the report cannot be written (Is a directory)\n"


@pytest.mark.parametrize("out", ["kmp.jsonl", "report", ""])
def test_report_goes_into_an_html_file_alone_so_that_no_log_is_overwritten(out, tmp_path, capsys):
    log = a_run(tmp_path / "a")
    before = (log / "kmp.jsonl").read_bytes()
    with pytest.raises(SystemExit):
        main(["report", str(log), "--out", out and str(log / out)])
    assert "must end in .html" in capsys.readouterr().err
    assert (log / "kmp.jsonl").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [[str(Path(sys.executable).with_name("kmp"))], [sys.executable, "-m", "kmp"]],
    ids=["kmp", "python -m kmp"],
)
def test_console_script_and_module_are_the_same_command(command):
    shown = subprocess.run([*command, "demo", "--help"], capture_output=True, text=True, check=True).stdout
    assert "usage: kmp demo" in shown
    assert all(option in shown for option in ("--dataset", "--policy", "--steps", "--out"))


def test_audit_prints_the_table_and_writes_json(tmp_path, capsys):
    inputs = keras.Input((8,))
    model = keras.Model(inputs, keras.layers.Dense(4, activation="softmax", name="probabilities")(inputs))
    model.save(tmp_path / "model.keras")
    assert main(["audit", str(tmp_path / "model.keras"), "--json", str(tmp_path / "audit.json")]) == 0
    assert "probabilities" in capsys.readouterr().out
    rows = json.loads((tmp_path / "audit.json").read_text())["rows"]
    assert [(row["path"], row["planned_dtype"]) for row in rows][1:] == [("probabilities", "float32")]


def test_audit_imports_the_layers_of_ones_own_that_it_is_told_of(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_layers.py").write_text(
        "import keras\n@keras.saving.register_keras_serializable('own')\nclass Own(keras.layers.Dense): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own_layers = importlib.import_module("own_layers")
    keras.Sequential([keras.Input((4,)), own_layers.Own(2)]).save(tmp_path / "model.keras")
    keras.saving.get_custom_objects().pop("own>Own")
    path = str(tmp_path / "model.keras")
    assert main(["audit", path]) == 1
    assert "Could not locate class 'Own'" in capsys.readouterr().err
    sys.modules.pop("own_layers")
    assert main(["audit", path, "--import", "own_layers"]) == 0
    keras.saving.get_custom_objects().pop("own>Own")
    assert main(["audit", path, "--import", "nosuch"]) == 1


@pytest.mark.parametrize("content", [None, b"no model"])
def test_audit_of_what_is_no_model_is_one_clear_line(tmp_path, capsys, content):
    if content:
        (tmp_path / "model.keras").write_bytes(content)
    assert main(["audit", str(tmp_path / "model.keras")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("kmp: ")
    assert error.count("\n") == 1


def test_bench_takes_one_mode_and_a_batch_of_the_networks(monkeypatch):
    sizes = []
    monkeypatch.setattr(runner, "run", lambda console, size, *others: sizes.append((size, others[0])))
    assert main(["bench", "--only", "bert", "bert", "--mode", "XLA", "--batch", "64"]) == 0
    assert main(["bench", "--quick"]) == 0
    (one, parts), (default, everything) = sizes
    assert (one.modes, one.batch, parts) == (("XLA",), 64, ["bert"])
    assert (default, everything) == (runner.QUICK, [name for name in runner.PARTS if name not in runner.NETWORKS])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--only", "optimizer", "--mode", "graph"], "--mode is of memory, training, resnet, bert"),
        (["--only", "memory", "--batch", "8"], "--batch is of resnet, bert"),
        (["--only", "nonsense"], "no part 'nonsense'"),
    ],
)
def test_bench_refuses_options_of_what_is_not_measured_before_it_makes_a_file(arguments, told, tmp_path, capsys):
    assert main(["bench", *arguments, "--json", str(tmp_path / "made" / "bench.json")]) == 1
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_bench_that_fails_says_so_in_words_and_leaves_no_empty_file(monkeypatch, tmp_path, capsys):
    def fails(size):
        runner._in_a_process("exec('import os; os.kill(os.getpid(), 9)')")

    monkeypatch.setitem(runner.PARTS, "memory", fails)
    files = ["--json", str(tmp_path / "bench.json"), "--picture", str(tmp_path / "bench.png")]
    assert main(["bench", "--only", "memory", *files]) == 1
    error = capsys.readouterr().err
    assert error.startswith("kmp: The measurement exec")
    assert error.endswith(" failed: Killed\n")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


FIGURES = [Measured("step", "Adam", "graph", way, 1.0, "s", ratio) for way, ratio in (("bare", None), ("kmp", 1.5))]


def figures_of(arguments, monkeypatch, then_fails=False):
    def part(size):
        yield FIGURES
        if then_fails:
            raise MeasurementError("no more")

    monkeypatch.setitem(runner.PARTS, "memory", part)
    return main(["bench", "--only", "memory", *map(str, arguments)])


@pytest.mark.parametrize("then_fails", [False, True])
def test_bench_shows_writes_and_draws_what_it_measured(then_fails, monkeypatch, tmp_path, capsys):
    json_file, picture = tmp_path / "new" / "bench.json", tmp_path / "new" / "bench.png"
    assert figures_of(["--json", json_file, "--picture", picture], monkeypatch, then_fails) == int(then_fails)
    assert [figure["way"] for figure in json.loads(json_file.read_text())["results"]] == ["bare", "kmp"]
    assert picture.stat().st_size
    assert "\u2503" in capsys.readouterr().out  # of a table


@pytest.mark.parametrize("content", ["", "an earlier result"])
def test_bench_that_fails_leaves_the_files_that_were_there(content, monkeypatch, tmp_path):
    def fails(size):
        raise MeasurementError("no more")

    (tmp_path / "bench.json").write_text(content)
    monkeypatch.setitem(runner.PARTS, "memory", fails)
    assert main(["bench", "--only", "memory", "--json", str(tmp_path / "bench.json")]) == 1
    assert (tmp_path / "bench.json").read_text() == content


def test_bench_writes_to_what_is_no_file_and_leaves_it(monkeypatch, tmp_path):
    (tmp_path / "null").symlink_to("/dev/null")
    assert figures_of(["--json", tmp_path / "null"], monkeypatch) == 0
    assert (tmp_path / "null").is_symlink()
    assert Path("/dev/null").is_char_device()


def test_bench_refuses_one_file_for_figures_and_picture(tmp_path, capsys):
    assert main(["bench", "--json", str(tmp_path / "a.svg"), "--picture", str(tmp_path / "a.svg")]) == 1
    assert "are the same file" in capsys.readouterr().err


def test_bench_does_not_measure_for_a_file_that_is_a_folder(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(runner, "run", pytest.fail)
    assert main(["bench", "--json", str(tmp_path)]) == 1
    assert "directory" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--batch", "0"], ["--mode", "eager"]])
def test_bench_refuses_what_it_cannot_measure(arguments, capsys):
    with pytest.raises(SystemExit):
        main(["bench", *arguments])
    assert arguments[0] in capsys.readouterr().err
