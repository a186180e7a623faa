"""Counts of steps and overflows, kept on the device and in saved files."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from kmp.backend import register
from kmp.optimizer.overflow_origin import nearest_to_loss
from kmp.scaling import StepOutcome

# What older files call them.
_OLDER_NAMES = {"overflow_origin": "culprit", "overflow_origins_by_variable": "culprits_by_variable"}


@register
class OverflowCounters(keras.Layer):
    """Counts of steps and overflows, in int64: TensorFlow keeps int32 variables on the CPU.

    A layer, because that is Keras' public holder of saved state: as a child of the optimizer it gets a place of its own
    in a file, so that the optimizer's own list of variables stays the one that Keras' class has.
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
        self._highest_loss = self._counter("highest_loss", dtype="float32")  # in magnitude, of those that were finite
        self._overflow_origin = self._counter(
            "overflow_origin"
        )  # its place among the variables, from 1; 0 before the first overflow
        self.overflows_by_variable: Any = None
        self.overflow_origins_by_variable: Any = None

    def build_for(self, variable_count: int) -> None:
        """Creates the counters that have an entry for each variable."""
        self.overflows_by_variable = self._counter("overflows_by_variable", (variable_count,))
        self.overflow_origins_by_variable = self._counter("overflow_origins_by_variable", (variable_count,))

    def count(
        self,
        step: StepOutcome,
        overflows_in_a_row: Any,
        is_at_min_scale: Any,
        flags: Any,
        order: Sequence[int],
        loss: Any,
    ) -> None:
        """Counts one step.

        Args:
            step: What the scale's rule learnt of it.
            overflows_in_a_row: Scalar int64, from the scale's rule.
            is_at_min_scale: Scalar bool, the rule would back off but the scale is at its lowest.
            flags: Bool tensor of shape `(variables,)`, whose gradient was not finite.
            order: The places of the variables, from the input to the loss.
            loss: Scalar float32, the loss before it was scaled, summed over replicas as their gradients are.
        """
        nonfinite_loss = ops.cast(ops.logical_and(step.overflowed, ops.logical_not(step.loss_was_finite)), "int64")
        in_a_row = (self.nonfinite_losses_in_a_row + nonfinite_loss) * ops.cast(overflows_in_a_row > 0, "int64")
        flags = ops.cast(flags, "int64")
        is_blamed = ops.logical_and(step.overflowed, step.loss_was_finite)  # what is nan from the loss on tells nothing
        overflow_origin = ops.cast(is_blamed, "int64") * nearest_to_loss(flags, order)
        self.steps.assign_add(1)
        self.overflows.assign_add(ops.cast(step.overflowed, "int64"))
        self.overflows_in_a_row.assign(overflows_in_a_row)
        self.nonfinite_losses.assign_add(nonfinite_loss)
        self.nonfinite_losses_in_a_row.assign(in_a_row)
        self.overflows_at_min_scale.assign_add(ops.cast(is_at_min_scale, "int64"))
        self._overflow_origin.assign(
            ops.where(is_blamed, ops.sum(overflow_origin * _places(flags)), self._overflow_origin)
        )
        self.overflows_by_variable.assign_add(flags)
        self.overflow_origins_by_variable.assign_add(overflow_origin)
        self._last_loss.assign(loss)
        size = ops.where(ops.isfinite(loss), ops.abs(loss), 0.0)
        self._highest_loss.assign(ops.maximum(self._highest_loss, size))

    def read_steps(self) -> int:
        """Copies to the host how many steps were taken, and nothing else."""
        return int(self.steps.numpy())

    def read(self, paths: Sequence[str], has_seen_a_loss: bool) -> dict[str, Any]:
        """Copies the counts to the host.

        Args:
            paths: Those of the variables that the counters were built for.
            has_seen_a_loss: Whether a loss was scaled; otherwise none is told.

        Returns:
            The fields of `kmp.records.Snapshot` that are counted here.
        """
        overflow_origin = int(self._overflow_origin.numpy())
        losses = {"last_loss": float(self._last_loss.numpy()), "highest_loss": float(self._highest_loss.numpy())}
        return (losses if has_seen_a_loss else {}) | {
            "step": self.read_steps(),
            "overflow_count": int(self.overflows.numpy()),
            "overflows_in_a_row": int(self.overflows_in_a_row.numpy()),
            "nonfinite_loss_count": int(self.nonfinite_losses.numpy()),
            "nonfinite_losses_in_a_row": int(self.nonfinite_losses_in_a_row.numpy()),
            "overflows_at_min_scale": int(self.overflows_at_min_scale.numpy()),
            "overflow_origin": paths[overflow_origin - 1] if overflow_origin else None,
            "overflows_by_variable": _read_each(self.overflows_by_variable, paths),
            "overflow_origins_by_variable": _read_each(self.overflow_origins_by_variable, paths),
        }

    def save_own_variables(self, store: Any) -> None:
        """Saves by name, so that a counter of a later version keeps no file from loading."""
        for variable in self.weights:
            store[variable.name] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Loads the counters that a file holds; a file of Keras' own class holds none.

        Raises:
            ValueError: If the file counts for another number of variables. Nothing has changed then.
        """
        names = {v.name: _name_in_file(v.name, store) for v in self.weights}
        found = {name: np.asarray(store[stored]) for name, stored in names.items() if stored in store.keys()}  # noqa: SIM118
        for variable in self.weights:
            value = found.get(variable.name)
            if value is not None and value.shape != tuple(variable.shape):
                raise ValueError(
                    f"The file's loss-scale counter {variable.name!r} has shape {value.shape}, and the optimizer's "
                    f"{tuple(variable.shape)}: it was saved with another model."
                )
        for variable in self.weights:
            if variable.name in found:
                variable.assign(found[variable.name])

    def _counter(self, name: str, shape: tuple[int, ...] = (), dtype: str = "int64") -> keras.Variable:
        options = {"autocast": False, "aggregation": "only_first_replica"}  # all replicas hold the same
        return self.add_weight(shape=shape, dtype=dtype, initializer="zeros", name=name, **options)


def _name_in_file(name: str, store: Any) -> str:
    older = _OLDER_NAMES.get(name, name)
    return older if older in store.keys() else name  # noqa: SIM118  # no dictionary


def _places(flags: Any) -> np.ndarray:
    return np.arange(1, flags.shape[0] + 1)


def _read_each(counter: Any, paths: Sequence[str]) -> dict[str, int]:
    counts = [] if counter is None else counter.numpy()
    return {path: int(count) for path, count in zip(paths, counts, strict=False) if count}
