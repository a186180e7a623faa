"""What import-linter's contracts in `pyproject.toml` cannot say about the packages."""

import ast
import re
import sys
from pathlib import Path

import kmp
import kmp_bench
import kmp_cli

ROOT = Path(kmp.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT)
OUTSIDE = sorted(
    path for package in (kmp_bench, kmp_cli) for path in Path(package.__file__).parent.rglob("*.py")
)
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in (*FILES, *OUTSIDE)}
PACKAGES = sorted({path.relative_to(ROOT).parts[0] for path in FILES})


def package_of(path):
    parts = path.relative_to(ROOT.parent).parts
    return parts[1] if parts[0] == "kmp" else parts[0]


def exports_of(package):
    """The names that the package's `__init__` imports: what other packages may use."""
    imports = [
        node
        for node in ast.walk(TREES[ROOT / package / "__init__.py"])
        if isinstance(node, ast.ImportFrom)
    ]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def test_every_folder_is_a_package_with_a_docstring():
    assert [
        name for name in PACKAGES if not ast.get_docstring(TREES[ROOT / name / "__init__.py"])
    ] == []
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}


def test_package_imports_what_others_export_from_them_and_other_public_names_from_the_module():
    wrong = []
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "kmp":
                continue
            _, *parts = node.module.split(".")
            for alias in node.names:
                if not parts:  # `from kmp import package`; outside also what users import
                    is_right = alias.name in PACKAGES
                    is_right |= path in OUTSIDE and alias.name in kmp.__all__
                elif parts[0] == package_of(path):  # a module of its own, or a name in one
                    is_right = len(parts) > 1 or (ROOT / parts[0] / f"{alias.name}.py").exists()
                else:
                    is_exported = alias.name in exports_of(parts[0])
                    is_module = (ROOT / parts[0] / f"{alias.name}.py").exists()
                    is_of_package = len(parts) == 1
                    is_right = is_exported == is_of_package or (is_of_package and is_module)
                    is_right &= not any(re.match("_(?!_)", part) for part in (*parts, alias.name))
                if not is_right:
                    wrong.append(f"{path}:{node.lineno} imports {alias.name} of {node.module}")
    assert wrong == []


def test_packages_export_what_they_list_and_nothing_is_exported_in_silence():
    for package in PACKAGES:
        nodes = TREES[ROOT / package / "__init__.py"].body
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        assert [alias.name for node in imports for alias in node.names if alias.asname] == []


def test_no_module_has_the_name_of_what_its_package_exports_or_of_the_standard_library():
    assert ({path.stem for path in FILES} | set(PACKAGES)) & sys.stdlib_module_names == set()
    for path in FILES:
        defined = {
            node.name
            for node in TREES[path].body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        modules = {other.stem for other in FILES if package_of(other) == package_of(path)}
        assert defined & modules & exports_of(package_of(path)) == set()


def test_private_names_of_keras_and_tensorflow_are_used_in_backend_only():
    for path in (path for path in TREES if package_of(path) != "backend"):
        text = path.read_text(encoding="utf-8")
        assert not any(
            name in text for name in ("keras.src", "tensorflow.python", "tf.__internal__")
        ), path
        own = {
            node.name
            for node in ast.walk(TREES[path])
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        attributes = [node for node in ast.walk(TREES[path]) if isinstance(node, ast.Attribute)]
        own |= {
            node.attr
            for node in attributes
            if isinstance(node.ctx, ast.Store) and is_self(node.value)
        }
        of_others = {node.attr for node in attributes if not is_self(node.value)}
        private = {name for name in of_others if name.startswith("_") and not name.startswith("__")}
        # Of named tuples and `sys`, documented.
        assert private <= own | {"_asdict", "_fields", "_replace", "_getframe"}, path


def is_self(node):
    is_super = (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    )
    return is_super or (isinstance(node, ast.Name) and node.id in ("self", "cls"))
