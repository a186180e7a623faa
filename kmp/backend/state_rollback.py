"""A model's layers and the state they hold: what it was before a step, to put back if the step does not count."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from kmp.backend.keras_internals import declared_not_trainable
from kmp.backend.layer_traversal import rnn_states, sublayers


@contextlib.contextmanager
def state_restored(model: keras.Model) -> Iterator[None]:
    """Puts everything back that a pass, run eagerly inside, may change: weights, statistics, states, seeds, metrics."""
    states = [state for layer in sublayers(model) for state in rnn_states(layer)]
    # A `metrics` of the model's own may list what only its `compile` makes; those of layers are among the variables.
    metrics = [variable for metric in (model.metrics if model.compiled else ()) for variable in metric.variables]
    variables = {id(variable): variable for variable in (*model.variables, *states, *metrics)}.values()
    before = [(variable, ops.copy(variable)) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


class SavedState:
    """What variables held when this was made; part of the compiled step, and of one replica.

    Args:
        list_variables: Returns the variables; asked again when they are put back, because a first step makes some.
        initial: Returns the value that a variable made in between started from.
    """

    def __init__(
        self, list_variables: Callable[[], Iterable[keras.Variable]], initial: Callable[[Any], Any] = ops.zeros_like
    ) -> None:
        self._list_variables = list_variables
        self._initial = initial
        self._before = {id(variable): ops.copy(variable) for variable in list_variables()}

    @property
    def values(self) -> list[Any]:
        """The tensors that were kept."""
        return list(self._before.values())

    def restore(self, where: Any) -> None:
        """Gives the variables their old values if the scalar bool `where` is true."""
        for variable in self._list_variables():
            old = self._before.get(id(variable))
            variable.assign(ops.where(where, self._initial(variable) if old is None else old, variable))


@contextlib.contextmanager
def saved_layer_state(layers: Iterable[keras.Layer]) -> Iterator[tuple[SavedState, SavedState]]:
    """Keeps the float variables that the forward pass of `layers`, which happens inside, may change.

    Yields:
        What is not trained, such as moving statistics and the states of stateful RNNs; and what is, the kernels under
        `SpectralNormalization`, which normalizes them in place.
    """
    layers = tuple(layers)
    made: dict[int, tf.Tensor] = {}

    def initial(variable: keras.Variable) -> Any:
        if id(variable.value) in made:
            return made[id(variable.value)]
        with tf.init_scope():  # made outside the trace, which has not run yet
            return ops.copy(variable)

    def note_initial(create: Callable[..., tf.Variable], **arguments: Any) -> tf.Variable:
        variable = create(**arguments)
        if tf.executing_eagerly():
            made[id(variable)] = tf.identity(variable)
        else:  # it has no value before the trace runs
            start = arguments["initial_value"]
            made[id(variable)] = tf.cast(start() if callable(start) else start, variable.dtype)
        return variable

    kept = SavedState(lambda: _states(layers), initial), SavedState(lambda: _normalized_kernels(layers), initial)
    with tf.variable_creator_scope(note_initial):
        yield kept


def _states(layers: Iterable[keras.Layer]) -> list[keras.Variable]:
    # Those declared as not trained: a layer's public lists change with `trainable`, and some layers learn while frozen.
    inner = [layer for outer in layers for layer in sublayers(outer)]
    held = [variable for layer in inner for variable in (*declared_not_trainable(layer), *rnn_states(layer))]
    found = {id(variable): variable for variable in held}
    return [variable for variable in found.values() if keras.backend.is_float_dtype(variable.dtype)]


def _normalized_kernels(layers: Iterable[keras.Layer]) -> list[keras.Variable]:
    inner = [layer for outer in layers for layer in sublayers(outer)]
    found = [layer for layer in inner if isinstance(layer, keras.layers.SpectralNormalization) and layer.built]
    return list({id(layer.kernel): layer.kernel for layer in found}.values())
