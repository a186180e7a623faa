"""Counters of steps and overflows, on the device and in saved files."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from kmp.backend import register
from kmp.optimizer.overflow_origin import nearest_to_loss
from kmp.scaling import StepOutcome

# Their names in files of older versions.
_OLDER_NAMES = {"overflow_origin": "culprit", "overflow_origins_by_variable": "culprits_by_variable"}


@register
class OverflowCounters(keras.Layer):
    """Counters of steps and overflows, in int64 because TensorFlow keeps int32 variables on the CPU.

    A layer, because that is Keras' public container of saved state. As a child of the optimizer it is saved separately,
    so the optimizer's list of variables stays the same as that of Keras' own class.
    """

    def __init__(self) -> None:
        super().__init__(name="loss_scale_counters", dtype="float32", trainable=False)
        self.steps = self._counter("steps")
        self.overflows = self._counter("overflows")
        self.overflows_in_a_row = self._counter("overflows_in_a_row")
        self.nonfinite_losses = self._counter("nonfinite_losses")
        self.nonfinite_losses_in_a_row = self._counter("nonfinite_losses_in_a_row")
        self.overflows_at_min_scale = self._counter("overflows_at_min_scale")
        self._last_loss = self._counter("last_loss", dtype="float32")
        self._highest_loss = self._counter("highest_loss", dtype="float32")  # the magnitude of a finite loss
        # The index of the variable plus 1, or 0 before the first overflow.
        self._overflow_origin = self._counter("overflow_origin")
        self._culprit = self._overflow_origin  # its attribute in a tf.train.Checkpoint of older versions
        self.overflows_by_variable: Any = None
        self.overflow_origins_by_variable: Any = None

    def build_for(self, variable_count: int) -> None:
        """Creates the counters with one element for each variable."""
        self.overflows_by_variable = self._counter("overflows_by_variable", (variable_count,))
        self.overflow_origins_by_variable = self._counter("overflow_origins_by_variable", (variable_count,))
        self.culprits_by_variable = self.overflow_origins_by_variable  # as `_culprit`

    def count(
        self,
        step: StepOutcome,
        overflows_in_a_row: Any,
        overflowed_at_min_scale: Any,
        flags: Any,
        order: Sequence[int],
        loss: Any,
    ) -> None:
        """Counts one step.

        Args:
            step: The outcome of the step.
            overflows_in_a_row: Scalar int64, as updated by the loss scale's rule.
            overflowed_at_min_scale: Scalar bool, whether the rule would back off but the scale is at its minimum.
            flags: Bool tensor of shape `(variables,)`, whether each variable's gradient was non-finite.
            order: The indices of the variables, from the input to the loss.
            loss: Scalar float32, the loss before scaling, summed over replicas as the gradients are.
        """
        nonfinite_loss = ops.cast(ops.logical_and(step.overflowed, ops.logical_not(step.loss_was_finite)), "int64")
        in_a_row = (self.nonfinite_losses_in_a_row + nonfinite_loss) * ops.cast(overflows_in_a_row > 0, "int64")
        flags = ops.cast(flags, "int64")
        has_origin = ops.logical_and(step.overflowed, step.loss_was_finite)  # after a non-finite loss all are flagged
        origin_flags = ops.cast(has_origin, "int64") * nearest_to_loss(flags, order)
        self.steps.assign_add(1)
        self.overflows.assign_add(ops.cast(step.overflowed, "int64"))
        self.overflows_in_a_row.assign(overflows_in_a_row)
        self.nonfinite_losses.assign_add(nonfinite_loss)
        self.nonfinite_losses_in_a_row.assign(in_a_row)
        self.overflows_at_min_scale.assign_add(ops.cast(overflowed_at_min_scale, "int64"))
        self._overflow_origin.assign(
            ops.where(has_origin, ops.sum(origin_flags * _one_based_indices(flags)), self._overflow_origin)
        )
        self.overflows_by_variable.assign_add(flags)
        self.overflow_origins_by_variable.assign_add(origin_flags)
        self._last_loss.assign(loss)
        magnitude = ops.where(ops.isfinite(loss), ops.abs(loss), 0.0)
        self._highest_loss.assign(ops.maximum(self._highest_loss, magnitude))

    def read_steps(self) -> int:
        """Copies only the number of steps to the host."""
        return int(self.steps.numpy())

    def read(self, paths: Sequence[str], has_recorded_loss: bool) -> dict[str, Any]:
        """Copies the counters to the host.

        Args:
            paths: The paths of the variables that the counters were built for.
            has_recorded_loss: Whether a loss was scaled; if not, the result has no losses.

        Returns:
            The fields of `kmp.records.Snapshot` that are counted here, by name.
        """
        overflow_origin = int(self._overflow_origin.numpy())
        losses = {"last_loss": float(self._last_loss.numpy()), "highest_loss": float(self._highest_loss.numpy())}
        return (losses if has_recorded_loss else {}) | {
            "step": self.read_steps(),
            "overflow_count": int(self.overflows.numpy()),
            "overflows_in_a_row": int(self.overflows_in_a_row.numpy()),
            "nonfinite_loss_count": int(self.nonfinite_losses.numpy()),
            "nonfinite_losses_in_a_row": int(self.nonfinite_losses_in_a_row.numpy()),
            "overflows_at_min_scale": int(self.overflows_at_min_scale.numpy()),
            "overflow_origin": paths[overflow_origin - 1] if overflow_origin else None,
            "overflows_by_variable": _nonzero_counts(self.overflows_by_variable, paths),
            "overflow_origins_by_variable": _nonzero_counts(self.overflow_origins_by_variable, paths),
        }

    def save_own_variables(self, store: Any) -> None:
        """Saves by name, so that files still load if a later version adds a counter."""
        for variable in self.weights:
            store[variable.name] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Loads the counters that a file has; files of Keras' own class have none.

        Raises:
            ValueError: If the file has counters for another number of variables. No counter has changed then.
        """
        stored_names = {v.name: _stored_name(v.name, store) for v in self.weights}
        values = {name: np.asarray(store[stored]) for name, stored in stored_names.items() if stored in store.keys()}  # noqa: SIM118
        for variable in self.weights:
            value = values.get(variable.name)
            if value is not None and value.shape != tuple(variable.shape):
                raise ValueError(
                    f"The loss scale counter {variable.name!r} has shape {value.shape} in the file, but the optimizer "
                    f"needs {tuple(variable.shape)}: the file was saved with another model."
                )
        for variable in self.weights:
            if variable.name in values:
                variable.assign(values[variable.name])

    def _counter(self, name: str, shape: tuple[int, ...] = (), dtype: str = "int64") -> keras.Variable:
        options = {"autocast": False, "aggregation": "only_first_replica"}  # the value is the same on all replicas
        return self.add_weight(shape=shape, dtype=dtype, initializer="zeros", name=name, **options)


def _stored_name(name: str, store: Any) -> str:
    older = _OLDER_NAMES.get(name, name)
    return older if older in store.keys() else name  # noqa: SIM118  # not a dictionary


def _one_based_indices(flags: Any) -> np.ndarray:
    return np.arange(1, flags.shape[0] + 1)


def _nonzero_counts(counter: Any, paths: Sequence[str]) -> dict[str, int]:
    """Returns the counts that are not zero by variable path; none before `build_for`."""
    counts = [] if counter is None else counter.numpy()
    return {path: int(count) for path, count in zip(paths, counts, strict=False) if count}
