"""Gradients that are not multiplied by the loss scale as often as `apply` divides by it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kmp.diagnosis import changes
from kmp.diagnosis.cause import ERROR, WARNING, Cause
from kmp.diagnosis.edits import NO_CHANGE, Change, PrepareData
from kmp.diagnosis.observations import Observations
from kmp.diagnosis.wording import first_few, of_a_batch
from kmp.records import Replay
from kmp.records.step_facts import CodeLine, StepFacts
from kmp.utils.float_formats import FLOAT16

# By what the step does, see `StepFacts.scaling`.
_TITLES = {
    "nonlinear": "The training step clips or normalizes gradients while they are multiplied by the"
    " loss scale, and the optimizer then divides the result by it.",
    "added": "The training step adds to gradients while they are multiplied by the loss scale, and"
    " the optimizer then divides the sum by it.",
    "divided": "The training step divides the gradients by the loss scale, and `apply` divides them"
    " again.",
    "multiplied": "The gradients are multiplied by the loss scale more often than `apply` divides"
    " by it.",
}
_SHOWN = {
    "nonlinear": "{operation} gets scaled gradients, and is not linear",
    "added": "{operation} adds to scaled gradients",
    "divided": "{operation} divides",
    "multiplied": "{operation} multiplies by the loss scale",
}
_NOTES = {
    "nonlinear": "before that line: `apply` does not divide then; or let the optimizer clip, with"
    " its clipnorm",
    "added": "before that line: `apply` does not divide then",
    "divided": "or leave out the division, or let {optimizer}.unscale(gradients) divide: after"
    " that `apply` does not",
    "multiplied": "call {optimizer}.scale_loss once for each loss, and pass unscaled=True to"
    " `apply` only with what {optimizer}.unscale(gradients) returned",
}


@dataclass(frozen=True, kw_only=True)
class WronglyScaled(Cause):
    """A training step of the user's that scales gradients otherwise than `apply` expects.

    Args:
        kind: What the step does: `"unscaled"`, `"nonlinear"`, `"added"`, `"divided"` or
            `"multiplied"`, see `StepFacts`.
        are_all: Whether no gradient, or hardly any part of one, is scaled as `apply` expects.
        operation: The operation that does so, if it is known.
        layers: The paths of the layers with these gradients, as a program creates them.
        times: How many times too small the gradients are that the optimizer gets; `None` if that
            is not known.
        replay: The replay that shows it; `None` if the graph of the step does.
    """

    names: ClassVar[Mapping[str, str]] = {
        "unscaled_loss": "the step does not scale the loss as often as it unscales gradients",
    }

    kind: str
    are_all: bool
    operation: CodeLine | None
    layers: list[str]
    times: float | None
    replay: Replay | None = None

    @classmethod
    def of(cls, run: Observations) -> "WronglyScaled | None":
        """Returns the cause if the run has it."""
        if run.format is not FLOAT16 or run.has_step_of_keras:
            return None
        facts = run.settings.step_facts
        if facts is not None and facts.scaling not in ("right", "unknown"):
            return cls._in_graph(run, facts)
        return None if run.settings.train_step == "keras" else cls._in_replay(run)

    @classmethod
    def _in_graph(cls, run: Observations, facts: StepFacts) -> "WronglyScaled":
        replay, times, severity = run.passes.last_comparison, None, ERROR
        unscaled = replay.unscaled if replay else None
        if facts.scaling == "divided" and math.isfinite(run.loss_scale):
            times = run.loss_scale
        if facts.scaling == "nonlinear" and unscaled:
            times = unscaled.times
            if not unscaled.layers:  # all gradients grow with the scale: a clip has changed none
                severity = WARNING
        layers = list(dict.fromkeys(map(run.model.layer_of, facts.variables)))
        is_of_part = facts.scaling == "unscaled" and bool(layers)
        return cls(
            run=run,
            name="unscaled_loss",
            severity=severity,
            location=layers[0] if is_of_part else "",
            change=_change(run, facts.scaling),
            kind=facts.scaling,
            are_all=facts.are_all,
            operation=facts.operation,
            layers=layers,
            times=times,
        )

    @classmethod
    def _in_replay(cls, run: Observations) -> "WronglyScaled | None":
        replay = run.passes.last_comparison
        unscaled = replay.unscaled if replay else None
        if replay is None or unscaled is None or not unscaled.layers:
            return None
        kind = {"clipped": "nonlinear", "divided": "divided", "": "unscaled"}[unscaled.change]
        layers = list(dict.fromkeys(map(run.model.created_layer, unscaled.layers)))
        times = unscaled.times or None
        if kind == "divided":
            times = replay.loss_scale  # the passes may have fewer examples, and another factor
        return cls(
            run=run,
            name="unscaled_loss",
            location=layers[0] if kind == "unscaled" else "",
            change=_change(run, kind),
            kind=kind,
            are_all=unscaled.are_all,
            operation=None,
            layers=layers,
            times=times,
            replay=replay,
        )

    @property
    def is_measured(self) -> bool:
        """Whether the graph shows it and it is known what it does: of a clip, from a replay."""
        return self.replay is None and (self.kind != "nonlinear" or self.times is not None)

    @property
    def code(self) -> CodeLine | None:
        return self.operation

    @property
    def _is_of_other_loss(self) -> bool:
        """Whether the step differentiates another loss than `scale_loss` returns."""
        is_scaled = self.operation is not None and self.operation.operation == "Mul"
        return self.are_all and is_scaled and self.kind == "unscaled"

    @property
    def title(self) -> str:
        if self.kind != "unscaled":
            return _TITLES[self.kind]
        if self._is_of_other_loss:
            return (
                "The gradients are not those of the loss that `scale_loss` returns: they do not"
                " grow with the loss scale, and `apply` divides them by it."
            )
        if self.replay and self.are_all:  # though `scale_loss` was called
            return (
                "Hardly anything of the gradients grows with the loss scale: most of the loss is"
                " not scaled, or the training step clips or normalizes scaled gradients."
            )
        layers = first_few([self.run.model.describe(layer) for layer in self.layers])
        return (
            "A part of the loss is not multiplied by the loss scale: the gradients of"
            f" {layers} do not grow with it, and the optimizer divides them by it."
        )

    @property
    def evidence(self) -> str:
        times = ""
        if self.times and self.times >= 1.0:
            times = f"; the gradients that the optimizer gets are {self.times:,.0f} times too small"
            if self.kind != "divided":
                times += f", and the loss scale is {self.run.loss_scale:,.0f}"
        if self.replay is not None:
            return (
                f"{of_a_batch(self.replay)}, in float32, the gradients do not grow in proportion to"
                f" the loss scale{times}"
            )
        shown = "a gradient that `apply` gets shows it"
        if self._is_of_other_loss:
            shown = (
                "no gradient that `apply` gets depends on the loss scale;"
                f" {self.operation} multiplies a loss by it"
            )
        elif self.kind == "unscaled":
            shown = "no operation scales it"
            if self.operation:
                shown = f"{self.operation} adds it to the scaled one"
        elif self.operation:
            shown = _SHOWN[self.kind].format(operation=self.operation)
        if self.severity != ERROR:
            times = "; in the step that was replayed it changed nothing"
        return f"in the graph of the training step, {shown}{times}"

    @property
    def note(self) -> str:
        optimizer = _optimizer(self.run)
        if self.kind != "unscaled":
            return _NOTES[self.kind].format(optimizer=optimizer)
        if self._is_of_other_loss:
            return f"differentiate what {optimizer}.scale_loss(loss) returns"
        note = f"add up all losses, and pass the sum to {optimizer}.scale_loss"
        if self.replay and self.are_all:
            note += (
                f"; clip what {optimizer}.unscale(gradients) returns, then pass that to"
                f" {optimizer}.apply"
            )
        return note


def _optimizer(run: Observations) -> str:
    """Returns what the step calls the optimizer."""
    is_of_model = run.settings.in_fit or run.settings.train_step == "custom"
    return "self.optimizer" if is_of_model else "optimizer"


def _change(run: Observations, kind: str) -> Change:
    optimizer = _optimizer(run)
    if kind == "divided":
        return Change(changes.apply_unscaled(optimizer))
    if kind in ("nonlinear", "added"):
        return Change((PrepareData(f"gradients = {optimizer}.unscale(gradients)"),))
    return NO_CHANGE
