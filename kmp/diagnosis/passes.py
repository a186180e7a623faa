"""The replays of a run: which pass failed, and how far the others are from float32."""

from collections.abc import Callable, Iterable
from functools import cached_property
from operator import attrgetter

from kmp.diagnosis import soundness, thresholds
from kmp.diagnosis.skipped_steps import SkippedSteps
from kmp.records import Replay, Run
from kmp.records.gradient_sample import layer_of
from kmp.records.replay import GradientError
from kmp.utils.float_formats import FLOAT32


class Passes:
    """The replays of a run since the last repair.

    Args:
        run: The records.
        last_step: The last step.
        skipped: The steps that were skipped.

    Attributes:
        all: The replays, oldest first.
        comparisons: Those that were finite in both precisions, with their steps. None of a float32
            run, which would be compared with itself.
        last_comparison: The last of these.
        harmful: That one if the comparisons agree on harm.
        clean: The last replay whose loss and gradients were finite.
        backward: The last one whose loss was finite, but not the gradients.
    """

    def __init__(self, run: Run, last_step: int, skipped: SkippedSteps) -> None:
        self._last_step, self._skipped = last_step, skipped
        self.all = [replay for _, replay in run.replays]
        self.comparisons = [] if run.format is FLOAT32 else run.comparisons
        compared = [replay for _, replay in self.comparisons]
        self.last_comparison = compared[-1] if compared else None
        agree = soundness.agree_on_harm(compared, run.format)
        self.harmful = self.last_comparison if agree else None
        self.clean = self._last(lambda each: each.is_finite and not each.is_forward_only)
        self.backward = self._last(lambda each: not each.is_finite and each.is_finite_forward)

    def _last(self, is_wanted: Callable[[Replay], bool]) -> Replay | None:
        return next(filter(is_wanted, reversed(self.all)), None)

    @cached_property
    def forward(self) -> Replay | None:
        """The last replay whose loss was not finite, or of the forward pass alone.

        Not finite in the precision of the model. If all losses of the training were finite, it has
        to be the last replay with NaN or Inf: a fused kernel of the training may swallow a NaN that
        the replay shows.
        """
        if self._skipped.nonfinite_losses:
            failed = self._last(lambda each: not each.is_finite and not each.is_finite_forward)
            return failed or self._last(lambda each: each.loss is None)
        failed = self._last(lambda each: not each.is_finite)
        if failed is None or failed.is_finite_forward or not self._skipped.count:
            return None
        return failed

    @property
    def failed_forward(self) -> Replay | None:
        """`forward`, if the training has failed as it shows.

        If all losses were finite, the skipped steps at the start are those of a scale that falls.
        """
        skipped = self._skipped
        has_failed = skipped.gradient_overflows > skipped.start.overflows
        return self.forward if skipped.nonfinite_losses or has_failed else None

    @property
    def have_no_loss(self) -> bool:
        """Whether no replay has the loss: only forward passes were replayed."""
        return bool(self.all) and all(replay.is_forward_only for replay in self.all)

    @cached_property
    def largest_gradient_error(self) -> GradientError | None:
        """The largest error of gradients in all comparisons; `None` without one.

        Of layers that had not converged.
        """
        errors: list[GradientError] = []
        for _, replay in self.comparisons:
            errors += soundness.unconverged(replay.gradient_errors)
        return max(errors, key=attrgetter("error"), default=None)

    @property
    def are_late(self) -> bool:
        """Whether a comparison was in the second half of the run."""
        return bool(self.comparisons) and 2 * self.comparisons[-1][0] >= self._last_step

    @property
    def agree_late(self) -> bool:
        """Whether compared gradients agree, also in the second half of the run.

        That is, one comparison was in that half, and all errors are small.
        """
        largest = self.largest_gradient_error
        if largest is None or not self.are_late:
            return False
        return largest.error < thresholds.SMALL_GRADIENT_ERROR

    def compare(self, variables: Iterable[str]) -> bool:
        """Whether comparisons show what variables lose: none does of gradients that vanish."""
        compared = {
            error.layer for _, replay in self.comparisons for error in replay.gradient_errors
        }
        return all(layer_of(name) in compared for name in variables)

    @cached_property
    def with_harmful_gradients(self) -> list[Replay]:
        """The comparisons with a harmful error of gradients."""
        return [replay for _, replay in self.comparisons if soundness.harmful_gradients(replay)]

    @property
    def need_float32_layers(self) -> bool:
        """Whether the largest usable loss scale does not remove harmful errors of gradients.

        All comparisons with such errors had them at that scale too.
        """
        harmful = self.with_harmful_gradients
        return bool(harmful) and all(replay.float32_layers for replay in harmful)
