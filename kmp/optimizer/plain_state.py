"""State of a plain optimizer for a wrapped one, and the other way round.

A run in float32 trains with a plain optimizer, the same run in float16 with one inside of a
`LossScaleOptimizer`. Keras finds variables in a file by their position, and finds no state of the
other one. `kmp.backend.checkpoint_binding` does the same for `tf.train.Checkpoint`.
"""

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import keras
import numpy as np

from kmp.backend import keras_internals
from kmp.gradients.tensor_groups import Variables

# The variables of the wrapper, before those of the inner optimizer: two that each optimizer of
# Keras has, the step counter and the loss scale.
_WRAPPER_COUNT = 4
_WRAPPER_LEARNING_RATE = 0.0  # Keras sets it, and never changes it
# Inner optimizers that have state from a file without any at their own place.
_loaded: WeakSet[keras.optimizers.Optimizer] = WeakSet()


def load_own_variables_patch(original: Callable[..., None]) -> Callable[..., None]:
    """Patches `load_own_variables` to load state into a wrapper, or from one.

    Keras warns that the numbers of variables differ, and loads nothing.
    """

    @functools.wraps(original)
    def load_own_variables(self: keras.optimizers.Optimizer, store: Any) -> None:
        if isinstance(self, keras.optimizers.LossScaleOptimizer):
            if _load_plain(self.inner_optimizer, store):
                _loaded.add(self.inner_optimizer)
                return
        elif self in _loaded and not store.keys():
            _loaded.discard(self)
            return
        elif _is_of_wrapper(store) and _fits(self.variables, store, _WRAPPER_COUNT):
            _assign(self.variables, store, _WRAPPER_COUNT)
            return
        original(self, store)

    return load_own_variables


def _load_plain(inner: keras.optimizers.Optimizer, store: Any) -> bool:
    """Loads the state of a plain optimizer into an inner one; returns whether it fits."""
    if _is_of_wrapper(store):
        return False
    if _fits(inner.variables, store):
        _assign(inner.variables, store)
        return True
    state = keras_internals.optimizer_state(inner)
    if len(store.keys()) != len(state):
        return False
    # Keras lists fewer variables of an inner optimizer, in an order that only a plain one has.
    plain = type(inner).from_config(inner.get_config())
    plain.build(keras_internals.variables_to_train(inner))
    if not _fits(plain.variables, store):
        return False
    _assign(plain.variables, store)
    for variable, loaded in zip(state, keras_internals.optimizer_state(plain), strict=True):
        variable.assign(loaded)
    return True


def _is_of_wrapper(store: Any) -> bool:
    """Whether a file has the variables of a `LossScaleOptimizer`, see `_WRAPPER_COUNT`.

    Three integers stand among the first five, the last one the step count of the inner optimizer. A
    plain optimizer has its step count alone, and then a learning rate and float variables.
    """
    if len(store.keys()) <= _WRAPPER_COUNT:
        return False
    first = [np.asarray(store[str(index)]) for index in range(_WRAPPER_COUNT + 1)]
    is_integer = [np.issubdtype(value.dtype, np.integer) for value in first]
    if is_integer != [True, False, True, False, True] or any(value.ndim for value in first):
        return False
    return bool(first[1] == _WRAPPER_LEARNING_RATE and first[3] > 0)


def _fits(variables: Variables, store: Any, first: int = 0) -> bool:
    """Whether a file has values of the shapes of variables, the first ones left out."""
    if len(store.keys()) != len(variables) + first:
        return False
    numbered = enumerate(variables, start=first)
    return all(tuple(store[str(index)].shape) == tuple(each.shape) for index, each in numbered)


def _assign(variables: Variables, store: Any, first: int = 0) -> None:
    for index, variable in enumerate(variables, start=first):
        variable.assign(store[str(index)])
