"""Edits and runs the programs of `programs`, as a user would change them after a finding."""

import ast
import contextlib
import inspect
import math
import re
import sys
from typing import NamedTuple

import keras
import numpy as np
from programs import PROGRAMS

import kmp
from kmp.advice import ComputeInFloat32, PrepareData, SetArguments


class Outcome(NamedTuple):
    """The results of a program, as it is and with the advised change.

    Attributes:
        score: The score of the program as it is; NaN if training got stuck.
        advice: What is advised.
        cured_score: The score with the change of the first problem; NaN if there is no problem or
            no change.
    """

    score: float
    advice: kmp.advice.Advice
    cured_score: float


class Scores(NamedTuple):
    """The scores of a program in Keras without kmp.

    Attributes:
        float32: In float32.
        as_written: In the precision that the program sets.
        cured: As written, with a change that cures it.
    """

    float32: float
    as_written: float
    cured: float

    def __str__(self):
        return (
            f"float32 {self.float32:.3g}, as written {self.as_written:.3g}, cured {self.cured:.3g}"
        )


def outcome_of(name, folder):
    """Runs a program without the float32 fallback, and again with the change that is advised."""
    source = edited(source_of(name), [SetArguments("kmp.callbacks.defaults", {"repair": "False"})])
    score, run = run_program(name, folder / "original", source)
    advice = kmp.advise(run)
    edits = advice.problems[0].edits if advice.problems else ()
    cured_score = math.nan
    if edits:
        cured_score, _ = run_program(
            name, folder / "changed", _without_records(edited(source, edits))
        )
    return Outcome(score, advice, cured_score)


def source_of(name):
    """Returns the source of a program."""
    return inspect.getsource(PROGRAMS[name])


def is_named(at, finding):
    """Whether a finding names a layer, an argument or a part of the batch."""
    return at in finding.title or at in finding.change


def run_program(name, folder, source=None):
    """Runs a program, or a changed source of it, in a folder.

    Returns its score, NaN if it is stuck, and its run.
    """
    folder.mkdir(parents=True)
    namespace = dict(vars(inspect.getmodule(PROGRAMS[name])), __name__=name)
    exec(compile(source or source_of(name), name, "exec"), namespace)
    score = math.nan
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    try:
        with contextlib.chdir(folder), contextlib.suppress(kmp.callbacks.StuckError):
            score = float(namespace[name](np.random.default_rng(0)))
    finally:
        kmp.disable()
        keras.config.set_dtype_policy("float32")
        sys.modules.pop(name, None)
    return score, kmp.load_run(folder / "run") if (folder / "run").exists() else None


def scores_in_keras(name, folder, cure):
    """Runs a program without kmp: in float32, as it is written, and with edits that cure it.

    Without edits, the program needs no cure.
    """
    source = _without_kmp(source_of(name))
    in_float32, _ = run_program(name, folder / "float32", _in_float32(source))
    as_written, _ = run_program(name, folder / "as_written", source)
    cured = as_written
    if cure:
        cured, _ = run_program(name, folder / "cured", edited(source, cure))
    return Scores(in_float32, as_written, cured)


def _without_kmp(source):
    changed, count = re.subn(r"kmp\.callbacks\.defaults\([^()]*\)", "[]", source)
    assert count == 1
    return changed.replace("kmp.enable(", "keras.config.set_dtype_policy(")


def _in_float32(source):
    return re.sub(r"""(["'])(mixed_)?bfloat16\1""", "'float32'", source)


def edited(source, edits):
    """Returns the source of a program with the edits of a finding applied.

    Raises:
        LookupError: If the program has no place for an edit.
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
    """Returns a program that records nothing, and takes half of the time.

    Its score is the same.
    """
    changed, count = re.subn(
        r"kmp\.callbacks\.defaults\([^()]*\)", "[kmp.callbacks.Monitor(replay=False)]", source
    )
    assert count == 1
    return changed


def _set_arguments(tree, edit):
    calls = (
        _calls_with_name(tree, edit.name)
        if edit.name
        else _calls(tree, edit.call.rpartition(".")[2])
    )
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
    fit, body = _calls(tree, "fit")[0], tree.body[0].body
    index = next(
        index for index, node in enumerate(body) if any(call is fit for call in ast.walk(node))
    )
    arguments = f"fit_x, fit_y = {ast.unparse(fit.args[0])}, {ast.unparse(fit.args[1])}\n"
    fit.args = [ast.Name("fit_x", ast.Load()), ast.Name("fit_y", ast.Load())]
    for keyword in fit.keywords:
        if keyword.arg == "sample_weight":
            arguments += f"fit_sample_weight = {ast.unparse(keyword.value)}\n"
            keyword.value = ast.Name("fit_sample_weight", ast.Load())
    statement = re.sub(r"\b(x|y|sample_weight)\b", r"fit_\1", edit.statement)
    body[index:index] = ast.parse(arguments + statement).body


def _calls(tree, name):
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {name, "LossScaleOptimizer"} if name == "wrap" else {name}
    return [call for call in calls if ast.unparse(call.func).rpartition(".")[2] in names]


def _calls_with_name(tree, name):
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [
        call
        for call in calls
        if any(k.arg == "name" and ast.unparse(k.value) == repr(name) for k in call.keywords)
    ]


def is_cured(score, sound):
    """Whether a score is as good as that of a sound run.

    0.05 of an accuracy less is, and so is a quarter of an error more.
    """
    return np.isfinite(score) and score >= sound - max(0.05, 0.25 * abs(sound) * (sound < 0))
