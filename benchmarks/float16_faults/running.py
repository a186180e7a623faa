"""Trains programs, alone and under a tool."""

import contextlib
import inspect
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

import kmp
from float16_faults.in_keras import in_keras
from float16_faults.programs import PROGRAMS
from float16_faults.tool import Finding, Tool
from float16_faults.truth import CAUSES, HEALTHY


@dataclass(frozen=True)
class Outcome:
    """What a tool achieves on a program. `None` is the score of a training that fails.

    Attributes:
        program: The name of the program.
        score: The score under the tool, while it changes nothing.
        findings: What the tool reports; of a healthy program, these are false alarms.
        cured_score: The score with the change of the first finding, without the tool.
        repaired_score: The score under the tool, if it may change the training.
        verdict: What the tool says of the run as a whole.
    """

    program: str
    score: float | None
    findings: tuple[Finding, ...]
    cured_score: float | None
    repaired_score: float | None
    verdict: str = ""


def outcome_of(program: str, tool: type[Tool], folder: Path) -> Outcome:
    """Runs a program under a tool, and again with the change and the repair that the tool has.

    Args:
        program: The name of the program.
        tool: The class of the tool.
        folder: An existing folder for files of the trainings.
    """
    source = source_of(program, uses_kmp=tool.uses_kmp)
    # A healthy program is watched as users do it; one with a fault must show it unrepaired.
    repair = program in HEALTHY and tool.repairs
    outcome = _watched(program, tool, source, folder / "watched", repair)
    first = next(iter(outcome.findings), None)
    if program in HEALTHY:
        return _without_sources(outcome)
    if first and first.change:
        cured = score_of(program, first.change, folder / "cured")
        outcome = replace(outcome, cured_score=cured)
    if tool.repairs:
        repaired = _watched(program, tool, source, folder / "repaired", repair=True)
        outcome = replace(outcome, repaired_score=repaired.score)
    return _without_sources(outcome)


def source_of(program: str, uses_kmp: bool = True) -> str:
    """Returns the source of a program, as it is written or for Keras without kmp.

    Raises:
        ValueError: If Keras cannot train it.
    """
    source = inspect.getsource(PROGRAMS[program])
    return source if uses_kmp else in_keras(source)


def score_of(program: str, source: str, folder: Path) -> float | None:
    """Returns the score of a source of a program without a tool, or `None` if it fails."""
    return _watched(program, Tool, source, folder, repair=False).score


def train(program: str, source: str, folder: Path, callbacks: Sequence[Any]) -> float:
    """Runs a source of a program in a folder, and returns its score."""
    namespace = dict(vars(inspect.getmodule(PROGRAMS[program])), __name__=program)
    exec(compile(source, program, "exec"), namespace)
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    try:
        with contextlib.chdir(folder):
            return float(namespace[program](np.random.default_rng(0), callbacks))
    finally:
        kmp.disable()
        keras.config.set_dtype_policy("float32")


def is_named(place: str, text: str) -> bool:
    """Whether a text has the name of a place as words of its own.

    Case is ignored, and `_` is a space: "learning_rate" occurs in "The learning rate is large".
    """
    words = re.escape(_words(place))
    return re.search(rf"\b{words}\b", _words(text)) is not None


def _words(text: str) -> str:
    return text.casefold().replace("_", " ")


def _watched(
    program: str, tool_class: type[Tool], source: str, folder: Path, repair: bool
) -> Outcome:
    """Runs a source of a program under a tool, in a new folder."""
    folder.mkdir()
    tool = tool_class(source, folder, repair)
    score, errors = None, []
    try:
        with tool:
            score = train(program, source, folder, tool.callbacks())
    except Exception as error:  # whatever a tool or a training raises is a finding
        errors = [Finding(f"{type(error).__name__}: {error}")]
    score = score if score is not None and math.isfinite(score) else None
    findings = [_checked(finding) for finding in tool.findings()]
    return Outcome(program, score, (*findings, *errors), None, score, tool.verdict())


def _checked(finding: Finding) -> Finding:
    if not isinstance(finding, Finding):
        raise TypeError(f"findings() returns a list of Finding. Received: {finding!r}")
    if finding.cause is not None and finding.cause not in CAUSES:
        raise ValueError(
            f"The cause of a finding is None, or one of {', '.join(CAUSES)}."
            f" Received: cause={finding.cause!r}"
        )
    return finding


def _without_sources(outcome: Outcome) -> Outcome:
    """Returns an outcome without the sources of changes, of which the score is all that counts."""
    findings = tuple(replace(finding, change=None) for finding in outcome.findings)
    return replace(outcome, findings=findings)
