"""Finds the steps that are skipped although no loss scale helps, and says what failed in them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras

from kmp.backend import distribution, keras_internals
from kmp.callbacks.training_records import Logs
from kmp.optimizer import LossScaleOptimizer
from kmp.replay import nonfinite_rows
from kmp.utils.float_formats import FLOAT16
from kmp.utils.names import listed

LOWER = "lower_learning_rate"
ON_NONFINITE = ("skip", "raise", LOWER, "warn", "ignore")
MOST_WARNINGS = 10  # of one training: a data set may have a corrupt batch in many places
NAN_OR_INF = "NaN or Inf"
_MOST_ROWS = 5  # to name
_LOWERED_BY = 0.5


@dataclass(frozen=True)
class NonfiniteStreak:
    """Consecutive skipped steps that no loss scale prevents.

    Args:
        first: The first of these steps.
        last: The last one so far, or the first one if a later step was not skipped.
        is_loss: Whether the loss was not finite, and not only gradients.
        losses: The losses in the `logs` of the first step that are not finite, by key. None if the
            streak was not seen at its first step.
    """

    first: int
    last: int
    is_loss: bool
    losses: dict[str, float]

    def describe(self, origin: str | None, data: str) -> str:
        """Returns which steps were skipped and why, as a sentence.

        Args:
            origin: The path of the variable in which an overflow of gradients originated.
            data: What is wrong with the batch, or nothing.
        """
        steps = f"Step {self.first} was"
        if self.last > self.first:
            steps = f"Steps {self.first} to {self.last} were"
        reason = f"the loss is finite, but the gradient of {origin} is NaN or Inf"
        if self.is_loss:
            reason = _described(self.losses)
        return f"{steps} skipped: {reason}{f', and {data}' if data else ''}."


def _described(losses: dict[str, float]) -> str:
    names = [repr(key) for key in losses if key != "loss"]
    if len(names) > 1:
        return f"the losses {listed(names)} are NaN or Inf"
    value = "NaN or Inf"
    for each in losses.values():
        value = "NaN" if math.isnan(each) else "Inf"
    return f"the loss {names[0]} is {value}" if names else f"the loss is {value}"


class NonfiniteSteps:
    """Finds each streak of steps that are skipped although no loss scale helps.

    The loss of such a step is not finite or, if the loss is not scaled, its gradients are not. The
    counts of the optimizer decide. `fit` has copied the `logs` of each batch to the host, so a loss
    that is not finite there is a reason to read the counts at once, and costs no copy of its own.

    Args:
        model: The model in training.
        optimizer: The optimizer to read.
        before: The one of the training that this one continues, or `None`.

    Attributes:
        count: The number of streaks so far.
    """

    def __init__(
        self, model: keras.Model, optimizer: LossScaleOptimizer, before: "NonfiniteSteps | None"
    ) -> None:
        self._optimizer = optimizer
        # A worker sees the logs of its own batches only, and all have to act in the same step.
        self._follows_logs = not distribution.has_several_workers(model.distribute_strategy)
        self._in_logs: dict[str, float] = {}  # of the last batch, what was not finite
        self._last: int = before._last if before else 0  # the first step of the last streak
        self.count: int = before.count if before else 0

    def start(self, counts: Any) -> None:
        """Begins a training after these counts."""
        self._counts = counts

    def are_in(self, logs: Logs) -> bool:
        """Whether a value in the `logs` of a batch is not finite, and was in those before."""
        if not self._follows_logs:
            return False
        # A loop of the user's may pass tensors: to read them would make the step wait.
        floats = ((key, value) for key, value in (logs or {}).items() if isinstance(value, float))
        before = self._in_logs
        self._in_logs = {key: value for key, value in floats if not math.isfinite(value)}
        return not self._in_logs.keys() <= before.keys()

    def look(self, counts: Any) -> NonfiniteStreak | None:
        """Returns a streak that began since the counts before, or that was not returned yet."""
        before, self._counts = self._counts, counts
        is_loss = counts.nonfinite_loss_count > before.nonfinite_loss_count
        scales_loss = self._optimizer.rule.scales_loss
        has_new = is_loss or (not scales_loss and counts.overflow_count > before.overflow_count)
        first = counts.nonfinite_since
        if not has_new or first == self._last:
            return None
        self._last = first
        self.count += 1
        last = counts.step if counts.overflows_in_a_row else first
        losses = {key: value for key, value in self._in_logs.items() if key.endswith("loss")}
        return NonfiniteStreak(first, last, is_loss, losses)


def describe_data(model: keras.Model, batch: Sequence[Any] | None) -> str:
    """Returns what is wrong with the arrays of a batch, and in which rows; nothing if that is not.

    Args:
        model: The model in training.
        batch: The batch, or `None` if it is not known.
    """
    found = nonfinite_rows(model, batch) if batch else None
    if found is None:
        return ""
    part, rows = found.part, found.rows
    values = f"values beyond {FLOAT16.max:g}" if part.is_too_large else NAN_OR_INF
    first = ", ".join(map(str, rows[:_MOST_ROWS])) + (", ..." if len(rows) > _MOST_ROWS else "")
    return f"{part.part}{part.key} contains {values} in {len(rows)} of {found.of} rows ({first})"


def check_learning_rate(optimizer: LossScaleOptimizer) -> None:
    """Raises a `ValueError` if the learning rate of an optimizer cannot be lowered."""
    inner = optimizer.inner_optimizer
    rate = keras_internals.learning_rate_of(inner)
    if not isinstance(rate, keras.Variable):
        name = getattr(rate, "__name__", type(rate).__name__)
        raise ValueError(
            f"on_nonfinite={LOWER!r} sets the learning rate, but {type(inner).__name__} computes it"
            f" by {name}. Write a number, such as"
            f" keras.optimizers.{type(inner).__name__}(learning_rate=1e-3), or on_nonfinite='skip'."
        )


def lower_learning_rate(optimizer: LossScaleOptimizer) -> tuple[float, float]:
    """Lowers the learning rate. Returns the one before, and the new one."""
    before = float(optimizer.inner_optimizer.learning_rate)
    optimizer.inner_optimizer.learning_rate = _LOWERED_BY * before
    return before, float(optimizer.inner_optimizer.learning_rate)
