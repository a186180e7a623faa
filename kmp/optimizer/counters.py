"""Counters of steps, overflows and their origins, on the device and in saved files."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from kmp.backend.extensible_variable import ExtensibleVariable
from kmp.optimizer.named_state import NamedState
from kmp.optimizer.step_monitor import StepLosses


class Counts(NamedTuple):
    """The counts of steps, each a scalar int64.

    A new one goes to the end: saved counts have this order.

    `kmp.records.Snapshot` and `kmp.records.Record` have those that are a field there.

    Attributes:
        skipped_or_empty: Skipped steps, with those in which a replica's batch had no rows: a mean
            over nothing is NaN. The other counts of skipped steps are without these.
        origin_number: The number, from 1, of the variable where the last overflow started; 0
            before the first one.
        nonfinite_since: The first of the last consecutive skipped steps that no loss scale
            prevents: those with a non-finite loss or, if the loss is not scaled, with non-finite
            gradients. 0 before the first one.
    """

    step: Any
    skipped_or_empty: Any
    overflow_count: Any
    overflows_in_a_row: Any
    nonfinite_loss_count: Any
    nonfinite_losses_in_a_row: Any
    overflows_at_min_scale: Any
    origin_number: Any
    nonfinite_since: Any


COUNT_INDEX = {name: index for index, name in enumerate(Counts.__annotations__)}
_SAME_ON_ALL_REPLICAS: dict[str, Any] = {"autocast": False, "aggregation": "only_first_replica"}
_IN_A_ROW = ("overflows_in_a_row", "nonfinite_losses_in_a_row")


@keras.saving.register_keras_serializable("kmp")
class Counters(NamedState):
    """Counters of steps and overflows.

    They are int64 because TensorFlow keeps int32 variables on the CPU.

    Attributes:
        counts: int64 variable with an element for each field of `Counts`: one variable is read and
            written by one operation, several by one each.
        loss_values: float32 variable of shape `(2,)`: the last loss, and the largest magnitude of a
            finite one.
        last_skipped: float64 variable of shape `(2,)`, which has both exactly: the number of the
            last skipped step, and its loss scale; zeros before the first one.
        by_variable: int64 variable of shape `(2, variables)`: in how many steps the gradient was
            non-finite, and in how many the overflow started there. `None` before the optimizer is
            built.
    """

    def __init__(self) -> None:
        super().__init__(name="loss_scale_counters", dtype="float32", trainable=False)
        self.counts = ExtensibleVariable(
            "zeros",
            shape=(len(COUNT_INDEX),),
            dtype="int64",
            trainable=False,
            name="counts",
            **_SAME_ON_ALL_REPLICAS,
        )
        self.loss_values = self._counter("losses", (2,), "float32")
        self.last_skipped = self._counter("last_skipped", (2,), "float64")
        self.by_variable: Any = None

    def build_for(self, variable_count: int) -> None:
        """Creates the counters with elements for each variable."""
        self.by_variable = self._counter("by_variable", (2, variable_count))

    def values(self) -> Counts:
        """Returns the counts as tensors on the device."""
        counts = ops.copy(self.counts)
        # TensorFlow unstacks int64 on the host.
        return Counts(*(counts[index] for index in COUNT_INDEX.values()))

    def value(self, name: str) -> tf.Tensor:
        """Returns one of the counts as a tensor on the device."""
        return ops.copy(self.counts)[COUNT_INDEX[name]]

    def count(
        self,
        before: Counts,
        overflowed: Any,
        losses: StepLosses,
        is_at_min_scale: Any,
        flags: tf.Tensor,
        order: Sequence[int],
        *,
        scale: Any,
        scales_loss: bool,
    ) -> None:
        """Counts a step.

        Args:
            before: The counts before it.
            overflowed: Scalar bool, or a Python bool in a branch that only one outcome reaches.
            losses: The losses of the step, summed over replicas.
            is_at_min_scale: Scalar bool, whether the rule backs off but the scale is at its
                minimum.
            flags: Bool of shape `(variables,)`, whether each variable's gradient is non-finite.
            order: The indices of the variables, from the input to the loss.
            scale: Scalar float32, the loss scale of the step.
            scales_loss: Whether the rule scales the loss.
        """
        # After an applied step.
        counts = self.counts.value * (1 - _mask(*_IN_A_ROW)) + _mask("step")
        if overflowed is not False:
            had_rows = ops.cast(losses.had_rows, "int64")
            # The backward pass spreads an overflow to every variable before its origin, so the
            # origin is the flagged variable that is nearest to the loss. After a non-finite loss,
            # which flags all, there is none.
            may_be_origin = ops.cast(ops.logical_and(flags, losses.were_finite), "int64")
            positions = may_be_origin * (np.argsort(order) + 1)
            nearest = ops.max(positions)
            is_nearest = ops.equal(positions, nearest)
            is_origin = ops.cast(ops.logical_and(positions > 0, is_nearest), "int64")
            skipped = _after_skipped_step(
                self.counts.value, before, losses, is_at_min_scale, nearest, order, scales_loss
            )
            counts = skipped if overflowed is True else ops.where(overflowed, skipped, counts)
            overflows = had_rows * ops.cast(flags, "int64")
            self.by_variable.assign_add(tf.stack([overflows, is_origin]))
            step = tf.stack([ops.cast(before.step + 1, "float64"), ops.cast(scale, "float64")])
            is_counted = ops.logical_and(overflowed, losses.had_rows)
            self.last_skipped.assign(ops.where(is_counted, step, self.last_skipped))
        self.counts.assign(counts)
        magnitude = ops.where(ops.isfinite(losses.last), ops.abs(losses.last), 0.0)
        highest = ops.maximum(self.loss_values, magnitude)
        self.loss_values.assign(tf.where([True, False], losses.last, highest))

    def read_counts(self) -> Counts:
        """Copies the counts of all variables together to the host."""
        return Counts(*self.counts.numpy().tolist())

    def read_losses(self) -> tuple[float, float]:
        """Copies the last loss, and the largest magnitude of a finite one, to the host."""
        last, highest = self.loss_values.numpy().tolist()
        return last, highest

    def read_last_skipped(self) -> tuple[int, float]:
        """Copies the number of the last skipped step, and its loss scale, to the host."""
        step, scale = self.last_skipped.numpy().tolist()
        return int(step), scale

    def read_by_variable(self, paths: Sequence[str]) -> list[dict[str, int]]:
        """Copies both rows of `by_variable` to the host, by path and without zeros."""
        rows = [[], []] if self.by_variable is None else self.by_variable.numpy().tolist()
        return [
            {path: count for path, count in zip(paths, row, strict=False) if count} for row in rows
        ]

    def _counter(self, name: str, shape: tuple[int, ...], dtype: str = "int64") -> keras.Variable:
        return self.add_weight(
            shape=shape, dtype=dtype, initializer="zeros", name=name, **_SAME_ON_ALL_REPLICAS
        )


def _after_skipped_step(
    counts: tf.Tensor,
    before: Counts,
    losses: StepLosses,
    is_at_min_scale: Any,
    nearest: tf.Tensor,
    order: Sequence[int],
    scales_loss: bool,
) -> tf.Tensor:
    """Returns the counts after a step that was skipped.

    They are computed with masks, because XLA on a CPU computes a stack of more than eight numbers
    in a kernel for each of them.

    Args:
        counts: The counts before it, together.
        before: The same, one by one.
        losses: As in `Counters.count`.
        is_at_min_scale: As there.
        nearest: The position of the overflow origin in `order`, from 1; 0 if there is none.
        order: As there.
        scales_loss: As there.
    """
    overflow = ops.cast(losses.had_rows, "int64")
    is_nonfinite = ops.logical_and(losses.had_rows, losses.nonfinite > 0)
    nonfinite_loss = ops.cast(is_nonfinite, "int64")
    counts = (
        counts
        + _mask("step", "skipped_or_empty")
        + overflow * _mask("overflow_count", "overflows_in_a_row")
        + nonfinite_loss * _mask("nonfinite_loss_count", "nonfinite_losses_in_a_row")
        + ops.cast(is_at_min_scale, "int64") * _mask("overflows_at_min_scale")
    )
    number = tf.gather(np.array([0, *(index + 1 for index in order)]), nearest)
    has_origin = ops.logical_and(losses.were_finite, _mask("origin_number") > 0)
    counts = ops.where(has_origin, number, counts)
    # At a scale of 1, the loss scale is no reason for an overflow of gradients either.
    in_a_row = before.nonfinite_losses_in_a_row if scales_loss else before.overflows_in_a_row
    is_unprevented = is_nonfinite if scales_loss else losses.had_rows
    is_first = ops.logical_and(is_unprevented, ops.equal(in_a_row, 0))
    begins = ops.logical_and(is_first, _mask("nonfinite_since") > 0)
    return ops.where(begins, before.step + 1, counts)


def _mask(*names: str) -> np.ndarray:
    return np.array([name in names for name in COUNT_INDEX], np.int64)
