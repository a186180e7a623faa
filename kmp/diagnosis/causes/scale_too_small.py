"""A loss scale at which gradients underflow: a larger one would not, or would overflow."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kmp.diagnosis import changes, thresholds
from kmp.diagnosis.cause import ERROR, INFO, WARNING, Cause
from kmp.diagnosis.edits import Change, Edits, SetArguments
from kmp.diagnosis.loss_scale_sweep import usable_scale
from kmp.diagnosis.observations import Observations
from kmp.scaling import DynamicScale
from kmp.utils.float_formats import FLOAT16, as_power

NO_HEADROOM = "a larger loss scale would overflow, and no change was replayed:"


@dataclass(frozen=True, kw_only=True)
class ScaleTooSmall(Cause):
    """A loss scale at which gradients underflow.

    Its name is `"scale_too_small"`, or `"range"` if a larger one would overflow.

    Args:
        subnormal_share: The share of the sampled elements that are subnormal.
        flushed_share: The mean share of a gradient that is zero in float16 but not in float32.
        largest: If a larger scale would overflow, the path of the variable with the largest
            gradients; else empty.
        smallest: The path of the variable that underflows most then.
    """

    names: ClassVar[Mapping[str, str]] = {
        "scale_too_small": "the loss scale leaves the gradients to underflow",
        "range": "large gradients of one variable keep the loss scale too low for the others",
    }

    subnormal_share: float
    flushed_share: float
    largest: str = ""
    smallest: str = ""

    @classmethod
    def of(cls, run: Observations) -> "ScaleTooSmall | None":
        """Returns the cause if a larger scale would not overflow."""
        gradients, skipped = run.gradients, run.skipped
        if run.format is not FLOAT16 or not gradients.can_underflow:
            return None
        if gradients.headroom < thresholds.SPARE_BITS:
            return None
        if skipped.gradient_overflows > thresholds.FEW_SKIPPED * skipped.steps:
            return None
        flushed = gradients.flushed_share
        are_many_flushed = flushed > thresholds.MANY_FLUSHED
        if gradients.subnormal_share <= thresholds.MANY_SUBNORMAL and not are_many_flushed:
            return None
        agree = run.passes.agree_late and run.passes.compare(gradients.underflows)
        return cls(
            run=run,
            name="scale_too_small",
            severity=INFO if agree and not are_many_flushed else ERROR,
            location="loss_scale" if run.is_fixed else "initial_scale",
            change=Change(largest_usable_scale(run)),
            subnormal_share=gradients.subnormal_share,
            flushed_share=flushed,
        )

    @classmethod
    def in_wide_range(cls, run: Observations) -> "ScaleTooSmall | None":
        """Returns the cause if the large gradients of a variable keep the scale too low."""
        gradients = run.gradients
        if run.format is not FLOAT16 or not gradients.can_underflow:
            return None
        if gradients.headroom >= thresholds.SPARE_BITS:
            return None
        if gradients.subnormal_share <= thresholds.MOST:
            return None
        newest = gradients.finite[-1]
        largest = newest.names[int(newest.amax.argmax())]
        smallest = newest.names[int(newest.small_shares.argmax())]
        if run.passes.agree_late and run.passes.compare([smallest]):
            return None
        return cls(
            run=run,
            name="range",
            severity=WARNING,
            location=largest,
            subnormal_share=gradients.subnormal_share,
            flushed_share=gradients.flushed_share,
            largest=largest,
            smallest=smallest,
        )

    @property
    def title(self) -> str:
        if self.largest:
            return f"The gradients of {self.largest} keep the loss scale too low for the others."
        effect = "is too small: gradients are lost to underflow"
        if self.severity == INFO:
            effect = "is low: a larger one would keep more bits of small gradients"
        return f"The loss scale of {as_power(self.run.loss_scale)} {effect}."

    @property
    def evidence(self) -> str:
        run, gradients, headroom = self.run, self.run.gradients, self.run.gradients.headroom
        subnormal = (
            f"{self.subnormal_share:.1%} of the nonzero sampled gradient elements are subnormal in"
            " float16 at the loss scale in use"
        )
        if self.largest:
            return (
                f"{subnormal}, {as_power(run.loss_scale)}, with {max(headroom, 0.0):.0f} bits of"
                f" headroom before overflow; {self.largest} has the largest gradients, and"
                f" {self.smallest} underflows most"
            )
        parts = []
        if self.subnormal_share > thresholds.MANY_SUBNORMAL:
            if math.isfinite(headroom):
                subnormal += f", with {headroom:.0f} bits of headroom before overflow"
            parts.append(subnormal)
        if self.flushed_share > thresholds.MANY_FLUSHED:
            parts.append(
                f"replayed, {self.flushed_share:.1%} of the elements of a gradient are zero in"
                " float16 but not in float32"
            )
        if gradients.underflow_origins:
            path, count = max(gradients.underflow_origins.items(), key=lambda item: item[1])
            samples = len(gradients.finite)
            parts.append(f"the underflow origin is {path} in {count} of {samples} samples")
        agreeing = run.passes.largest_gradient_error if self.severity == INFO else None
        if agreeing:
            parts.append(
                "compared with float32, the gradients of a layer differ by at most"
                f" {agreeing.error:.1%}"
            )
        return "; ".join(parts)

    @property
    def note(self) -> str:
        if not self.largest:
            return ""
        layer = self.run.model.layer_of(self.largest)
        return f"{NO_HEADROOM} try a smaller loss weight for that part, or float32 for {layer}"


def largest_usable_scale(run: Observations) -> Edits:
    """Returns the largest scale that the samples or a replay allow, or a dynamic one."""
    curve, highest = run.gradients.curve, usable_scale(run.records)
    best = round(math.log2(DynamicScale.initial_scale))
    if curve and curve.recommended:
        best = curve.recommended[1]
    elif 0.0 < highest < math.inf:  # all samples are zero, so only a replay shows the gradients
        best = math.floor(math.log2(highest))
    elif run.is_fixed:
        return (SetArguments(run.settings.settings_call, {"loss_scale": "'dynamic'"}),)
    if 2.0**best <= run.loss_scale:
        return ()  # it is in use already
    return (changes.larger_scale(run, best),)
