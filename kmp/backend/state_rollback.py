"""Saving a model's state before a step or pass, and restoring it."""

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from kmp.backend import keras_internals
from kmp.backend.keras_internals import declared_not_trainable
from kmp.backend.layer_traversal import rnn_states, sublayers


@contextlib.contextmanager
def state_restored(model: keras.Model) -> Iterator[None]:
    """Restores a model's weights, statistics, RNN states, seeds and metrics on exit. For eager execution only.

    So are TensorFlow's variables and random generators that are attributes of layers, and the global seeds of Keras,
    NumPy and Python.
    """
    states = [state for layer in sublayers(model) for state in rnn_states(layer)]
    # A custom `metrics` property may need attributes that only `compile` sets. Metrics of layers are in `variables`.
    metrics = [variable for metric in (model.metrics if model.compiled else ()) for variable in metric.variables]
    own = [_variable_of(value) for layer in sublayers(model) for value in vars(layer).values()]
    every = (*model.variables, *states, *metrics, *(variable for variable in own if variable is not None))
    variables = {id(variable): variable for variable in every}.values()
    saved = [(variable, ops.copy(variable)) for variable in variables]
    with keras_internals.global_seed_restored(), _random_states_restored():
        try:
            yield
        finally:
            for variable, value in saved:
                variable.assign(value)


def _variable_of(value: Any) -> tf.Variable | None:
    """Returns TensorFlow's variable that an attribute is or has, which Keras does not know of; else `None`."""
    value = value.state if isinstance(value, tf.random.Generator) else value
    return value if isinstance(value, tf.Variable) else None


@contextlib.contextmanager
def _random_states_restored() -> Iterator[None]:
    python, arrays = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


class SavedState:
    """A copy of variables' values, made on construction. Works in graphs, and on each replica separately.

    Args:
        list_variables: Returns the variables. Called again by `restore`, because a first step may create variables.
        initial: Returns the initial value of a variable that was created after the copy.
    """

    def __init__(
        self, list_variables: Callable[[], Iterable[keras.Variable]], initial: Callable[[Any], Any] = ops.zeros_like
    ) -> None:
        self._list_variables = list_variables
        self._initial = initial
        self._saved = {id(variable): ops.copy(variable) for variable in list_variables()}

    @property
    def values(self) -> list[Any]:
        """The saved tensors."""
        return list(self._saved.values())

    def restore(self, where: Any) -> None:
        """Restores the saved values if the scalar bool `where` is true."""
        for variable in self._list_variables():
            value = self._saved.get(id(variable))
            variable.assign(ops.where(where, self._initial(variable) if value is None else value, variable))


@contextlib.contextmanager
def saved_layer_state(layers: Iterable[keras.Layer]) -> Iterator[tuple[SavedState, SavedState]]:
    """Saves the float variables of `layers` that the forward pass in the context may change.

    Yields:
        Two saved states: of non-trainable variables, such as moving statistics and the states of stateful RNNs; and of
        the kernels under `SpectralNormalization`, which the layer normalizes in place.
    """
    layers = tuple(layers)
    initial_values: dict[int, tf.Tensor] = {}

    def initial(variable: keras.Variable) -> Any:
        if id(variable.value) in initial_values:
            return initial_values[id(variable.value)]
        with tf.init_scope():  # created outside the graph, which has not run yet: the current value is the initial one
            return ops.copy(variable)

    def record_initial(create: Callable[..., tf.Variable], **arguments: Any) -> tf.Variable:
        variable = create(**arguments)
        if tf.executing_eagerly():
            initial_values[id(variable)] = tf.identity(variable)
        else:  # the variable has no value until the graph runs
            value = arguments["initial_value"]
            initial_values[id(variable)] = tf.cast(value() if callable(value) else value, variable.dtype)
        return variable

    saved = SavedState(lambda: _states(layers), initial), SavedState(lambda: _normalized_kernels(layers), initial)
    with tf.variable_creator_scope(record_initial):
        yield saved


def _states(layers: Iterable[keras.Layer]) -> list[keras.Variable]:
    # The public lists change with `trainable`, and some layers update their state even if they are frozen.
    all_layers = [sublayer for layer in layers for sublayer in sublayers(layer)]
    states = [variable for layer in all_layers for variable in (*declared_not_trainable(layer), *rnn_states(layer))]
    unique = {id(variable): variable for variable in states}
    return [variable for variable in unique.values() if keras.backend.is_float_dtype(variable.dtype)]


def _normalized_kernels(layers: Iterable[keras.Layer]) -> list[keras.Variable]:
    all_layers = [sublayer for layer in layers for sublayer in sublayers(layer)]
    normalizing = [
        layer for layer in all_layers if isinstance(layer, keras.layers.SpectralNormalization) and layer.built
    ]
    return list({id(layer.kernel): layer.kernel for layer in normalizing}.values())
