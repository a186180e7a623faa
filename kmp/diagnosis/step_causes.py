"""Causes in what a training step does with the loss scale, as its graph shows it."""

import math
from dataclasses import dataclass

from kmp.diagnosis import edits
from kmp.diagnosis.cause import (
    ERROR,
    LOSS_SCALES,
    WARNING,
    Cause,
    Edits,
    PrepareData,
    Stage,
)
from kmp.diagnosis.run_metrics import RunMetrics
from kmp.records.gradient_sample import layer_of
from kmp.records.step_facts import StepFacts

_NO_FAULTS = ("right", "unknown")


@dataclass(frozen=True, kw_only=True)
class WronglyScaled(Cause):
    """Gradients that are not multiplied by the loss scale as often as `apply` divides by it.

    Args:
        facts: What the graph of the step shows.
        layers: The paths of the layers with these gradients, as a program creates them.
        optimizer: What the step calls the optimizer.
        times: How many times too small the gradients are that the optimizer gets; `None` if that
            is not known.
    """

    formats = LOSS_SCALES
    stage = Stage.LOSS_SCALING

    facts: StepFacts
    layers: list[str]
    optimizer: str
    times: float | None

    @property
    def is_measured(self) -> bool:
        """Whether it is known what it does: of a clip, only from a replay."""
        return self.facts.scaling != "nonlinear" or self.times is not None

    @classmethod
    def of(cls, run: RunMetrics) -> "WronglyScaled | None":
        """Returns the cause if the run has it, of a step of the user's own."""
        facts = run.step_facts
        if facts is None or facts.scaling in _NO_FAULTS or run.has_step_of_keras:
            return None
        layers = dict.fromkeys(run.created_layer(layer_of(path)) for path in facts.variables)
        is_of_fit = bool(run.settings.in_fit)
        optimizer = "self.optimizer" if is_of_fit else "optimizer"
        return cls(
            name="unscaled_loss",
            severity=WARNING if _has_no_effect(run, facts) else ERROR,
            location=next(iter(layers), "") if facts.scaling == "unscaled" else "",
            edits=_edits(facts, optimizer),
            facts=facts,
            layers=list(layers),
            optimizer=optimizer,
            times=_times_too_small(run, facts),
        )


@dataclass(frozen=True, kw_only=True)
class ChangedInLayer(WronglyScaled):
    """A gradient function of a layer that is not linear, under the training step of Keras.

    What it does to the training is measured, as `UnscaledLoss`, or is not known.
    """

    stage = Stage.LAST

    @classmethod
    def of(cls, run: RunMetrics) -> "ChangedInLayer | None":
        """Returns the cause if the run has it."""
        facts = run.step_facts
        if facts is None or facts.scaling != "nonlinear" or not run.has_step_of_keras:
            return None
        layers = dict.fromkeys(run.created_layer(layer_of(path)) for path in facts.variables)
        return cls(
            name="unscaled_loss",
            severity=WARNING,
            location=next(iter(layers), ""),
            facts=facts,
            layers=list(layers),
            optimizer="self.optimizer",
            times=None,
        )


def _edits(facts: StepFacts, optimizer: str) -> Edits:
    if facts.scaling == "divided":
        return edits.apply_unscaled(optimizer)
    if facts.scaling in ("nonlinear", "added"):
        return (PrepareData(f"gradients = {optimizer}.unscale(gradients)"),)
    return edits.NONE


def _times_too_small(run: RunMetrics, facts: StepFacts) -> float | None:
    if facts.scaling == "divided":
        return run.scale if math.isfinite(run.scale) else None
    if facts.scaling != "nonlinear":
        return None
    replay = run.last_comparison
    return replay.unscaled.times if replay and replay.unscaled else None


def _has_no_effect(run: RunMetrics, facts: StepFacts) -> bool:
    """Whether all gradients of a replay grow with the loss scale, so that a clip changed none."""
    if facts.scaling != "nonlinear":
        return False
    replay = run.last_comparison
    return replay is not None and replay.unscaled is not None and not replay.unscaled.layers
