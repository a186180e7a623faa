"""A setting of the loss scale at which gradients overflow: fixed, minimum or initial scale."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kmp.diagnosis import soundness, thresholds
from kmp.diagnosis.cause import ERROR, INFO, WARNING, Cause
from kmp.diagnosis.changes import power
from kmp.diagnosis.edits import Change, SetArguments
from kmp.diagnosis.observations import Observations
from kmp.diagnosis.wording import of_steps, skipped_with_finite_loss
from kmp.utils.float_formats import FLOAT16, as_power


@dataclass(frozen=True, kw_only=True)
class ScaleTooLarge(Cause):
    """A setting of the loss scale at which gradients overflow.

    Args:
        scale: The setting.
        suitable: A loss scale that does; `None` if it is not known.
        is_replayed: Whether a replay has shown that.
        skipped: The number of steps that were skipped because of it.
        first_steps: Of an initial scale, the number of steps in which that was; else 0.
        is_needless: Whether the format of the run needs no loss scale.
    """

    names: ClassVar[Mapping[str, str]] = {
        "scale_too_large": "a fixed or minimum loss scale makes gradients overflow",
        "initial_scale": "the initial loss scale makes the first steps overflow",
    }

    scale: float
    suitable: float | None = None
    is_replayed: bool = False
    skipped: int = 0
    first_steps: int = 0
    is_needless: bool = False

    @classmethod
    def of_format(cls, run: Observations) -> "ScaleTooLarge | None":
        """Returns the cause if gradients of a format overflow that needs no loss scale."""
        skipped = run.skipped.gradient_overflows
        if run.format is FLOAT16 or run.skipped.are_few(skipped) or not run.loss_scale > 1.0:
            return None
        return cls(
            run=run,
            name="scale_too_large",
            location="loss_scale",
            change=Change((SetArguments(run.settings.settings_call, {"loss_scale": "1.0"}),)),
            scale=run.loss_scale,
            skipped=skipped,
            is_needless=True,
        )

    @classmethod
    def fixed(cls, run: Observations) -> "ScaleTooLarge | None":
        """Returns the cause if a fixed scale overflows."""
        skipped = run.skipped.gradient_overflows
        if not run.is_fixed or run.skipped.are_few(skipped):
            return None
        curve, suitable = run.gradients.curve, None
        if curve and curve.recommended and curve.recommended[1] < math.log2(run.loss_scale):
            suitable = 2.0 ** curve.recommended[1]
        return cls(
            run=run,
            name="scale_too_large",
            location="loss_scale",
            change=Change((SetArguments(run.settings.settings_call, {"loss_scale": "'dynamic'"}),)),
            scale=run.loss_scale,
            suitable=suitable,
            skipped=skipped,
        )

    @classmethod
    def minimum(cls, run: Observations) -> "ScaleTooLarge | None":
        """Returns the cause if gradients still overflow at the minimum of a dynamic scale."""
        suitable, skipped = soundness.suitable_scale(run.passes.backward), run.skipped
        if run.is_fixed or not suitable or suitable >= run.min_scale:
            return None
        are_many = skipped.gradient_overflows > thresholds.MANY_SKIPPED * skipped.steps
        if not skipped.is_stuck and not (are_many and run.loss_scale <= run.min_scale):
            return None
        # A minimum needs a margin, because the gradients of other batches are larger. If no step
        # was applied, a run needs a lower start too.
        exponent = math.log2(suitable) - thresholds.SPARE_BITS
        arguments = {"min_scale": power(min(math.log2(FLOAT16.smallest_normal), exponent))}
        if skipped.count == skipped.steps:
            arguments["initial_scale"] = power(math.log2(suitable))
        return cls(
            run=run,
            name="scale_too_large",
            location="min_scale",
            change=Change((SetArguments(run.settings.settings_call, arguments),), _tried(suitable)),
            scale=run.min_scale,
            suitable=suitable,
            is_replayed=True,
            skipped=skipped.gradient_overflows,
        )

    @classmethod
    def initial(cls, run: Observations) -> "ScaleTooLarge | None":
        """Returns the cause if the initial scale has skipped the first steps."""
        settings, steps, start = run.settings, run.skipped.steps, run.skipped.start
        if run.is_fixed or settings.initial_scale is None:
            return None
        skipped, first_steps, suitable = start.overflows, start.step, start.loss_scale
        has_never_updated = run.skipped.in_a_row == run.skipped.count == steps
        of_replay = soundness.suitable_scale(run.passes.backward)
        is_replayed = has_never_updated and not run.skipped.nonfinite_losses and bool(of_replay)
        if is_replayed and of_replay:
            skipped, first_steps, suitable = steps, steps, of_replay
        if skipped <= thresholds.SKIPPED_AT_START:
            return None
        # The scale has only decreased, with one growth at most.
        lowest = settings.initial_scale * settings.backoff_factor**skipped * settings.growth_factor
        if not (has_never_updated or suitable <= lowest):
            return None
        limit = max(thresholds.SLOW_START, thresholds.MOST_SKIPPED * steps)
        severity = WARNING if skipped > limit else INFO
        edit = SetArguments(settings.settings_call, {"initial_scale": power(math.log2(suitable))})
        return cls(
            run=run,
            name="initial_scale",
            severity=ERROR if has_never_updated else severity,
            location="initial_scale",
            change=Change((edit,), _tried(suitable)) if is_replayed else Change((edit,)),
            scale=settings.initial_scale,
            suitable=suitable,
            is_replayed=is_replayed,
            skipped=skipped,
            first_steps=first_steps,
        )

    @property
    def title(self) -> str:
        scale = as_power(self.scale)
        if self.is_needless:
            name = self.run.format.name
            return f"The loss scale of {scale} makes gradients overflow, and {name} needs none."
        kinds = {"loss_scale": "fixed", "min_scale": "minimum", "initial_scale": "initial"}
        return f"The {kinds[self.location]} loss scale of {scale} is too large."

    @property
    def evidence(self) -> str:
        run = self.run
        if self.is_needless:
            name = run.format.name
            wide = "has a wide range" if name == "float32" else "has float32's range"
            skipped = skipped_with_finite_loss(run)
            return f"{skipped}; the model computes in {run.dtypes}, and {name} {wide}"
        parts = [
            f"{of_steps(run, self.skipped)} overflowed in the backward pass with a finite loss"
        ]
        origin, share = run.skipped.main_origin
        if self.location == "initial_scale":
            first = f"{self.skipped} of the first {self.first_steps} steps were skipped"
            trained = f" before the scale had dropped to {as_power(self.suitable or 0.0)}"
            if self.is_replayed:
                trained = " with a finite loss, and none trained"
            parts = [first + trained]
        elif origin and self.location == "loss_scale":
            parts.append(f"{origin} was the overflow origin in {share:.0%} of them")
        return "; ".join(parts)

    @property
    def note(self) -> str:
        if self.location != "loss_scale" or self.suitable is None:
            return ""
        return f"or loss_scale={power(math.log2(self.suitable))}"


def _tried(scale: float) -> str:
    return f"at the loss scale {as_power(scale)} the gradients for the batch are finite"
