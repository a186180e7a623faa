"""A model's layers and the state they hold: what it was before a step, to put back if the step does not count."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras import ops


def sublayers(layer: keras.Layer) -> Iterable[keras.Layer]:
    """Returns the layer and all layers below it, wrapped and nested ones included."""
    return layer._flatten_layers()  # Keras has no public walk that finds them all


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
def keeping_layers(layers: Iterable[keras.Layer]) -> Iterator[Kept]:
    """Keeps the float variables that the forward pass of `layers`, which happens inside, may change.

    Those are the weights that are not trained, such as moving statistics, of layers that are not frozen; the states of
    stateful RNNs; and the kernel under a `SpectralNormalization`, which normalizes it in place.
    """
    layers = tuple(layers)
    made: dict[int, tf.Tensor] = {}

    def initial(variable: keras.Variable) -> Any:
        if tf.executing_eagerly():
            return made.get(id(variable.value), variable)
        with tf.init_scope():  # the trace that made it has not run yet
            return ops.copy(variable)

    def note_initial(create: Callable[..., tf.Variable], **arguments: Any) -> tf.Variable:
        variable = create(**arguments)
        made[id(variable)] = tf.identity(variable)
        return variable

    kept = Kept(lambda: _changed_by_forward_pass(layers), initial)
    with tf.variable_creator_scope(note_initial) if tf.executing_eagerly() else contextlib.nullcontext():
        yield kept


def _changed_by_forward_pass(layers: Iterable[keras.Layer]) -> list[keras.Variable]:
    inner = [layer for outer in layers for layer in sublayers(outer)]
    found = {id(v): v for layer in inner for v in layer.non_trainable_weights}
    for layer in inner:
        if not layer.trainable:
            for variable in layer.weights:
                found.pop(id(variable), None)
        elif layer.built:
            found |= {id(variable): variable for variable in _outside_its_weights(layer)}
    return [variable for variable in found.values() if keras.backend.is_float_dtype(variable.dtype)]


def _outside_its_weights(layer: keras.Layer) -> list[keras.Variable]:
    """What a layer of Keras' changes in the forward pass beside its weights that are not trained."""
    if isinstance(layer, keras.layers.SpectralNormalization):
        return [layer.kernel]
    if isinstance(layer, keras.layers.RNN) and layer.stateful:
        return keras.tree.flatten(layer.states)
    return []
