"""A model's layers and the state they hold: what it was before a step, to put back if the step does not count."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from kmp._formats import FLOAT32, HALF
from kmp._internals import declared_not_trainable, declared_trainable
from kmp._patch import definer, is_keras


def sublayers(layer: keras.Layer) -> Iterable[keras.Layer]:
    """Returns the layer and all layers below it, wrapped and nested ones included."""
    return layer._flatten_layers()  # Keras has no public walk that finds them all


def children(layer: keras.Layer) -> Iterable[keras.Layer]:
    """Returns the layers that a layer holds itself."""
    return layer._flatten_layers(recursive=False, include_self=False)  # as above


def compute_dtypes(layer: keras.Layer) -> set[str]:
    """Returns the dtypes that the layer, and the layers below it, compute in."""
    return {inner.compute_dtype for inner in sublayers(layer) if not only_hands_on(inner)}


def float32_variables(layer: keras.Layer) -> set[int]:
    """Returns the identities of the variables that only layers which compute in float32 have as their own."""
    owned = [
        (inner.compute_dtype, id(variable)) for inner in sublayers(layer) for variable in declared_trainable(inner)
    ]
    wide = {variable for dtype, variable in owned if dtype == FLOAT32.name}
    return wide - {variable for dtype, variable in owned if dtype != FLOAT32.name}


def only_hands_on(layer: keras.Layer) -> bool:
    """Whether a layer computes nothing itself, as inputs and Sequential and functional models do not."""
    if isinstance(layer, keras.layers.InputLayer):
        return True
    return isinstance(layer, keras.Model) and is_keras(definer(type(layer), "call"))


def computes_in_half(model: keras.Model) -> bool:
    """Whether any part of a model computes in 16 bits."""
    return bool(compute_dtypes(model) & set(HALF))


def rnn_states(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the states that a stateful RNN keeps from batch to batch, which Keras counts to no layer's variables."""
    is_stateful = isinstance(layer, keras.layers.RNN) and layer.stateful and layer.built
    return keras.tree.flatten(layer.states) if is_stateful else []


@contextlib.contextmanager
def unchanged(model: keras.Model) -> Iterator[None]:
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


class Kept:
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

    def put_back(self, where: Any) -> None:
        """Gives the variables their old values if the scalar bool `where` is true."""
        for variable in self._list_variables():
            old = self._before.get(id(variable))
            variable.assign(ops.where(where, self._initial(variable) if old is None else old, variable))


@contextlib.contextmanager
def keeping_layers(layers: Iterable[keras.Layer]) -> Iterator[tuple[Kept, Kept]]:
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

    kept = Kept(lambda: _states(layers), initial), Kept(lambda: _normalized_kernels(layers), initial)
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
