import doctest
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kmp

ROOT = Path(kmp.__file__).parent
MODULES = [name for _, name, is_package in pkgutil.walk_packages(kmp.__path__, "kmp.") if name != "kmp.__main__"]


def python(code, **environment):
    """Runs code in a fresh interpreter; returns what it wrote to standard error, or to output if it succeeded."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ | environment
    )
    return done.returncode, done.stdout if done.returncode == 0 else done.stderr


@pytest.mark.slow
def test_importing_kmp_imports_nothing_heavy():
    heavy = "matplotlib", "sklearn", "tensorboard", "rich.progress", "kmp.plots", "kmp.demo", "kmp.bench", "kmp.report"
    status, loaded = python(
        "import sys, keras, tensorflow; before = set(sys.modules); import kmp;"
        f"print(sorted(name for name in set(sys.modules) - before if name.startswith({(*heavy, 'jinja2')!r})))"
    )
    assert (status, loaded.strip()) == (0, "[]")


def test_another_backend_is_an_error_that_says_what_to_do():
    status, error = python("import kmp", KERAS_BACKEND="jax")
    assert status == 1
    assert "ImportError: kmp runs on Keras' TensorFlow backend, and the backend chosen here is 'jax'" in error
    assert "KERAS_BACKEND=tensorflow" in error


def test_unknown_backend_raises_an_error_that_names_it():
    status, error = python("import kmp", KERAS_BACKEND="nosuch")
    assert status == 1
    if "Unsupported backend : nosuch" not in error:  # keras-nightly itself refuses it when it is imported
        assert "ImportError: kmp runs on Keras' TensorFlow backend, and the backend chosen here is 'nosuch'" in error


def test_backend_in_the_configuration_file_counts_too(tmp_path):
    (tmp_path / "keras.json").write_text('{"backend": "torch"}')
    status, error = python("import kmp", KERAS_HOME=str(tmp_path), KERAS_BACKEND="")
    assert status == 1
    assert "'torch'" in error


HIDE_TENSORFLOW = (
    "import sys, importlib.util as u; find = u.find_spec;"
    "u.find_spec = lambda name, *a: None if name == 'tensorflow' else find(name, *a);"
)


@pytest.mark.parametrize(
    ("code", "start"),
    [
        ("import kmp", ""),
        ("import kmp_cli; sys.exit(kmp_cli.main(['report', 'runs']))", "kmp: kmp needs TensorFlow"),  # no traceback
    ],
    ids=["import", "command"],
)
def test_missing_tensorflow_is_an_error_that_names_the_extras(code, start, tmp_path):
    status, error = python(HIDE_TENSORFLOW + code, KERAS_HOME=str(tmp_path))
    assert status == 1
    assert error.startswith(start)
    assert {"kmp[cuda]", "kmp[cpu]"} <= set(re.findall(r"kmp\[\w+\]", error))
    assert not start or "Traceback" not in error


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["audit", "--help"], ["nosuch"], ["report"]])
def test_command_line_answers_before_keras_and_tensorflow_are_imported(arguments):
    status, output = python(
        f"import sys, kmp_cli\ntry:\n    kmp_cli.main({arguments!r})\n"
        "except SystemExit as end:\n    status = end.code\n"
        "print(sorted({'kmp', 'keras', 'tensorflow'} & sys.modules.keys()), status)"
    )
    assert status == 0
    assert output.splitlines()[-1] == f"[] {0 if arguments[-1].startswith('--') else 2}"


@pytest.mark.filterwarnings("ignore:TensorFlow's bfloat16 pass does nothing without oneDNN")  # tests turn it off
@pytest.mark.parametrize("name", ["kmp", *MODULES])
def test_examples_in_docstrings_are_true(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0


def names_with_examples():
    modules = [kmp, *(value for name in kmp.__all__ if inspect.ismodule(value := getattr(kmp, name)))]
    for module in modules:
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                yield pytest.param(value, id=f"{module.__name__}.{name}")


@pytest.mark.parametrize("value", list(names_with_examples()))
def test_every_name_of_the_top_and_its_modules_has_an_example(value):
    assert ">>> " in value.__doc__


def test_public_surface_is_what_the_readme_documents():
    root = Path(__file__).parent.parent
    paths = [root / "README.md", *(root / "docs").glob("*.md"), *(root / "docs" / "guide").glob("*.md")]
    pages = [page.read_text(encoding="utf-8") for page in paths]
    documented = set(re.findall(r"\bkmp\.([A-Za-z]\w*)", "".join(pages))) - {"jsonl", "lock"}
    assert documented == {
        *("LossScaleOptimizer", "disable", "enable", "guard", "hardware", "wrap"),
        *("advise", "load_run", "what_if"),
        *("Plan", "audit", "convert", "graph_rewrite", "to_float32"),
        *("callbacks", "layers", "plots", "records"),
    }
    assert [name for name in documented if not hasattr(kmp, name)] == []


def test_package_is_typed_and_an_unknown_name_is_an_attribute_error():
    assert (ROOT / "py.typed").exists()
    with pytest.raises(AttributeError, match="no attribute 'nosuch'"):
        _ = kmp.nosuch
