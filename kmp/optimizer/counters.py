"""Counters of steps, overflows and the variables where these started, on the device and in saved files."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from kmp.gradients import Gradients, values_of
from kmp.optimizer.step_monitor import StepLosses
from kmp.scaling import select


class Counts(NamedTuple):
    """The counts of `kmp.records.Snapshot`, each a scalar int64.

    Attributes:
        skipped_or_empty: Skipped steps, with those in which a replica's batch had no rows: a mean over
            nothing is NaN.
        overflow_origin: The index of the variable where the last overflow started plus 1; 0 before
            the first one.
    """

    step: Any
    skipped_or_empty: Any
    overflow_count: Any
    overflows_in_a_row: Any
    nonfinite_loss_count: Any
    nonfinite_losses_in_a_row: Any
    overflows_at_min_scale: Any
    overflow_origin: Any


COUNT_INDEX = {name: index for index, name in enumerate(Counts.__annotations__)}


class NamedState(keras.Layer):
    """State that is saved by name, and loaded as far as a file has it: files of Keras' own class have none.

    A layer, because that is Keras' public container of saved state. As a child of the optimizer it
    is saved separately, so the optimizer's list of variables stays the same as that of Keras' own
    class.
    """

    def named_variables(self) -> dict[str, keras.Variable]:
        """Returns the variables by their name in a file."""
        return {variable.name: variable for variable in self.weights}

    def save_own_variables(self, store: Any) -> None:
        """Saves the variables by name."""
        for name, variable in self.named_variables().items():
            store[name] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Loads the variables that a file has, or raises an error, before any, if they are those of another model."""
        names = set(store.keys())  # not a dictionary
        found = [
            (each, np.asarray(store[name]))
            for name, each in self.named_variables().items()
            if name in names
        ]
        for variable, value in found:
            if value.shape != tuple(variable.shape):
                raise ValueError(
                    f"The optimizer's {variable.name!r} has shape {value.shape} in the file, but"
                    f" the optimizer needs {tuple(variable.shape)}: the file was saved with another"
                    " model."
                )
        for variable, value in found:
            variable.assign(value)


@keras.saving.register_keras_serializable("kmp")
class Counters(NamedState):
    """Counters of steps and overflows, in int64 because TensorFlow keeps int32 variables on the CPU.

    Attributes:
        counts: int64 variable of shape `(8,)`, the fields of `Counts`: one variable is read and
            written by one operation, several by one each.
        loss_values: float32 variable of shape `(2,)`: the last loss, and the largest magnitude of a
            finite one.
        by_variable: int64 variable of shape `(2, variables)`: in how many steps the gradient was
            non-finite, and in how many the overflow started there. `None` before the optimizer is
            built.
    """

    def __init__(self) -> None:
        super().__init__(name="loss_scale_counters", dtype="float32", trainable=False)
        self.counts = self._counter("counts", (len(COUNT_INDEX),))
        self.loss_values = self._counter("losses", (2,), "float32")
        self.by_variable: Any = None

    def build_for(self, variable_count: int) -> None:
        """Creates the counters with elements for each variable."""
        self.by_variable = self._counter("by_variable", (2, variable_count))

    def values(self) -> Counts:
        """Returns the counts as tensors on the device."""
        counts = ops.copy(self.counts)
        return Counts(
            *(counts[index] for index in COUNT_INDEX.values())
        )  # TensorFlow unstacks int64 on the host

    def count(
        self,
        before: Counts,
        overflowed: Any,
        losses: StepLosses,
        is_at_min_scale: Any,
        flags: tf.Tensor,
        order: Sequence[int],
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
        """
        in_a_row = ("overflows_in_a_row", "nonfinite_losses_in_a_row")
        applied = self.counts.value * np.array(
            [name not in in_a_row for name in COUNT_INDEX], np.int64
        )
        counts = applied + np.array([name == "step" for name in COUNT_INDEX], np.int64)
        if overflowed is not False:
            overflow = ops.cast(
                ops.greater_equal(losses.nonfinite, 0.0), "int64"
            )  # 0 for a batch without rows
            nonfinite_loss = ops.cast(ops.greater(losses.nonfinite, 0.0), "int64")
            # The backward pass spreads an overflow to every variable before its origin, so the
            # origin is the flagged variable that is nearest to the loss. After a non-finite loss,
            # which flags all, there is none.
            ranks = np.argsort(order) + 1
            flagged_ranks = ops.cast(ops.logical_and(flags, losses.were_finite), "int64") * ranks
            is_origin = ops.logical_and(
                flagged_ranks > 0, ops.equal(flagged_ranks, ops.max(flagged_ranks))
            )
            origin = ops.cast(is_origin, "int64")
            index = ops.sum(origin * np.arange(1, len(order) + 1))
            skipped = Counts(
                before.step + 1,
                skipped_or_empty=before.skipped_or_empty + 1,
                overflow_count=before.overflow_count + overflow,
                overflows_in_a_row=before.overflows_in_a_row + overflow,
                nonfinite_loss_count=before.nonfinite_loss_count + nonfinite_loss,
                nonfinite_losses_in_a_row=before.nonfinite_losses_in_a_row + nonfinite_loss,
                overflows_at_min_scale=before.overflows_at_min_scale
                + ops.cast(is_at_min_scale, "int64"),
                overflow_origin=ops.where(losses.were_finite, index, before.overflow_origin),
            )
            counts = select(overflowed, tf.stack(skipped), counts)
            self.by_variable.assign_add(tf.stack([overflow * ops.cast(flags, "int64"), origin]))
        self.counts.assign(counts)
        magnitude = ops.where(ops.isfinite(losses.last), ops.abs(losses.last), 0.0)
        self.loss_values.assign(
            tf.where([True, False], losses.last, ops.maximum(self.loss_values, magnitude))
        )

    def read_counts(self) -> Counts:
        """Copies the counts of all variables together to the host."""
        return Counts(*self.counts.numpy().tolist())

    def read(self, paths: Sequence[str], has_recorded_loss: bool) -> dict[str, Any]:
        """Copies the counters to the host, as fields of `kmp.records.Snapshot`: without losses if none was scaled."""
        rows = ([], []) if self.by_variable is None else self.by_variable.numpy().tolist()
        overflows, origins = (
            {path: n for path, n in zip(paths, row, strict=False) if n} for row in rows
        )
        counts = self.read_counts()._asdict()
        del counts["skipped_or_empty"]
        origin = counts["overflow_origin"]
        losses = zip(("last_loss", "highest_loss"), self.loss_values.numpy().tolist(), strict=True)
        has_loss = has_recorded_loss and counts["step"] > 0
        return (
            (dict(losses) if has_loss else {})
            | counts
            | {
                "overflow_origin": paths[origin - 1] if 0 < origin <= len(paths) else None,
                "overflows_by_variable": overflows,
                "overflow_origins_by_variable": origins,
            }
        )

    def _counter(self, name: str, shape: tuple[int, ...], dtype: str = "int64") -> keras.Variable:
        options = {
            "autocast": False,
            "aggregation": "only_first_replica",
        }  # the value is the same on all replicas
        return self.add_weight(shape=shape, dtype=dtype, initializer="zeros", name=name, **options)


def network_order(gradients: Gradients) -> list[int]:
    """Returns the indices of the gradients in the order of their variables, from the input to the loss.

    The nearer a variable is to the loss, the shorter is the longest path to its gradient through
    forward pass, loss and backward pass. A variable that is used more than once has the position of
    its use farthest from the loss. Gradients with paths of equal length, and gradients without a
    path (`None`, computed eagerly or outside this graph), keep the order of the list.
    """
    tensors = {
        i: values_of(gradient) for i, gradient in enumerate(gradients) if gradient is not None
    }
    operations = {i: tensor.op for i, tensor in tensors.items() if tf.is_symbolic_tensor(tensor)}
    graph = next((op.graph for op in operations.values()), None)
    longest: dict[tf.Operation | None, int] = {}  # the length of the longest path to each operation
    for op in (
        graph.get_operations() if graph else ()
    ):  # in the order of creation: each comes after its inputs
        longest[op] = 1 + max((longest.get(tensor.op, 0) for tensor in op.inputs), default=0)
    return sorted(range(len(gradients)), key=lambda i: -longest.get(operations.get(i), 0))
