"""A rule of the loss scale with which it overflows again and again."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kmp.diagnosis import soundness, thresholds
from kmp.diagnosis.cause import ERROR, WARNING, Cause
from kmp.diagnosis.edits import Change, SetArguments
from kmp.diagnosis.observations import Observations
from kmp.diagnosis.wording import counted, of_steps
from kmp.utils.float_formats import FLOAT16


@dataclass(frozen=True, kw_only=True)
class RuleOverflows(Cause):
    """A loss scale that grows so often, or backs off so late, that it keeps overflowing.

    Args:
        overflows: The steps that overflowed, after the scale had stabilized or at the end.
        steps_to_undo: The number of steps that are skipped after each growth.
        arguments: The arguments to change.
        is_stuck: Whether the hysteresis keeps a scale that overflows in each step.
    """

    names: ClassVar[Mapping[str, str]] = {
        "growth_interval_too_small": "the loss scale grows faster than it backs off",
        "hysteresis_too_large": "the loss scale overflows, and backs off only after many steps",
    }

    overflows: int
    steps_to_undo: float
    arguments: list[str]
    is_stuck: bool = False

    @classmethod
    def stuck(cls, run: Observations) -> "RuleOverflows | None":
        """Returns the cause if the hysteresis keeps a scale that overflows in each step."""
        skipped, hysteresis = run.skipped, run.settings.hysteresis
        if run.format is not FLOAT16 or run.is_fixed or not skipped.is_stuck:
            return None
        replay = run.passes.backward
        if skipped.nonfinite_losses or (replay and not soundness.needs_another_scale_only(replay)):
            return None
        if hysteresis <= thresholds.STUCK_AFTER or skipped.in_a_row >= hysteresis:
            return None
        return cls(
            run=run,
            name="hysteresis_too_large",
            severity=ERROR,
            location="hysteresis",
            change=Change((SetArguments(run.settings.settings_call, {"hysteresis": "1"}),)),
            overflows=skipped.in_a_row,
            steps_to_undo=hysteresis,
            arguments=["hysteresis"],
            is_stuck=True,
        )

    @classmethod
    def growing(cls, run: Observations) -> "RuleOverflows | None":
        """Returns the cause if the scale grows again and again to one that overflows."""
        settings, skipped = run.settings, run.skipped
        interval, hysteresis = settings.growth_interval, settings.hysteresis
        if run.is_fixed or interval is None:
            return None
        growth, backoff = settings.growth_factor, settings.backoff_factor
        to_undo = -math.log2(growth) / math.log2(backoff) * hysteresis
        if to_undo < thresholds.FEW_SKIPPED * interval:
            return None
        # Not even one step was applied, or a longer streak than these settings cause.
        longest = max(thresholds.STUCK_AFTER, 2 * to_undo)
        if skipped.in_a_row >= min(skipped.steps, longest):
            return None
        after_start = skipped.gradient_overflows - skipped.start.overflows
        if after_start <= max(1, thresholds.SKIPPED_BY_GROWTH * skipped.steps):
            return None
        arguments = {}
        if interval <= 1 / thresholds.FEW_SKIPPED:
            arguments["growth_interval"] = "2000"
        if growth > 2.0:
            arguments["growth_factor"] = "2.0"
        if backoff > 0.5:
            arguments["backoff_factor"] = "0.5"
        if hysteresis > 1:
            arguments["hysteresis"] = "1"
        # In so few steps the scale has not grown, but falls to the one that suits it.
        if [*arguments] == ["growth_interval"] and run.last_step <= interval:
            return None
        return cls(
            run=run,
            name="growth_interval_too_small",
            severity=WARNING,
            location=next(iter(arguments)),
            change=Change((SetArguments(settings.settings_call, arguments),)),
            overflows=after_start,
            steps_to_undo=to_undo,
            arguments=list(arguments),
        )

    @property
    def title(self) -> str:
        if self.is_stuck:
            return "`hysteresis` is too large: the loss scale overflows, and does not back off."
        what = "The loss scale grows too fast, or backs off too slowly"
        if self.arguments == ["growth_interval"]:
            what = "`growth_interval` is too small"
        return f"{what}: the scale overflows again and again."

    @property
    def evidence(self) -> str:
        settings = self.run.settings
        if self.is_stuck:
            return (
                f"the last {self.overflows} steps were skipped with a finite loss; the scale backs"
                f" off after {settings.hysteresis} in a row"
            )
        skipped = counted(math.ceil(self.steps_to_undo), "skipped step")
        return (
            f"{of_steps(self.run, self.overflows)} overflowed after the scale had stabilized, with"
            f" growth by {settings.growth_factor:g} every {settings.growth_interval} steps; it"
            f" takes {skipped} to undo one"
        )
