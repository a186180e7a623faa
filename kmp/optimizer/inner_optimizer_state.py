"""The state of an inner optimizer that Keras does not save."""

import functools
from typing import Any

import keras

from kmp.backend import keras_internals, register


@register
class InnerState(keras.Layer):
    """Saves and loads the state of an inner optimizer that is not in its `variables`.

    A layer for the same reason as `OverflowCounters`: the lists of variables, and the data that Keras' own class saves
    and loads, do not change.

    Args:
        optimizer: The inner optimizer.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        super().__init__(name="inner_state", dtype="float32", trainable=False)
        # Keras would save an optimizer that is an attribute of this layer.
        self._unlisted_variables = functools.partial(_unlisted_variables, optimizer)

    def save_own_variables(self, store: Any) -> None:
        """Saves each variable under its name from `_unlisted_variables`."""
        for name, variable in self._unlisted_variables().items():
            store[name] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Loads the variables that the file has for such an optimizer; files of Keras' own class have none."""
        for name, variable in self._unlisted_variables().items():
            if name in store.keys():  # noqa: SIM118  # not a dictionary
                variable.assign(store[name])


def _unlisted_variables(optimizer: keras.optimizers.Optimizer) -> dict[str, keras.Variable]:
    """Returns the variables that are not in `optimizer.variables`, by their name in a file.

    The names contain the optimizer's class and its numbers of variables. If these differ from those of the file, Keras
    skips the rest of the optimizer's state, and this part is skipped too.
    """
    listed = set(map(id, optimizer.variables))
    unlisted = [variable for variable in keras_internals.optimizer_state(optimizer) if id(variable) not in listed]
    prefix = f"{type(optimizer).__name__}_{len(listed)}_{len(unlisted)}"
    return {f"{prefix}_{index}": variable for index, variable in enumerate(unlisted)}
