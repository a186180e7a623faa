"""The optimizer that loss scaling wraps: which are accepted, and the state that Keras does not save."""

import functools
from typing import Any

import keras

from kmp.backend import keras_internals
from kmp.utils import validation


def resolve_optimizer(name: str, value: Any) -> keras.optimizers.Optimizer:
    """Returns the optimizer that loss scaling will wrap.

    Args:
        name: The argument's name, for the message.
        value: A `keras.optimizers.Optimizer`, or the name of one.

    Raises:
        TypeError: If `value` is not an optimizer, or already scales the loss.
        ValueError: If `value` is not the name of an optimizer.
    """
    optimizer = value
    if isinstance(value, str):
        try:
            optimizer = keras.optimizers.get(value)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(validation.message(name, value, "the name of an optimizer, such as 'adam'")) from error
    expected = "a keras.optimizers.Optimizer or the name of one, such as 'adam'"
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        reason = "this one already scales the loss, which would be scaled twice"
        raise TypeError(validation.message(name, value, f"{expected}; {reason}"))
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(validation.message(name, value, expected))
    return optimizer


@keras.saving.register_keras_serializable("kmp")
class InnerState(keras.Layer):
    """Saves and loads the state of an inner optimizer that is not in its `variables`.

    A layer for the same reason as `Counters`: the lists of variables, and the data that Keras' own class saves and
    loads, do not change.

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
