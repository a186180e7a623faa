"""The folders of the package are its architecture: imports run downwards, through what each package exports."""

import ast
import sys
from pathlib import Path

import pytest

import kmp

ROOT = Path(kmp.__file__).parent

# From the bottom up; those of one level do not import each other.
LEVELS = [
    ["utils"],
    ["records", "scaling", "backend"],
    ["gradients", "layers"],
    ["optimizer"],
    ["policy", "advice", "replay"],
    ["plots", "conversion"],
    ["report"],
    ["callbacks"],
    ["bench", "demo"],
    ["commands"],
]
LEVEL = {package: level for level, packages in enumerate(LEVELS) for package in packages}
FILES = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT)
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def package_of(path):
    return path.relative_to(ROOT).parts[0]


def imports_of(path):
    """Yields `(line, package, module or None, name or None)` for each import of kmp's own, also those in functions."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            for alias in node.names:
                assert alias.name.split(".")[0] != "kmp", f"{path}:{node.lineno} imports the whole package"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kmp":
            _, package, module = (*node.module.split("."), None, None)[:3]
            for alias in node.names:
                yield (
                    (node.lineno, alias.name, None, None)
                    if package is None
                    else (*(node.lineno, package, module, alias.name),)
                )


def exports_of(package):
    """The names that the package's `__init__` imports: what other packages may use."""
    tree = TREES[ROOT / package / "__init__.py"]
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def test_every_folder_is_a_package_with_a_level_and_a_docstring():
    folders = {package_of(path) for path in FILES}
    assert folders == set(LEVEL)
    assert [name for name in folders if not ast.get_docstring(TREES[ROOT / name / "__init__.py"])] == []
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}


@pytest.mark.parametrize("package", LEVEL)
def test_package_imports_only_packages_below_it_and_only_what_they_export(package):
    wrong = []
    for path in (path for path in FILES if package_of(path) == package):
        for line, other, module, name in imports_of(path):
            if other == package:
                continue
            is_below = LEVEL[other] < LEVEL[package]
            is_exported = module is None and (name is None or name in exports_of(other))
            if not (is_below and is_exported):
                wrong.append(f"{path.name}:{line} imports {name or other} of {other}.{module or ''}")
    assert wrong == []


def modules_used(path):
    """The modules of its own package that a module imports."""
    package = package_of(path)
    for _, other, module, name in imports_of(path):
        if other == package:
            used = ROOT / package / f"{module or name}.py"
            assert used.exists(), f"{path.name} takes {name} from its own package, not from the module that defines it"
            yield used


@pytest.mark.parametrize("package", LEVEL)
def test_modules_of_a_package_import_each_other_in_no_circle(package):
    rest = {path: set(modules_used(path)) for path in FILES if package_of(path) == package and path.stem != "__init__"}
    while rest:
        free = {path for path, used in rest.items() if not used & rest.keys()}
        assert free, f"in a circle: {sorted(path.name for path in rest)}"
        rest = {path: used for path, used in rest.items() if path not in free}


@pytest.mark.parametrize("package", LEVEL)
def test_no_module_has_the_name_of_what_its_package_exports(package):
    functions = {
        node.name
        for path in FILES
        if package_of(path) == package
        for node in TREES[path].body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    modules = {path.stem for path in FILES if package_of(path) == package}
    assert functions & modules & exports_of(package) == set()


def test_no_module_has_the_name_of_a_standard_library_module():
    assert {path.stem for path in FILES} & sys.stdlib_module_names == set()
    assert set(LEVEL) & sys.stdlib_module_names == set()


@pytest.mark.parametrize("path", [path for path in FILES if package_of(path) != "backend"], ids=lambda path: path.stem)
def test_private_names_of_keras_and_tensorflow_are_used_in_backend_only(path):
    text = path.read_text(encoding="utf-8")
    assert not any(name in text for name in ("keras.src", "tensorflow.python", "tf.__internal__"))
    own = {node.name for node in ast.walk(TREES[path]) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    attributes = [node for node in ast.walk(TREES[path]) if isinstance(node, ast.Attribute)]
    own |= {node.attr for node in attributes if isinstance(node.ctx, ast.Store) and is_self(node.value)}
    foreign = {
        node.attr
        for node in attributes
        if node.attr.startswith("_") and not node.attr.startswith("__") and not is_self(node.value)
    }
    assert foreign <= own | {"_getframe"}  # of `sys`, documented


def is_self(node):
    is_super = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    return is_super or (isinstance(node, ast.Name) and node.id in ("self", "cls"))
