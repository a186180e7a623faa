"""Restores a model's state after a pass that is not part of the training."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from kmp.backend import keras_internals
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
