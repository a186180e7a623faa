import doctest
import importlib
import importlib.metadata
import lzma
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kmp
import kmp_bench
import kmp_cli

ROOT = Path(kmp.__file__).parent
RECORDED = Path(__file__).parent / "diagnosis" / "recorded"
FILES = [
    path
    for package in (kmp, kmp_bench, kmp_cli)
    for path in sorted(Path(package.__file__).parent.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]
MODULES = [
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in FILES
]


def python(code, **environment):
    """Runs code in a fresh interpreter.

    Returns what it wrote to standard error, or to output if it succeeded.
    """
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )
    return done.returncode, done.stdout if done.returncode == 0 else done.stderr


@pytest.mark.slow
def test_importing_kmp_imports_nothing_heavy():
    heavy = (
        "matplotlib",
        "sklearn",
        "tensorboard",
        "rich.progress",
        "kmp.callbacks",
        "kmp.conversion",
        "kmp.plots",
        "kmp.replay",
        "kmp.report",
        "kmp_",
        "jinja2",
    )
    status, loaded = python(
        "import sys, keras, tensorflow; before = set(sys.modules); import kmp;print(sorted(name"
        f" for name in set(sys.modules) - before if name.startswith({heavy!r})))"
    )
    assert (status, loaded.strip()) == (0, "[]")


@pytest.mark.parametrize("backend", ["jax", "nosuch"])
def test_another_backend_is_an_error_that_names_it_and_says_what_to_do(backend):
    status, error = python("import kmp", KERAS_BACKEND=backend)
    assert status == 1
    # Keras-nightly itself refuses it when it is imported.
    if "Unsupported backend : nosuch" not in error:
        assert (
            "ImportError: kmp runs on Keras' TensorFlow backend, and the backend chosen here is"
            f" {backend!r}" in error
        )
        assert "KERAS_BACKEND=tensorflow" in error


WITHOUT_TENSORFLOW = """
import importlib.util, sys

class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("keras", "tensorboard", "tensorflow"):
            raise ModuleNotFoundError(name)

find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "tensorflow" else find(name, *a)
sys.meta_path.insert(0, Missing())
import kmp, kmp_cli
"""


def test_recorded_log_is_diagnosed_and_reported_without_tensorflow_and_keras(tmp_path):
    recorded = RECORDED / "fault_backward_overflow_height.repair.jsonl.xz"
    (tmp_path / "kmp.jsonl").write_bytes(lzma.decompress(recorded.read_bytes()))
    log = str(tmp_path)
    code = f"print(kmp.advise(kmp.load_run({log!r}))); sys.exit(kmp_cli.main(['report', {log!r}]))"
    status, printed = python(WITHOUT_TENSORFLOW + code)
    assert status == 0, printed
    advice = str(kmp.advise(kmp.load_run(tmp_path)))
    assert "layer 'relative_height'" in advice
    assert printed.startswith(f"{advice}\n")
    assert "relative_height" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "code", ["sys.exit(kmp_cli.main(['audit', 'x.keras']))", "kmp.enable", "kmp.audit"]
)
def test_what_needs_tensorflow_names_the_extras_without_it(code):
    status, error = python(WITHOUT_TENSORFLOW + code)
    assert status == 1
    assert {"kmp[cuda]", "kmp[cpu]"} <= set(re.findall(r"kmp\[\w+\]", error))
    assert ("Traceback" in error) == ("kmp_cli" not in code)


def test_what_needs_tensorflow_is_no_attribute_without_it():
    code = """
missing = sorted(name for name in kmp.__all__ if not hasattr(kmp, name))
try:
    kmp.enable
except AttributeError as error:
    print("convert" in missing, "load_run" in missing, type(error.__cause__).__name__)
"""
    assert python(WITHOUT_TENSORFLOW + code) == (0, "True False ImportError\n")


def test_command_of_a_source_tree_that_is_not_installed_says_so(monkeypatch, capsys):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert kmp_cli.main(["--help"]) == 1
    assert capsys.readouterr().err == "kmp: No package metadata was found for kmp\n"


COMMAND_LINES = {"--help": 0, "--version": 0, "audit --help": 0, "nosuch": 2, "report": 2}
STATUSES = f"""
import sys, kmp_cli
statuses = {{}}
for line in {list(COMMAND_LINES)}:
    try:
        kmp_cli.main(line.split())
    except SystemExit as end:
        statuses[line] = end.code
print(sorted({{"kmp", "keras", "tensorflow"}} & sys.modules.keys()), statuses)
"""


def test_command_line_answers_before_keras_and_tensorflow_are_imported():
    status, output = python(STATUSES)
    assert status == 0
    assert output.splitlines()[-1] == f"[] {COMMAND_LINES}"


# Tests turn it off.
@pytest.mark.filterwarnings("ignore:TensorFlow's bfloat16 pass does nothing without oneDNN")
@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run_alone_and_are_true(name):
    module, names = importlib.import_module(name), {}  # as in a new file, without imports
    flags = doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(module, globs=names, optionflags=flags).failed == 0


def test_public_surface_is_what_the_readme_documents():
    root = Path(__file__).parent.parent
    paths = [
        root / "README.md",
        *(root / "docs").glob("*.md"),
        *(root / "docs" / "guide").glob("*.md"),
    ]
    pages = [page.read_text(encoding="utf-8") for page in paths]
    documented = set(re.findall(r"\bkmp\.([A-Za-z]\w*)", "".join(pages))) - {"jsonl", "lock"}
    assert documented == {
        *("LossScaleOptimizer", "disable", "enable", "gpus", "guard", "wrap"),
        *("advise", "load_run", "what_if"),
        *("Plan", "audit", "convert", "graph_rewrite", "to_float32"),
        *("callbacks", "layers", "plots", "records"),
    }
    assert [name for name in documented if not hasattr(kmp, name)] == []


def test_what_is_imported_on_first_access_is_listed_before():
    code = "print(set(kmp.__all__) <= set(dir(kmp)), 'report' in vars(kmp))"
    assert python(WITHOUT_TENSORFLOW + code) == (0, "True False\n")


def test_packages_are_typed_and_an_unknown_name_is_an_attribute_error():
    for package in (kmp, kmp_bench):
        assert (Path(package.__file__).parent / "py.typed").exists()
    with pytest.raises(AttributeError, match="no attribute 'nosuch'"):
        _ = kmp.nosuch
