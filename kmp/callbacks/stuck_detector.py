"""Stops a training in which every step is skipped."""

from dataclasses import replace
from typing import Any

import keras
import numpy as np

from kmp.advice import advise
from kmp.diagnosis import Observations
from kmp.diagnosis.missing_replays import how_to_find_layer
from kmp.optimizer import LossScaleOptimizer
from kmp.records import Run, Snapshot

_CHECKED_AT_LOW_SCALE = 8  # batches


class StuckError(RuntimeError):
    """Raised by `kmp.callbacks.Monitor` if a training is stuck, with the cause and what to try.

    The model keeps the weights from before the skipped steps: catch the error to save it.

    Example:
    >>> from kmp.callbacks import StuckError
    >>> try:
    ...     raise StuckError("Training is stuck: ...")  # as `fit` does
    ... except StuckError as error:
    ...     print("save the model, and change what the error names:", error)
    save the model, and change what the error names: Training is stuck: ...
    """


class StuckDetector:
    """Detects that the optimizer keeps skipping steps.

    Args:
        optimizer: The optimizer to read.
        patience: The consecutive skipped steps after which a training is stuck. It also is if a
            step overflows while the loss scale is at its minimum.

    Attributes:
        last: The last snapshot.
        repaired_at: The step of the last repair: it begins a new streak.
    """

    def __init__(self, optimizer: LossScaleOptimizer, patience: int) -> None:
        self._optimizer, self._patience = optimizer, patience

    def start(self, snapshot: Snapshot) -> None:
        """Begins a training after a snapshot."""
        self.last = snapshot
        self.repaired_at = 0
        self._reported_streak: int | None = None

    def look(self) -> "Streak | None":
        """Reads the optimizer. Returns a streak of skipped steps in which the training is stuck.

        A streak is returned once.
        """
        before, self.last = self.last, self._optimizer.snapshot()
        in_a_row = min(self.last.overflows_in_a_row, self.last.step - self.repaired_at)
        now = replace(self.last, overflows_in_a_row=in_a_row)
        is_at_min_scale = False
        if self.repaired_at <= before.step:  # else some of these steps are from before the repair
            is_at_min_scale = now.overflows_at_min_scale > before.overflows_at_min_scale
        if in_a_row < self._patience and not is_at_min_scale:
            return None
        start = now.step - in_a_row
        is_reported = start == self._reported_streak
        return None if is_reported else Streak(now, is_at_min_scale)

    def mark_reported(self, streak: "Streak") -> None:
        """Notes that a streak was reported."""
        skipped = streak.now.overflows_in_a_row
        self._reported_streak = streak.now.step - skipped if skipped else None

    def batches_until_stuck(self, counts: Any) -> int:
        """Returns after how many batches the training can be stuck at the earliest."""
        in_a_row = min(counts.overflows_in_a_row, counts.step - self.repaired_at)
        to_patience = self._patience - in_a_row
        if to_patience <= 0:  # this streak was reported; another one needs as many steps
            return self._patience
        to_minimum = self._optimizer.rule.steps_to_min_scale(self.last.loss_scale)
        if in_a_row == 0:  # at a low scale, a check of each batch would cost more than it is worth
            to_minimum = max(to_minimum, _CHECKED_AT_LOW_SCALE)
        return max(1, int(min(to_patience, to_minimum)))


class Streak:
    """Skipped steps in which a training is stuck."""

    def __init__(self, now: Snapshot, is_at_min_scale: bool) -> None:
        self.now, self._is_at_min_scale = now, is_at_min_scale

    def describe(self, has_loss_scale: bool) -> str:
        """Returns what was skipped, with the loss, and with the loss scale if it matters."""
        now = self.now
        count = now.overflows_in_a_row
        skipped = f"the last {count} steps were skipped"
        if count == 0:
            skipped = "a step since the last check was skipped"
        elif count == 1:
            skipped = "the last step was skipped"
        if self._is_at_min_scale:
            skipped += " with the loss scale at its lowest value"
        text = f"Training is stuck: at step {now.step} {skipped}."
        if now.last_loss is not None:
            text += f" Last loss: {now.last_loss:g}."
        if has_loss_scale:
            text += f" Loss scale: {now.loss_scale:g}."
        return text


def explained(headline: str, model: keras.Model, now: Snapshot, run: Run) -> str:
    """Returns why steps are skipped: a headline, the cause, what to try, and the weights."""
    problems = advise(run).problems
    cause = problems[0] if problems else _counts_alone(now, run)
    text = f"{headline}\nCause: {cause}"
    if now.overflows_in_a_row:  # else a later step has changed the weights
        text += f"\n{_weights_of(model)}"
    return text


def _counts_alone(now: Snapshot, run: Run) -> str:
    origin = now.overflow_origin
    how = f"To find the layer: {how_to_find_layer(Observations(run))}."
    if not run.has_loss_scale:
        where = "the loss" if now.nonfinite_losses_in_a_row else f"the gradient of {origin}"
        return f"{where} was NaN or Inf. {how}"
    cause = f"gradients overflow, and the overflow starts nearest to the loss at {origin}"
    if now.nonfinite_losses_in_a_row:
        cause = "the loss was NaN or Inf before it was scaled, so no loss scale helps"
    return (
        f"{cause}. {how} Where the loss scale was still falling, a higher patience or a lower"
        " initial_scale lets it fall."
    )


def _weights_of(model: keras.Model) -> str:
    for weight in model.trainable_variables:
        if not np.isfinite(np.asarray(weight.value)).all():
            return (
                "The weights are those from before the skipped steps, and"
                f" {weight.path} contains NaN or Inf."
            )
    return "The weights are those from before the skipped steps."
