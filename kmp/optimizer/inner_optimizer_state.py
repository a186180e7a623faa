"""What an inner optimizer keeps that Keras writes to no file."""

import functools
from typing import Any

import keras

from kmp.backend import keras_internals, register


@register
class InnerState(keras.Layer):
    """A place in files for the state of an inner optimizer that is not among its `variables`.

    A layer, as `OverflowCounters` is: the lists of variables, and what Keras' own class reads and writes, stay as they are.

    Args:
        optimizer: The inner optimizer.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        super().__init__(name="inner_state", dtype="float32", trainable=False)
        self._list = functools.partial(_unlisted, optimizer)  # as an attribute, Keras would save the optimizer here

    def save_own_variables(self, store: Any) -> None:
        """Saves by name; see `_unlisted`."""
        for name, variable in self._list().items():
            store[name] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Loads what a file holds of such an optimizer; one that Keras' own class wrote holds none."""
        for name, variable in self._list().items():
            if name in store.keys():  # noqa: SIM118  # no dictionary
                variable.assign(store[name])


def _unlisted(optimizer: keras.optimizers.Optimizer) -> dict[str, keras.Variable]:
    """Returns the variables with names for a file.

    They tell the kind of optimizer, and how much it keeps: where these differ, Keras skips the rest of its state, and
    this goes with it.
    """
    listed = set(map(id, optimizer.variables))
    found = [variable for variable in keras_internals.optimizer_state(optimizer) if id(variable) not in listed]
    whose = f"{type(optimizer).__name__}_{len(listed)}_{len(found)}"
    return {f"{whose}_{place}": variable for place, variable in enumerate(found)}
