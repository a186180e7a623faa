"""A part of the model whose gradients float16 flushes to zero, while those of the rest are kept."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kmp.diagnosis import thresholds
from kmp.diagnosis.branch_wording import CLOSER_TERMS, distance, names_of
from kmp.diagnosis.branches import Gap, kept_variables
from kmp.diagnosis.cause import Cause
from kmp.diagnosis.causes.scale_too_small import NO_HEADROOM, largest_usable_scale
from kmp.diagnosis.edits import NO_CHANGE, Change
from kmp.diagnosis.observations import Observations
from kmp.diagnosis.wording import counted
from kmp.utils.float_formats import FLOAT16, as_power


@dataclass(frozen=True, kw_only=True)
class FlushedBranch(Cause):
    """A part of the model whose gradients are flushed, while those of the rest are not.

    Args:
        loss_scale: The loss scale of the replay that shows it.
        layers: The paths of the layers.
        flushed: The number of variables in them.
        alive: The number of variables that lose little.
        has_headroom: Whether a larger loss scale would not overflow.
        gap: How far their gradients are from those of the others in float32; `None` if that was
            not recorded.
    """

    names: ClassVar[Mapping[str, str]] = {
        "branch_underflow": "the gradients of one branch of the model underflow, others do not",
    }

    loss_scale: float
    layers: list[str]
    flushed: int
    alive: int
    has_headroom: bool
    gap: Gap | None

    @classmethod
    def of(cls, run: Observations) -> "FlushedBranch | None":
        """Returns the cause if the run has it."""
        replay, gradients = run.passes.clean, run.gradients
        if run.format is not FLOAT16 or replay is None or not gradients.can_underflow:
            return None
        layers = gradients.flushed_branch
        flushed = [name for name in gradients.flushed if run.model.layer_of(name) in layers]
        if not layers or _converged_variables(run).issuperset(flushed):
            return None
        has_headroom = gradients.headroom >= thresholds.SPARE_BITS
        return cls(
            run=run,
            name="branch_underflow",
            location=layers[0],
            change=Change(largest_usable_scale(run)) if has_headroom else NO_CHANGE,
            loss_scale=replay.loss_scale,
            layers=layers,
            flushed=len(flushed),
            alive=len(kept_variables(gradients.flushed)),
            has_headroom=has_headroom,
            gap=gradients.gap_of(layers, replay),
        )

    @property
    def title(self) -> str:
        return (
            f"The gradients of {names_of(self.layers)} are mostly zero in float16, while those of"
            " other layers are not."
        )

    @property
    def evidence(self) -> str:
        numbers = distance(self.gap)
        numbers = f"; {numbers}" if numbers else ""
        flushed, alive = counted(self.flushed, "variable"), counted(self.alive, "variable")
        return (
            f"replayed at the loss scale {as_power(self.loss_scale)}, float16 flushes more than"
            f" half of the gradients of {flushed} to zero and float32 none; of {alive} it"
            f" flushes less than 5 %{numbers}"
        )

    @property
    def note(self) -> str:
        if not self.has_headroom:
            return f"{NO_HEADROOM} {CLOSER_TERMS}"
        return "or a larger loss weight, if these layers belong to one of several outputs"


def _converged_variables(run: Observations) -> set[str]:
    """Returns the variables whose gradients have nearly vanished since earlier replays."""
    largest: dict[str, float] = {}
    newest: dict[str, float] = {}
    for sample in run.records.references:
        newest = dict(zip(sample.names, sample.norm.tolist(), strict=True))
        for name, norm in newest.items():
            largest[name] = max(largest.get(name, 0.0), norm)
    limit = thresholds.CONVERGED
    return {name for name, norm in newest.items() if norm < limit * largest[name]}
