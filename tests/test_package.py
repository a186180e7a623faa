import ast
import doctest
import importlib
import inspect
import itertools
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kmp

MODULES = [name for _, name, _ in pkgutil.iter_modules(kmp.__path__) if name != "__main__"]


def python(code, **environment):
    """Runs code in a fresh interpreter; returns what it wrote to standard error, or to output if it succeeded."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ | environment
    )
    return done.returncode, done.stdout if done.returncode == 0 else done.stderr


@pytest.mark.slow
def test_importing_kmp_imports_nothing_heavy():
    heavy = ("matplotlib", "sklearn", "tensorboard", "rich.progress", "kmp.plots", "kmp._demo", "kmp.report", "jinja2")
    status, loaded = python(
        "import sys, keras, tensorflow; before = set(sys.modules); import kmp;"
        f"print(sorted(name for name in set(sys.modules) - before if name.startswith({heavy!r})))"
    )
    assert (status, loaded.strip()) == (0, "[]")


def test_another_backend_is_an_error_that_says_what_to_do():
    status, error = python("import kmp", KERAS_BACKEND="jax")
    assert status == 1
    assert "ImportError: kmp runs on Keras' TensorFlow backend, and the backend chosen here is 'jax'" in error
    assert "KERAS_BACKEND=tensorflow" in error


def test_backend_in_the_configuration_file_counts_too(tmp_path):
    (tmp_path / "keras.json").write_text('{"backend": "torch"}')
    status, error = python("import kmp", KERAS_HOME=str(tmp_path), KERAS_BACKEND="")
    assert status == 1
    assert "'torch'" in error


def test_missing_tensorflow_is_an_error_that_names_the_extras(tmp_path):
    hide = (
        "import sys, importlib.util as u; find = u.find_spec;"
        "u.find_spec = lambda name, *a: None if name == 'tensorflow' else find(name, *a); import kmp"
    )
    status, error = python(hide, KERAS_HOME=str(tmp_path))
    assert status == 1
    assert "kmp[cuda]" in error
    assert "kmp[cpu]" in error


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_are_true(name):
    module = importlib.import_module(f"kmp.{name}")
    assert doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0


def test_example_in_the_package_docstring_is_true():
    assert doctest.testmod(kmp).failed == 0


def public_names():
    for name in [name for name in MODULES if not name.startswith("_")]:
        module = importlib.import_module(f"kmp.{name}")
        for attribute, value in vars(module).items():
            is_ours = (getattr(value, "__module__", None) or "").startswith("kmp.")
            if is_ours and not attribute.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value)):
                yield pytest.param(value, id=f"{name}.{attribute}")


@pytest.mark.parametrize("value", list(public_names()))
def test_every_public_name_has_a_docstring(value):
    assert value.__doc__
    assert not value.__doc__.startswith(f"{value.__name__}(")  # what a dataclass or NamedTuple makes up


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


def test_package_is_typed():
    assert (Path(kmp.__file__).parent / "py.typed").exists()


def test_public_surface_is_what_the_readme_documents():
    root = Path(__file__).parent.parent
    pages = [page.read_text(encoding="utf-8") for page in (root / "README.md", *(root / "docs").glob("*.md"))]
    documented = set(re.findall(r"\bkmp\.([A-Za-z]\w*)", "".join(pages))) - {"jsonl"}
    assert documented == {
        *("LossScaleOptimizer", "disable", "enable", "guard", "hardware", "wrap"),
        *("advise", "load_run", "what_if"),
        *("Plan", "audit", "convert", "graph_rewrite", "to_float32"),
        *("callbacks", "layers", "plots", "records"),
    }
    assert [name for name in documented if not hasattr(kmp, name)] == []


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nosuch'"):
        _ = kmp.nosuch


def test_a_room_imports_only_from_the_floors_below():
    floors = [
        [
            *("_arguments", "_backend", "_bench_clock", "_files", "_formats", "_hardware", "_internals", "_patch"),
            *("_replicas", "_warnings", "_xla"),
        ],
        ["_audit_rows", "_gate", "_inner_state", "_graph_rewrite", "_histograms", "_layout", "_state", "_tensor_cores"],
        ["_samples", "layers", "_multiworker", "statistics"],
        ["_log_lines"],
        ["records", "_float32_operation", "_graph", "_structure"],
        ["_kinds", "_rebuild", "_trace"],
        ["_audit_table", "_plan"],
        ["_by_plan"],
        ["scaling", "_unscale", "_what_if", "_updates", "_reference"],
        ["_counters", "_evidence", "_findings", "_plot_style", "_sampler", "settings"],
        ["_causes", "_plot_exponents", "_plot_scale", "_plot_variables", "_step"],
        ["optimizer"],
        ["_guard", "_stuck", "_writers", "advice", "plots"],
        ["_backup", "_mistakes", "_probe", "_report_facts"],
        ["_reader", "_report_pictures", "_report_text", "policy"],
        ["_histogram_callback", "_loggers", "_probe_callback", "_stuck_detector", "report"],
        ["_carry_over", "_report_callback"],
        ["conversion"],
        ["auditing"],
        ["callbacks"],
        ["_bench_optimizers", "_bench_report", "_demo"],
        ["_bench_models", "_bench_sampling", "_demo_report"],
        ["_bench_networks"],
        ["_bench"],
    ]
    assert sorted(itertools.chain(*floors)) == sorted(MODULES)
    allowed = set()
    for floor in floors:
        for name in floor:
            assert rooms_used(name) <= allowed, f"{name} imports {rooms_used(name) - allowed}"
        allowed |= set(floor)


def rooms_used(name):
    tree = ast.parse((Path(kmp.__file__).parent / f"{name}.py").read_text())
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "kmp":
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("kmp."):
            used.add(node.module.removeprefix("kmp."))
    return used
