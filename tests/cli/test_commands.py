import importlib
import io
import json
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path
from unittest import mock

import keras
import pytest
import tensorflow as tf

import kmp_bench
from kmp.records import Header, Record, Settings
from kmp.records.jsonl import to_line
from kmp_bench import Step, StepComparison, precision
from kmp_bench.measurement import Measurement, MeasurementError
from kmp_cli import main


def write_run(folder):
    folder.mkdir(parents=True)
    header = Header(settings=Settings(compute_dtypes=["float16"], model=folder.name))
    record = Record(step=9, loss_scale=2.0**15, overflow_count=0, overflow_rate=0.0)
    (folder / "kmp.jsonl").write_text(to_line(header) + to_line(record))
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["audit", "a.keras", "--verbatim"], "unrecognized arguments: --verbatim\n"),
        (["demo", "--steps", "many"], "an integer of at least 1, received 'many'"),
        (["report", ""], "must be a path, received ''"),
        (["audit", ""], "must be a path, received ''"),
        (["demo", "--out", ""], "must be a path, received ''"),
        *(
            (["report", "run", "--out", out], f"must end in .html, received '{out}'")
            for out in ("run/kmp.jsonl", "report", "")
        ),
        (["bench", "--batch", "0"], "an integer of at least 1, received '0'"),
        (["bench", "--only", "vgg"], "invalid choice: 'vgg'"),
        (["bench", "--only", "all"], "invalid choice: 'all'"),
        (["bench", "--json", "results.txt"], "must end in .json, received 'results.txt'"),
        (
            ["bench", "--json", "/dev/null/bench.json"],
            "cannot be written, received '/dev/null/bench.json'",
        ),
        (["bench", "--json", "folder.json"], "cannot be written"),
        (["bench", "--json", "long" * 100 + ".json"], "cannot be written"),
        (["doctor", "--json", "doctor"], "must end in .json or -, received 'doctor'"),
    ],
    ids=str,
)
def test_bad_command_line_is_one_message_and_status_2(
    arguments, message, tmp_path, monkeypatch, capsys
):
    (tmp_path / "folder.json").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["folder.json"]


def one_line_of(capsys):
    """Returns the error of a command, which is one line and all that it prints."""
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("kmp: ")
    assert printed.err.count("\n") == 1
    return printed.err


def page_in(folder):
    return (folder / "report.html").read_text(encoding="utf-8")


def test_report_prints_the_verdict_and_writes_a_page_to_the_folder_of_the_run(
    without_figures, tmp_path, capsys
):
    run = write_run(tmp_path / "first")
    assert main(["report", str(run)]) == 0
    printed = capsys.readouterr()
    assert "because none were sampled" in " ".join(printed.out.split())
    assert printed.out.splitlines()[-1] == f"Report: {run / 'report.html'}"
    assert printed.err == ""
    assert "0 of 9 steps were skipped." in page_in(run)
    (run / "report.html").unlink()
    assert main(["report", str(run / "kmp.jsonl")]) == 0  # of the log file: to its folder
    assert "<title>kmp report: first</title>" in page_in(run)
    assert main(["report", str(run), "--out", str(tmp_path / "new" / "x.html")]) == 0
    assert (tmp_path / "new" / "x.html").exists()


def test_report_of_several_runs_or_of_a_folder_with_runs_is_in_that_or_the_current_folder(
    without_figures, tmp_path, capsys, monkeypatch
):
    runs = [write_run(tmp_path / name) for name in ("a", "b/c", "b/c/earlier-1", "earlier_try")]
    monkeypatch.chdir(tmp_path)
    assert main(["report", *map(str, runs[:2])]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Report: report.html"
    assert "<title>kmp report: a, c</title>" in page_in(tmp_path)
    assert not (runs[0] / "report.html").exists()
    assert main(["report", str(tmp_path)]) == 0
    assert "<title>kmp report: a, c, earlier_try</title>" in page_in(tmp_path)


@pytest.mark.parametrize("arguments", [["a"], ["a", "b"], ["a", "--out", "x.html"]])
def test_report_replaces_only_a_report_of_kmp(
    without_figures, arguments, tmp_path, capsys, monkeypatch
):
    for name in ("a", "b"):
        write_run(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert main(["report", *arguments]) == 0
    target = Path(capsys.readouterr().out.splitlines()[-1].removeprefix("Report: "))
    own = target.read_text(encoding="utf-8")
    target.write_text("")  # as `mktemp` leaves it
    for _ in range(2):  # the second time over its own report
        assert main(["report", *arguments]) == 0
        assert target.read_text(encoding="utf-8") == own
    capsys.readouterr()
    target.write_text("<html><head><title>Report of the tests</title>")
    (tmp_path / "a" / "kmp.jsonl").write_text("an error, if it is loaded")
    assert main(["report", *arguments]) == 1
    assert one_line_of(capsys) == (
        f"kmp: {target}: the file exists, and is not a report of kmp. Delete it, or name another"
        " one: --out FILE\n"
    )
    assert target.read_text() == "<html><head><title>Report of the tests</title>"


def test_demo_into_a_folder_with_files_is_an_error_before_it_trains(tmp_path, capsys):
    (tmp_path / "accuracy.png").write_text("mine")
    assert main(["demo", "--out", str(tmp_path)]) == 1
    assert one_line_of(capsys) == (
        f"kmp: {tmp_path}: the folder is not empty. Name a new or an empty one: --out FOLDER\n"
    )
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
        ("accuracy.png", "mine")
    ]


def test_report_does_not_replace_what_a_link_in_the_folder_points_to(tmp_path, capsys):
    run, other = write_run(tmp_path / "run"), tmp_path / "other"
    other.write_text("precious")
    (run / "report.html").symlink_to(other)
    assert main(["report", str(run)]) == 1
    assert (
        "report.html is a link. Delete it, or pass the file to write: --out FILE"
        in capsys.readouterr().err
    )
    assert other.read_text() == "precious"


def test_command_alone_prints_help(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: kmp")


def test_console_script_and_module_are_the_same_command(monkeypatch, capsys):
    script = [str(Path(sys.executable).with_name("kmp")), "demo", "--help"]
    printed = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert "usage: kmp demo" in printed
    assert all(option in printed for option in ("--policy", "--steps", "--out"))
    monkeypatch.setattr(sys, "argv", script)
    monkeypatch.delitem(sys.modules, "kmp.__main__", raising=False)
    with pytest.raises(SystemExit):
        runpy.run_module("kmp", run_name="__main__")  # as `python -m kmp` does
    assert capsys.readouterr().out.split() == printed.split()


def test_audit_prints_the_table_and_writes_json(tmp_path, capsys):
    inputs = keras.Input((8,))
    model = keras.Model(
        inputs, keras.layers.Dense(4, activation="softmax", name="probabilities")(inputs)
    )
    model.save(tmp_path / "model.keras")
    arguments = ["audit", str(tmp_path / "model.keras"), "--json", str(tmp_path / "audit.json")]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "1 of 1 layers and operations are float32 after kmp.convert." in text
    assert "  probabilities (Dense): " in text
    assert f"All 2 rows: kmp audit --all {tmp_path / 'model.keras'}" in " ".join(text.split())
    assert len(text.splitlines()) <= 10
    assert main([*arguments, "--all"]) == 0
    assert "now and after kmp.convert" in capsys.readouterr().out
    rows = json.loads((tmp_path / "audit.json").read_text())["rows"]
    assert [(row["path"], row["planned_dtype"]) for row in rows][1:] == [
        ("probabilities", "float32")
    ]


def test_audit_imports_modules_with_custom_layers(tmp_path, monkeypatch, capsys):
    (tmp_path / "custom_layers.py").write_text(
        "import keras\n@keras.saving.register_keras_serializable('custom')\nclass"
        " Custom(keras.layers.Dense): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    custom_layers = importlib.import_module("custom_layers")
    keras.Sequential([keras.Input((4,)), custom_layers.Custom(2)]).save(tmp_path / "model.keras")
    keras.saving.get_custom_objects().pop("custom>Custom")
    path = str(tmp_path / "model.keras")
    assert main(["audit", path]) == 1
    assert "Could not locate class 'Custom'" in capsys.readouterr().err
    sys.modules.pop("custom_layers")
    assert main(["audit", path, "--import", "custom_layers"]) == 0
    keras.saving.get_custom_objects().pop("custom>Custom")
    assert main(["audit", path, "--import", "nosuch"]) == 1


def archive(name, text):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as opened:
        # Without the time of day: the archive is in the names of the tests, which all workers need.
        opened.writestr(zipfile.ZipInfo(name), text)
    return content.getvalue()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no such file"),
        *(
            (content, "not a zip archive, or a corrupt one")
            for content in (b"text", archive("c", "{}")[:-9])
        ),
        *((archive("config.json", config), "cannot be loaded") for config in ("{}", "{", b"\xff")),
        (archive("metadata.json", "{}"), "cannot be loaded"),
    ],
)
def test_audit_of_a_file_that_is_missing_or_no_model_is_one_line(tmp_path, capsys, content, reason):
    path = tmp_path / "model.keras"
    if content is not None:
        path.write_bytes(content)
    assert main(["audit", str(path)]) == 1
    error = one_line_of(capsys)
    assert error.startswith(f"kmp: {path}")
    assert reason in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["audit", "--import", "./layers.py"], "Pass the name of a module, such as `my_layers`."),
        (["audit", "--import", "failing"], "kmp: --import failing: KeyError: 'reason'. "),
        (["audit", "--policy", "half"], "'mixed_float16', 'mixed_bfloat16', 'float16'"),
        (["demo", "--policy", "half"], "--policy must be one of mixed_float16, "),
        (["demo", "--out", "failing.py/out"], "failing.py/out: Not a directory"),
        (["report", "missing"], "missing: No such file or directory"),
        (["report", "."], ".: no run in this folder: no kmp.jsonl in it or in the folders below"),
        (
            ["bench", "--only", "precision", "--batch", "8"],
            "--batch applies only to resnet and bert",
        ),
        (
            ["bench", "--quick", "--batch", "8"],
            "--batch applies only to resnet and bert: add --only resnet bert",
        ),
        (["bench", "--import", "json"], "--import applies only to a MODEL"),
        (["bench", "model.keras", "--only", "bert"], "--only applies only without a MODEL"),
        (["bench", "model.keras"], "model.keras: The model 'saved' is not compiled"),
        (["bench", "missing.keras"], "missing.keras: neither a .keras file nor MODULE:FUNCTION"),
        (["bench", "failing.py"], "failing.py is not a .keras file"),
        (["bench", "failing:make"], "failing:make: KeyError: 'reason'"),
        (["bench", "shutil:nothing"], "shutil:nothing: the module has no function 'nothing'"),
        (["bench", "shutil:copy"], "shutil:copy: The function must take no arguments"),
        (["bench", "shutil:get_terminal_size"], "The function returned (int, int). "),
        (["bench", "shutil:which", "--batch", "8"], "--batch applies only to a .keras file"),
    ],
    ids=" ".join,
)
def test_wrong_value_is_one_line_before_anything_is_written(
    arguments, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "failing.py").write_text("raise KeyError('reason')")
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="saved").save("model.keras")
    command, *options = arguments
    extra = {"audit": ["model.keras"], "bench": ["--json", "new/bench.json"]}.get(command, [])
    assert main([command, *extra, *options]) == 1
    assert message in one_line_of(capsys)
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {
        "failing.py",
        "model.keras",
    }


RESULTS = [
    Measurement("step", "Adam", "graph", variant, 1.0, "s", ratio)
    for variant, ratio in (("bare", None), ("kmp", 1.5))
]


@pytest.fixture
def run_bench(monkeypatch):
    """Returns a function that runs `kmp bench` with fake results.

    It returns the status, and the arguments that `measure` received.
    """

    def run(arguments, results=(), error=None):
        def measure(*received):
            asked.append(received)
            yield from results
            if error:
                raise error

        asked = []
        monkeypatch.setattr(precision, "measure", measure)
        return main(["bench", *map(str, arguments)]), asked

    return run


def test_bench_passes_its_arguments_on(run_bench):
    arguments = ["--only", *precision.PARTS, "--batch", "64"]
    assert run_bench(arguments) == (0, [([*precision.PARTS], False, 64)])
    assert run_bench(["--quick"]) == (0, [([], True, None)])


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (None, 0, ""),
        (MeasurementError("no more"), 1, "kmp: no more\n"),
        (tf.errors.ResourceExhaustedError(None, None, "no memory"), 1, "kmp: no memory\n"),
        (KeyboardInterrupt(), 130, "kmp: interrupted\n"),
    ],
)
def test_bench_prints_and_writes_what_it_has_measured(
    run_bench, error, status, message, tmp_path, capsys
):
    json_file = tmp_path / "new" / "bench.json"
    assert run_bench(["--json", json_file], [RESULTS], error)[0] == status
    assert [result["variant"] for result in json.loads(json_file.read_text())["results"]] == [
        "bare",
        "kmp",
    ]
    printed = capsys.readouterr()
    assert "\u2503" in printed.out  # the border of a table
    assert printed.err == message


def test_bench_without_results_leaves_existing_files_unchanged(run_bench, tmp_path):
    json_file = tmp_path / "bench.json"
    json_file.write_text("an earlier result")
    assert run_bench(["--json", json_file], error=MeasurementError("nothing measured"))[0] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]
    assert json_file.read_text() == "an earlier result"


def test_bench_measures_a_saved_model_and_a_function_of_a_module(tmp_path, capsys, monkeypatch):
    def compare(model, **options):
        """In the place of `kmp_bench.compare`, which bench/test_comparing.py tests."""
        if not isinstance(model, keras.Model):
            model, _ = model()
        asked.append(options)
        is_compiled.append(model.compiled)
        steps = (Step("float32", "graph", (0.5,)), Step("mixed_float16", "graph", (0.25,)))
        return StepComparison(model.name, "4 x 2 float32", steps, limit="Nothing limits it.")

    asked, is_compiled = [], []
    replaced = mock.create_autospec(kmp_bench.compare, side_effect=compare)
    monkeypatch.setattr(kmp_bench, "compare", replaced)
    monkeypatch.chdir(tmp_path)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="saved")
    model.compile("sgd", "mse", run_eagerly=True)
    model.save("saved.keras")
    (tmp_path / "of_a_user.py").write_text(
        "import keras, numpy\n\ndef make():\n"
        "    inputs = keras.Input((2,))\n"
        "    model = keras.Model(inputs, keras.layers.Dense(1)(inputs), name='made')\n"
        "    model.compile('sgd', 'mse')\n"
        "    return model, (numpy.ones((4, 2)), numpy.ones((4, 1)))\n"
    )
    for arguments, name in (
        (["saved.keras", "--batch", "4"], "saved"),
        (["of_a_user:make", "--quick"], "made"),
    ):
        assert main(["bench", *arguments, "--json", "new/results.json"]) == 0
        results = json.loads((tmp_path / "new" / "results.json").read_text())
        assert results["model"] == name
        assert results["limit"] == "Nothing limits it."
        assert results["limit"] in " ".join(capsys.readouterr().out.split())
        assert len([each for each in results["results"] if each["section"] == "step"]) == 2
        assert results["tensorflow"] == tf.__version__
    assert is_compiled == [True, True]
    assert asked == [
        {"batch_size": 4, "steps": 20, "rounds": 5},
        {"batch_size": None, "steps": 5, "rounds": 2},
    ]


@pytest.mark.slow
def test_bench_of_a_model_prints_what_it_measures(tmp_path, capsys):
    hidden, head = keras.layers.Dense(8), keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((2,)), hidden, head], name="saved")
    model.compile("sgd", "mse")
    model.save(tmp_path / "saved.keras")
    file = tmp_path / "results.json"
    arguments = [str(tmp_path / "saved.keras"), "--batch", "4", "--quick", "--json", str(file)]
    assert main(["bench", *arguments]) == 0
    results = json.loads(file.read_text())
    assert results["limit"] in " ".join(capsys.readouterr().out.split())
    assert all(result["value"] > 0 for result in results["results"])


def test_names_of_a_model_file_reach_the_terminal_escaped(tmp_path, capsys):
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(1, name="a\x1b[31m")], name="[bold]m\x1b]0;t"
    )
    model.save(tmp_path / "model.keras")
    assert main(["audit", str(tmp_path / "model.keras")]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert "[bold]m" in output
    assert main(["report", str(tmp_path / "\x1b[2Jrun")]) == 1
    assert "\x1b" not in capsys.readouterr().err
