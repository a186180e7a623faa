"""Updates that are too large in any number format."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kmp.diagnosis import changes, thresholds
from kmp.diagnosis.cause import Cause
from kmp.diagnosis.edits import Change, Edit
from kmp.diagnosis.observations import Observations
from kmp.diagnosis.wording import of_steps


@dataclass(frozen=True, kw_only=True)
class Exploding(Cause):
    """Updates that are too large in any number format.

    Args:
        step: The step with the largest update.
        ratio: Its norm relative to that of the weights.
        has_large_updates: Whether that, or a loss that rose after it, is the sign.
        first_loss: The first loss.
        highest_loss: The highest loss.
        has_risen: Whether that loss is the sign.
        is_estimated: Whether no update was made yet, and the learning rate and the gradients in
            float32 give the ratio.
        large_input: The inputs as Python source, if they are far from unit scale; may be empty.
        largest_input: Their largest magnitude.
    """

    names: ClassVar[Mapping[str, str]] = {
        "exploding": "updates that are too large, or activations that grow from layer to layer",
    }

    step: int
    ratio: float
    has_large_updates: bool
    first_loss: float
    highest_loss: float
    has_risen: bool
    is_estimated: bool = False
    large_input: str = ""
    largest_input: float = 0.0

    @classmethod
    def of(cls, run: Observations) -> "Exploding | None":
        """Returns the cause if the run has it."""
        updates, losses, skipped = run.updates, run.updates.losses, run.skipped
        step, ratio = updates.largest
        is_estimated = updates.estimate > thresholds.DIVERGING_ESTIMATE and updates.are_unmeasured
        if is_estimated:
            step, ratio = run.last_step + 1, updates.estimate
        is_large = ratio > thresholds.EXPLODING_UPDATE
        has_exploded = losses.highest > losses.exploded
        has_not_learned = _has_not_learned(run)
        are_many_skipped = skipped.count > thresholds.MOST_SKIPPED * skipped.steps
        has_large_updates = is_large and (are_many_skipped or has_exploded)

        # Last losses that are high, with small updates, are those of a different batch.
        has_small_updates = 0.0 < updates.ratio < thresholds.LARGE_UPDATE
        ends_high = abs(losses.last) > losses.exploded and not has_small_updates
        stays_high = has_exploded and (skipped.ends_nonfinite or ends_high)
        if not (has_large_updates or stays_high or has_not_learned):
            return None

        # Inputs that are far from unit scale are the reason for large updates.
        checks = [replay.batch for replay in run.passes.all]
        worst = max(checks, key=lambda each: each.largest_input, default=None)
        large_input, largest_input = "", 0.0
        if worst is not None and worst.largest_input > thresholds.LARGE_INPUT:
            large_input, largest_input = f"x{worst.largest_input_key}", worst.largest_input
        edit: Edit = changes.smaller_learning_rate(run)
        if large_input:
            edit = changes.normalized(large_input)
        return cls(
            run=run,
            name="exploding",
            location=large_input,
            change=Change((edit,)),
            step=step,
            ratio=ratio,
            has_large_updates=is_large or has_not_learned,
            first_loss=losses.first,
            highest_loss=losses.highest,
            has_risen=has_exploded or has_not_learned,
            is_estimated=is_estimated,
            large_input=large_input,
            largest_input=largest_input,
        )

    @property
    def title(self) -> str:
        if self.large_input:
            return (
                "Training diverges: the inputs are far from unit scale, and the updates too large"
                " in any number format."
            )
        return "Training diverges: the updates are too large in any number format."

    @property
    def evidence(self) -> str:
        parts, skipped = [], self.run.skipped
        if self.is_estimated:
            parts.append(
                f"the next update would be {self.ratio:.2g} times as large as the weights: the"
                " learning rate times the norm of the gradients in float32 (0.001 is typical)"
            )
        elif self.has_large_updates:
            parts.append(
                f"in step {self.step} the update was {self.ratio:.2g} times as large as the weights"
                " (L2 norms; 0.001 is typical)"
            )
        if self.has_risen:
            parts.append(f"the loss rose from {self.first_loss:.3g} to {self.highest_loss:.3g}")
        if skipped.ends_nonfinite:
            parts.append(
                f"the loss was NaN or Inf in the last {skipped.in_a_row} steps, after steps with a"
                " finite loss"
            )
        if skipped.count:
            parts.append(f"{of_steps(self.run, skipped.count)} were skipped")
        if self.large_input:
            parts.append(f"{self.large_input} has values up to {self.largest_input:.4g}")
        return "; ".join(parts)

    @property
    def note(self) -> str:
        if self.large_input:
            rate = changes.smaller_learning_rate(self.run)
            return f"for new data too, with the same mean and deviation; or {rate}"
        return "or clipnorm=1.0" if self.run.settings.optimizer == "SGD" else ""


def _has_not_learned(run: Observations) -> bool:
    """Whether the loss rose after a large update, and did not fall again."""
    losses = run.updates.losses
    if run.updates.ratio <= thresholds.RISING_UPDATE:
        return False
    has_risen = losses.first > 0 and losses.highest > thresholds.RISING_LOSS * losses.first
    if not has_risen or losses.last <= losses.first / 2:
        return False
    # The loss of one batch may be noisy: that of the epochs stays near the first, and falls to the
    # end.
    _, of_epochs = run.records.metrics.get("loss", (None, np.empty(0)))
    if len(of_epochs) > 1 and of_epochs.max() <= thresholds.RISING_LOSS * losses.first:
        middle = of_epochs[(len(of_epochs) - 1) // 2]
        return bool(of_epochs[-1] >= thresholds.FALLING_LOSS * middle)
    return True
