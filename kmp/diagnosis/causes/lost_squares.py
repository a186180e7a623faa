"""Adam's state in float16, where squares of gradients are 0."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kmp.diagnosis import changes, thresholds
from kmp.diagnosis.cause import Cause
from kmp.diagnosis.edits import Change
from kmp.diagnosis.observations import Observations
from kmp.diagnosis.sample_statistics import counts_below, unscaled_counts
from kmp.utils.float_formats import FLOAT16

_LARGEST_LOST = 2.0**FLOAT16.flush_exponent  # a square that is 0 in float16
# Those that divide by the root of a mean of squares, plus epsilon.
_WITH_SQUARES = ("Adam", "AdamW", "Lamb", "Nadam")
_BETA_2 = 0.999  # Keras' default for these optimizers


@dataclass(frozen=True, kw_only=True)
class LostSquares(Cause):
    """Adam's state in float16, where it divides gradients by its epsilon alone.

    Where float16 rounds the mean of squared gradients to zero, a gradient g takes a step of
    g / epsilon times the learning rate. Elsewhere a step is at most about the learning rate.

    Args:
        epsilon: The setting.
        step: The step with the largest change.
        path: The path of the variable that changed so much.
        times: The root mean square of that change, divided by the learning rate.
        highest: log2 of the gradients below which the squares are lost.
    """

    epsilon: float
    step: int
    path: str
    times: float
    highest: int

    @classmethod
    def of(cls, run: Observations) -> "LostSquares | None":
        """Returns the cause if the run has it."""
        settings, rate = run.settings, run.updates.learning_rate
        epsilon = settings.epsilon
        if epsilon is None or epsilon <= _LARGEST_LOST or not rate:
            return None
        is_float16 = FLOAT16.name in settings.variable_dtypes
        if not is_float16 or settings.optimizer not in _WITH_SQUARES:
            return None
        rate *= settings.steps_per_execution
        steps = ((change / rate, path, step) for change, path, step in _changes(run))
        times, path, step = max(steps, default=(0.0, "", 0))
        if times <= thresholds.TOO_LARGE_STEP:
            return None

        # A constraint may change weights by more. So gradients have to be frequent, too, that are
        # large beside epsilon and whose squares add nothing to a mean in float16.
        beta_2 = _BETA_2 if settings.beta_2 is None else settings.beta_2
        part = 1.0 - beta_2  # of a square is added to the mean
        highest = math.floor(math.log2(_LARGEST_LOST / part) / 2) if part > 0 else 0
        lowest = math.ceil(math.log2(thresholds.TOO_LARGE_STEP * epsilon))
        counts = unscaled_counts(run.gradients.finite)
        below_lowest, below_highest = counts_below(counts, np.array([lowest, highest]))
        limit = thresholds.MANY_LOST_SQUARES * max(1.0, counts.sum())
        if below_highest - below_lowest <= limit:
            return None
        return cls(
            run=run,
            name="optimizer_state",
            location="epsilon",
            change=Change(changes.weights_in_float32(run, [path], FLOAT16)),
            epsilon=epsilon,
            step=step,
            path=path,
            times=times,
            highest=highest,
        )

    @property
    def title(self) -> str:
        return (
            f"The steps of {self.run.settings.optimizer} are too large: its state is float16, where"
            " the squares of small gradients are 0, so it divides by its epsilon of"
            f" {self.epsilon:g} alone."
        )

    @property
    def evidence(self) -> str:
        return (
            f"in step {self.step}, {self.path} changed by {self.times:.3g} times the learning rate"
            f" (root mean square; 1 is usual); what a gradient below 2^{self.highest} adds to the"
            " mean of squares is 0 in float16"
        )

    @property
    def note(self) -> str:
        return "keeps weights and optimizer state in float32; or epsilon=1e-4"


def _changes(run: Observations) -> Iterator[tuple[float, str, int]]:
    """Yields the root mean square of the elements of each float16 variable that changed in a step.

    With the path of the variable and the step.
    """
    for sample in run.records.samples:
        if not (sample.has_update and sample.is_finite):
            continue
        norms, counts = sample.update_norm.tolist(), sample.updates.tolist()
        for path, norm, changed in zip(sample.names, norms, counts, strict=True):
            is_float16 = path not in run.settings.float32_variables
            if changed and is_float16 and math.isfinite(norm):
                yield norm / math.sqrt(changed), path, sample.step
