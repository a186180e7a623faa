"""Counters of steps and overflows, on the device and in saved files."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from kmp.backend import PackedElement, PackedVariable, register
from kmp.optimizer.counter_values import COUNTS, LOSSES, CounterValues

_NOT_SAVED = "unscaled_steps"
# Names in files of older versions.
_OLDER_NAMES = {"overflow_origin": "culprit", "overflow_origins_by_variable": "culprits_by_variable"}
# Attributes in a tf.train.Checkpoint that differ from the names.
_ATTRIBUTES = {
    "overflow_origin": ("_overflow_origin", "_culprit"),
    "last_loss": ("_last_loss",),
    "highest_loss": ("_highest_loss",),
}


@register
class OverflowCounters(keras.Layer):
    """Counters of steps and overflows, in int64 because TensorFlow keeps int32 variables on the CPU.

    A layer, because that is Keras' public container of saved state. As a child of the optimizer it is saved separately,
    so the optimizer's list of variables stays the same as that of Keras' own class. Files have each counter by its
    name, so that they still load if a later version adds one.
    """

    def __init__(self) -> None:
        super().__init__(name="loss_scale_counters", dtype="float32", trainable=False)
        self._counts = PackedVariable(self._counter("counts", (len(COUNTS),)), COUNTS)
        self._loss_values = PackedVariable(self._counter("losses", (len(LOSSES),), "float32"), LOSSES)
        for name, element in self._elements().items():
            for attribute in _ATTRIBUTES.get(name, (name,)):
                setattr(self, attribute, element)
        self.overflows_by_variable: Any = None
        self.overflow_origins_by_variable: Any = None

    def build_for(self, variable_count: int) -> None:
        """Creates the counters with one element for each variable."""
        self.overflows_by_variable = self._counter("overflows_by_variable", (variable_count,))
        self.overflow_origins_by_variable = self._counter("overflow_origins_by_variable", (variable_count,))
        self.culprits_by_variable = self.overflow_origins_by_variable  # in a tf.train.Checkpoint of older versions

    def values(self) -> CounterValues:
        """Returns the counters of all variables together, tensors on the device."""
        return CounterValues(ops.copy(self._counts.variable), ops.copy(self._loss_values.variable))

    def assign(self, values: CounterValues) -> None:
        """Writes the counters of all variables together."""
        self._counts.variable.assign(values.counts)
        self._loss_values.variable.assign(values.losses)

    def count_by_variable(self, flags: Any, origin: Any) -> None:
        """Counts a skipped step for the variables whose gradients were non-finite.

        Args:
            flags: Bool tensor of shape `(variables,)`, whether each variable's gradient was non-finite.
            origin: As returned by `overflow_origin.origin_flags`.
        """
        self.overflows_by_variable.assign_add(ops.cast(flags, "int64"))
        self.overflow_origins_by_variable.assign_add(origin)

    def read_counts(self) -> dict[str, int]:
        """Copies the counts of all variables together to the host."""
        return self._counts.read()

    def read(self, paths: Sequence[str], has_recorded_loss: bool) -> dict[str, Any]:
        """Copies the counters to the host.

        Args:
            paths: The paths of the variables that the counters were built for.
            has_recorded_loss: Whether a loss was scaled; if not, the result has no losses.

        Returns:
            The fields of `kmp.records.Snapshot` that are counted here, by name.
        """
        counts = self.read_counts()
        overflow_origin = counts["overflow_origin"]
        return (self._loss_values.read() if has_recorded_loss else {}) | {
            "step": counts["steps"],
            "overflow_count": counts["overflows"],
            "overflows_in_a_row": counts["overflows_in_a_row"],
            "nonfinite_loss_count": counts["nonfinite_losses"],
            "nonfinite_losses_in_a_row": counts["nonfinite_losses_in_a_row"],
            "overflows_at_min_scale": counts["overflows_at_min_scale"],
            "unscaled_steps": counts["unscaled_steps"],
            "overflow_origin": paths[overflow_origin - 1] if overflow_origin else None,
            "overflows_by_variable": _nonzero_counts(self.overflows_by_variable, paths),
            "overflow_origins_by_variable": _nonzero_counts(self.overflow_origins_by_variable, paths),
        }

    def save_own_variables(self, store: Any) -> None:
        """Saves the counters by name."""
        for name, counter in self._saved().items():
            store[name] = np.asarray(counter.value)

    def load_own_variables(self, store: Any) -> None:
        """Loads the counters that a file has; files of Keras' own class have none.

        Raises:
            ValueError: If the file has counters for another number of variables. No counter has changed then.
        """
        saved = self._saved()
        stored_names = {name: _stored_name(name, store) for name in saved}
        values = {name: np.asarray(store[stored]) for name, stored in stored_names.items() if stored in store.keys()}  # noqa: SIM118
        for name, value in values.items():
            shape = tuple(saved[name].value.shape)
            if value.shape != shape:
                raise ValueError(
                    f"The loss scale counter {name!r} has shape {value.shape} in the file, but the optimizer needs "
                    f"{shape}: the file was saved with another model."
                )
        for name, value in values.items():
            saved[name].assign(value)

    def _saved(self) -> dict[str, Any]:
        """Returns the counters to save, by name."""
        by_variable = (self.overflows_by_variable, self.overflow_origins_by_variable)
        return self._elements() | {counter.name: counter for counter in by_variable if counter is not None}

    def _elements(self) -> dict[str, PackedElement]:
        elements = {**self._counts.elements, **self._loss_values.elements}
        return {name: element for name, element in elements.items() if name != _NOT_SAVED}

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        """Returns what TensorFlow saves: in a SavedModel not the elements, which only a checkpoint can write."""
        children = super()._trackable_children(save_type, **kwargs)
        if save_type != "savedmodel":
            return children
        return {name: child for name, child in children.items() if not isinstance(child, PackedElement)}

    def _counter(self, name: str, shape: tuple[int, ...], dtype: str = "int64") -> keras.Variable:
        options = {"autocast": False, "aggregation": "only_first_replica"}  # the value is the same on all replicas
        return self.add_weight(shape=shape, dtype=dtype, initializer="zeros", name=name, **options)


def _stored_name(name: str, store: Any) -> str:
    older = _OLDER_NAMES.get(name, name)
    return older if older in store.keys() else name  # noqa: SIM118  # not a dictionary


def _nonzero_counts(counter: Any, paths: Sequence[str]) -> dict[str, int]:
    """Returns the counts that are not zero by variable path; none before `build_for`."""
    counts = [] if counter is None else counter.numpy()
    return {path: int(count) for path, count in zip(paths, counts, strict=False) if count}
