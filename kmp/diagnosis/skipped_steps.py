"""The steps of a run that were skipped."""

import itertools
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from kmp.diagnosis import thresholds
from kmp.records import Run


@dataclass(frozen=True)
class Start:
    """The steps until the first record after an applied step.

    Args:
        overflows: Those of a finite loss that were skipped.
        step: The step of that record; 0 if it is not known.
        loss_scale: Its loss scale; NaN if it is not known.
    """

    overflows: int
    step: int
    loss_scale: float


class SkippedSteps:
    """How many steps were skipped and why, and how the run ends.

    Args:
        run: The records, since the last repair.
        last_step: The last step.
        steps: The number of steps since the last repair.
        loss_scale: The loss scale in use.

    Attributes:
        steps: The number of steps.
        count: Those that were skipped.
        nonfinite_losses: Those of them with a non-finite loss.
        gradient_overflows: Those of them with a finite loss.
        in_a_row: Those at the end of the run.
    """

    def __init__(self, run: Run, last_step: int, steps: int, loss_scale: float) -> None:
        self._run, self._last_step, self._loss_scale = run, last_step, loss_scale
        self.steps = steps
        self.count = int(run.last("overflow_count") or 0)
        self.nonfinite_losses = int(run.last("nonfinite_loss_count") or 0)
        self.gradient_overflows = self.count - self.nonfinite_losses
        self.in_a_row = int(run.last("overflows_in_a_row") or 0)

    def are_few(self, skipped: int) -> bool:
        """Whether so many skipped steps are few: of a short run one, if another one trains."""
        return skipped <= thresholds.FEW_SKIPPED * self.steps or skipped == 1 < self.steps

    @property
    def ends_nonfinite(self) -> bool:
        """Whether the run ends in a streak of non-finite losses, after other steps."""
        nonfinite = int(self._run.last("nonfinite_losses_in_a_row") or 0)
        streak = self.in_a_row
        return thresholds.STUCK_AFTER <= streak <= nonfinite and streak < self.steps

    @property
    def is_stuck(self) -> bool:
        """Whether the run ends in another streak of skipped steps."""
        return self.in_a_row >= thresholds.STUCK_AFTER and not self.ends_nonfinite

    @property
    def are_all(self) -> bool:
        """Whether all recorded steps were skipped, so that the weights are those of the start."""
        first_step = min((row.step for row in self._run.rows), default=0)
        return first_step > 0 and self.in_a_row > self._last_step - first_step

    @cached_property
    def start(self) -> Start:
        """The steps until the first record after an applied step."""
        unknown = Start(0, 0, self._loss_scale)
        rows = sorted(self._run.rows, key=attrgetter("step"))
        if not rows or rows[0].step > 1:
            return unknown
        for step, records in itertools.groupby(rows, key=attrgetter("step")):
            at_step = Run(list(records))
            scale, skipped = at_step.last("loss_scale"), at_step.last("overflow_count")
            in_a_row = at_step.last("overflows_in_a_row")
            if scale is not None and skipped is not None and in_a_row == 0:
                nonfinite = at_step.last("nonfinite_loss_count") or 0
                return Start(int(skipped - nonfinite), step, float(scale))
        return unknown

    @cached_property
    def main_origin(self) -> tuple[str, float]:
        """The variable in which most overflows of a finite loss originated, and their share.

        `("", 0.0)` if none is known.
        """
        recorded = self._run.last("overflow_origins_by_variable") or {}
        total = sum(recorded.values())
        if not total:
            return "", 0.0
        path = max(recorded, key=recorded.__getitem__)
        return path, recorded[path] / total
