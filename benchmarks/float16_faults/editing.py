"""Applies the edits of `kmp.advice` to the source of a program."""

import ast
import re
from collections.abc import Iterable

from float16_faults.truth import Edit
from kmp.advice import ComputeInFloat32, PrepareData, SetArguments


def edited(source: str, edits: Iterable[Edit]) -> str:
    """Returns the source of a program with edits applied.

    Raises:
        LookupError: If the program has no place for an edit.
    """
    tree = ast.parse(source)
    for edit in edits:
        match edit:
            case SetArguments():
                _set_arguments(tree, edit)
            case ComputeInFloat32():
                _compute_in_float32(tree, edit)
            case PrepareData():
                _prepare_data(tree, edit)
    return ast.unparse(ast.fix_missing_locations(tree))


def calls_of(tree: ast.AST, name: str) -> list[ast.Call]:
    """Returns the calls of a function, method or class, by the last part of its name."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == name]


def _calls_with_name(tree: ast.AST, name: str) -> list[ast.Call]:
    """Returns the calls with an argument `name=`, such as that which creates a layer."""
    named = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            values = [ast.unparse(each.value) for each in node.keywords if each.arg == "name"]
            if values == [repr(name)]:
                named.append(node)
    return named


def _set_arguments(tree: ast.AST, edit: SetArguments) -> None:
    function = edit.call.rpartition(".")[2]
    calls = _calls_with_name(tree, edit.name) if edit.name else calls_of(tree, function)
    if not calls:
        raise LookupError(f"The program has no call of {edit.call} {edit.name}")
    for call in calls:
        for name, value in edit.arguments.items():
            call.keywords = [keyword for keyword in call.keywords if keyword.arg != name]
            # The programs pass these by position too.
            if call.args and name in ("policy", "learning_rate", "units"):
                call.args = call.args[1:]
            call.keywords.append(ast.keyword(name, ast.parse(value, mode="eval").body))


def _compute_in_float32(tree: ast.AST, edit: ComputeInFloat32) -> None:
    calls = _calls_with_name(tree, edit.layer)
    if not calls:
        raise LookupError(f"The program has no layer {edit.layer!r}")

    class Wrap(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.Call:
            self.generic_visit(node)
            if node not in calls:
                return node
            wrapped = ast.parse("kmp.layers.Float32()", mode="eval").body
            wrapped.args = [node]
            return wrapped

    Wrap().visit(tree)


def _prepare_data(tree: ast.Module, edit: PrepareData) -> None:
    """Names the arrays of `fit`, and inserts the statement about them before it."""
    fit, body = calls_of(tree, "fit")[0], tree.body[0].body
    index = next(index for index, node in enumerate(body) if fit in ast.walk(node))
    x, y = (ast.unparse(each) for each in fit.args[:2])
    lines = [f"fit_x, fit_y = {x}, {y}"]
    fit.args = [ast.Name("fit_x", ast.Load()), ast.Name("fit_y", ast.Load())]
    for keyword in fit.keywords:
        if keyword.arg == "sample_weight":
            lines.append(f"fit_sample_weight = {ast.unparse(keyword.value)}")
            keyword.value = ast.Name("fit_sample_weight", ast.Load())
    lines.append(re.sub(r"\b(x|y|sample_weight)\b", r"fit_\1", edit.statement))
    body[index:index] = ast.parse("\n".join(lines)).body
