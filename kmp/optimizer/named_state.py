"""State that is saved by name beside the optimizer's variables."""

import functools
from typing import Any

import keras
import numpy as np

from kmp.backend import keras_internals
from kmp.backend.extensible_variable import ExtensibleVariable


class NamedState(keras.Layer):
    """State that is saved by name, and loaded as far as a file has it.

    Files of Keras' own class have none. It is a layer, because that is Keras' public container of
    saved state. As a child of the optimizer it is saved separately, so the optimizer's list of
    variables stays the same as that of Keras' own class.
    """

    def named_variables(self) -> dict[str, keras.Variable]:
        """Returns the variables by their name in a file."""
        return {variable.name: variable for variable in self.weights}

    def save_own_variables(self, store: Any) -> None:
        """Saves the variables by name."""
        for name, variable in self.named_variables().items():
            store[name] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Loads the variables that a file has.

        Raises:
            ValueError: Before any is loaded, if they are those of another model, or of a newer
                version of kmp with more of them.
        """
        names = set(store.keys())  # not a dictionary
        found = []
        for name, variable in self.named_variables().items():
            if name not in names:
                continue
            value = np.asarray(store[name])
            if isinstance(variable, ExtensibleVariable):
                value = variable.extended(value)
            found.append((variable, value))
            if value.shape != tuple(variable.shape):
                raise ValueError(
                    f"The optimizer's {variable.name!r} has shape {value.shape} in the file, but"
                    f" the optimizer needs {tuple(variable.shape)}: the file was saved with another"
                    " model."
                )
        for variable, value in found:
            variable.assign(value)


@keras.saving.register_keras_serializable("kmp")
class InnerState(NamedState):
    """The state of an inner optimizer that is not in its `variables`."""

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        super().__init__(name="inner_state", dtype="float32", trainable=False)
        # Keras would save an optimizer that is an attribute of this layer.
        self._unlisted_variables = functools.partial(_unlisted_variables, optimizer)

    def named_variables(self) -> dict[str, keras.Variable]:
        return self._unlisted_variables()


def _unlisted_variables(optimizer: keras.optimizers.Optimizer) -> dict[str, keras.Variable]:
    """Returns the variables that are not in `optimizer.variables`, by their name in a file.

    The names contain the optimizer's class and its numbers of variables. If these differ from those
    of the file, Keras skips the rest of the optimizer's state, and this part is skipped too.
    """
    listed = set(map(id, optimizer.variables))
    state = keras_internals.optimizer_state(optimizer)
    unlisted = [variable for variable in state if id(variable) not in listed]
    prefix = f"{type(optimizer).__name__}_{len(listed)}_{len(unlisted)}"
    return {f"{prefix}_{index}": variable for index, variable in enumerate(unlisted)}
