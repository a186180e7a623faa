"""The counters of all variables together, as values: pure functions of a step's outcome."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from keras import ops

from kmp.optimizer.loss_monitor import StepLosses

COUNTS = (
    *("steps", "overflows", "overflows_in_a_row", "nonfinite_losses", "nonfinite_losses_in_a_row"),
    *("overflows_at_min_scale", "overflow_origin", "unscaled_steps"),
)
LOSSES = ("last_loss", "highest_loss")
_RESET_BY_UPDATE = ("overflows_in_a_row", "nonfinite_losses_in_a_row")
_REPLACED_BY_OVERFLOW = ("overflows_in_a_row", "overflow_origin")


class CounterValues(NamedTuple):
    """The counters of all variables together.

    Attributes:
        counts: int64 of shape `(8,)`: steps, overflows, overflows in a row, non-finite losses, non-finite losses in a
            row, overflows at the minimum scale, the overflow origin (the index of the variable plus 1, or 0 before the
            first overflow) and steps whose gradients were not scaled.
        losses: float32 of shape `(2,)`: the last loss, and the largest magnitude of a finite one.
    """

    counts: Any
    losses: Any

    @property
    def steps(self) -> Any:
        """Scalar int64, the number of steps."""
        return self.counts[COUNTS.index("steps")]

    @property
    def overflows(self) -> Any:
        """Scalar int64, the number of skipped steps."""
        return self.counts[COUNTS.index("overflows")]

    @property
    def overflows_in_a_row(self) -> Any:
        """Scalar int64, the number of steps skipped since the last update."""
        return self.counts[COUNTS.index("overflows_in_a_row")]

    @property
    def nonfinite_losses(self) -> Any:
        """Scalar int64, the number of skipped steps whose loss was non-finite."""
        return self.counts[COUNTS.index("nonfinite_losses")]

    @property
    def overflow_origin(self) -> Any:
        """Scalar int64, the index of the variable where the last overflow started plus 1, or 0."""
        return self.counts[COUNTS.index("overflow_origin")]


class Overflow(NamedTuple):
    """A skipped step.

    Attributes:
        losses: The losses of the step, summed over replicas.
        origin: As returned by `overflow_origin.origin_flags`.
        in_a_row: Scalar int64, the number of steps skipped since the last update, this one included.
        is_at_min_scale: Scalar bool, whether the rule would back off but the scale is at its minimum.
    """

    losses: StepLosses
    origin: Any
    in_a_row: Any
    is_at_min_scale: Any


def after_update(before: CounterValues, losses: StepLosses, is_scaled: bool) -> CounterValues:
    """Returns the counters after a step that updated the weights.

    Args:
        before: The counters before it.
        losses: The losses of the step, summed over replicas.
        is_scaled: Whether the gradients were multiplied by the loss scale.
    """
    counts = _without(_RESET_BY_UPDATE, before) + _increments(is_scaled)
    return CounterValues(counts, _updated_losses(before, losses))


def after_overflow(before: CounterValues, overflow: Overflow, is_scaled: bool) -> CounterValues:
    """Returns the counters after a skipped step."""
    loss_was_finite = overflow.losses.were_finite
    nonfinite_loss = 1 - ops.cast(loss_was_finite, "int64")
    last_origin = ops.sum(overflow.origin * np.arange(1, overflow.origin.shape[0] + 1))
    added = {
        "overflows": 1,
        "overflows_in_a_row": overflow.in_a_row,
        "nonfinite_losses": nonfinite_loss,
        "nonfinite_losses_in_a_row": nonfinite_loss,
        "overflows_at_min_scale": ops.cast(overflow.is_at_min_scale, "int64"),
        "overflow_origin": ops.where(loss_was_finite, last_origin, before.overflow_origin),
    }
    counts = _without(_REPLACED_BY_OVERFLOW, before) + _increments(is_scaled, added)
    return CounterValues(counts, _updated_losses(before, overflow.losses))


def _without(names: tuple[str, ...], values: CounterValues) -> Any:
    """Returns the counts with zeros for the names."""
    return values.counts * np.array([name not in names for name in COUNTS], np.int64)


def _updated_losses(before: CounterValues, losses: StepLosses) -> Any:
    magnitude = ops.where(ops.isfinite(losses.last), ops.abs(losses.last), 0.0)
    highest = before.losses[LOSSES.index("highest_loss")]
    return tf.stack([losses.last, ops.maximum(highest, magnitude)])


def _increments(is_scaled: bool, added: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Returns what a step adds to the counts: what every step adds, and the given values by name."""
    added = {"steps": 1, "unscaled_steps": int(not is_scaled), **added}
    return tf.stack([tf.cast(added.get(name, 0), tf.int64) for name in COUNTS])
