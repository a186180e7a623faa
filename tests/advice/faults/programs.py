"""Edits and runs the scripts of this folder: what a user would write, and would change as a finding says."""

import ast
import contextlib
import math
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np

import kmp
from kmp.advice.finding import ComputeInFloat32, PrepareData, SetArguments

SCRIPTS = Path(__file__).parent / "scripts"


class Outcome(NamedTuple):
    """The results of a script, as it is and with the advised change.

    Attributes:
        score: The score of the script as it is; NaN if training got stuck.
        advice: What is advised.
        cured_score: The score with the change of the first problem; NaN if there is no problem or no change.
    """

    score: float
    advice: kmp.advice.Advice
    cured_score: float


def outcome_of(name, folder):
    """Runs a script without the float32 fallback, and again with the change that is advised."""
    source = edited(source_of(name), [SetArguments("kmp.callbacks.defaults", {"float32_fallback": "False"})])
    score, run = run_script(source, folder / "original")
    advice = kmp.advise(run)
    edits = advice.problems[0].edits if advice.problems else ()
    cured_score = run_script(_without_records(edited(source, edits)), folder / "changed")[0] if edits else math.nan
    return Outcome(score, advice, cured_score)


def source_of(name):
    """Returns the source of a script."""
    return (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")


def is_named(at, finding):
    """Whether the title or the change of a finding names a layer, an argument or a part of the batch."""
    return at in finding.title or at in finding.change


def run_script(source, folder, name="script"):
    """Runs a script in a folder; returns its score, NaN if training is stuck, and its run."""
    folder.mkdir(parents=True)
    previous = Path.cwd()
    score = float("nan")
    os.chdir(folder)
    try:
        keras.backend.clear_session()
        namespace = {"__name__": name}
        with contextlib.suppress(kmp.callbacks.StuckError):
            exec(compile(source, name, "exec"), namespace)
            score = float(namespace["score"])
    finally:
        os.chdir(previous)
        kmp.disable()
        sys.modules.pop(name, None)
    return score, kmp.load_run(folder / "run") if (folder / "run").exists() else None


def edited(source, edits):
    """Returns a script with the edits of a finding applied.

    Raises:
        LookupError: If the script has no place for an edit.
    """
    tree = ast.parse(source)
    for edit in edits:
        {
            SetArguments: _set_arguments,
            ComputeInFloat32: _compute_in_float32,
            PrepareData: _prepare_data,
        }[type(edit)](tree, edit)
    return ast.unparse(ast.fix_missing_locations(tree))


def _without_records(source):
    """Returns a script that records nothing: its score is the same, and it takes half of the time."""
    changed, count = re.subn(r"kmp\.callbacks\.defaults\([^()]*\)", "[kmp.callbacks.StuckDetector()]", source)
    assert count == 1
    return changed


def _set_arguments(tree, edit):
    calls = _calls_with_name(tree, edit.name) if edit.name else _calls(tree, edit.call.rpartition(".")[2])
    if not calls:
        raise LookupError(f"no call of {edit.call} {edit.name}")
    for call in calls:
        for name, value in edit.arguments.items():
            call.keywords = [keyword for keyword in call.keywords if keyword.arg != name]
            if call.args and name in ("policy", "learning_rate", "units"):
                call.args = call.args[1:]
            call.keywords.append(ast.keyword(name, ast.parse(value, mode="eval").body))


def _compute_in_float32(tree, edit):
    calls = _calls_with_name(tree, edit.layer)
    if not calls:
        raise LookupError(f"no layer {edit.layer}")

    class Wrap(ast.NodeTransformer):
        def visit_Call(self, node):
            self.generic_visit(node)
            wrapped = ast.parse("kmp.layers.Float32()", mode="eval").body
            wrapped.args = [node]
            return wrapped if node in calls else node

    Wrap().visit(tree)


def _prepare_data(tree, edit):
    fit = _calls(tree, "fit")[0]
    index = next(index for index, node in enumerate(tree.body) if any(call is fit for call in ast.walk(node)))
    arguments = f"fit_x, fit_y = {ast.unparse(fit.args[0])}, {ast.unparse(fit.args[1])}\n"
    fit.args = [ast.Name("fit_x", ast.Load()), ast.Name("fit_y", ast.Load())]
    for keyword in fit.keywords:
        if keyword.arg == "sample_weight":
            arguments += f"fit_sample_weight = {ast.unparse(keyword.value)}\n"
            keyword.value = ast.Name("fit_sample_weight", ast.Load())
    statement = re.sub(r"\b(x|y|sample_weight)\b", r"fit_\1", edit.statement)
    tree.body[index:index] = ast.parse(arguments + statement).body


def _calls(tree, name):
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {name, "LossScaleOptimizer"} if name == "wrap" else {name}
    return [call for call in calls if ast.unparse(call.func).rpartition(".")[2] in names]


def _calls_with_name(tree, name):
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [
        call for call in calls if any(k.arg == "name" and ast.unparse(k.value) == repr(name) for k in call.keywords)
    ]


def is_cured(score, sound):
    """Whether a score is as good as that of a sound run: 0.05 of an accuracy less, or a quarter of an error more."""
    return np.isfinite(score) and score >= sound - max(0.05, 0.25 * abs(sound) * (sound < 0))
