"""Traversal of a model's layers, and what depends on it.

Keras 3.15 has no public name for it: `model.layers` lacks layers inside wrappers, custom layers and lists.
"""

from collections.abc import Iterable

import keras

from kmp.backend.keras_internals import defining_class, graph_tensors, is_keras_class, producer_of


def sublayers(layer: keras.Layer) -> Iterable[keras.Layer]:
    """Returns the layer and all its sublayers, wrapped and nested ones included."""
    return layer._flatten_layers()


def direct_sublayers(layer: keras.Layer) -> Iterable[keras.Layer]:
    """Returns the sublayers of a layer, without their own sublayers."""
    return layer._flatten_layers(recursive=False, include_self=False)


def layers_by_path(model: keras.Model) -> dict[str, keras.Layer]:
    """Returns the layers of a model that a program creates, by path, with nested models and their layers.

    The parts of Keras' own layers are left out, such as the cell of an RNN.
    """
    found: dict[str, keras.Layer] = {}
    for layer in direct_sublayers(model):
        if not isinstance(layer, keras.layers.InputLayer):
            found[layer.path or layer.name] = layer
            if isinstance(layer, keras.Model) or not is_keras_class(type(layer)):
                found |= layers_by_path(layer)
    return found


def output_layers(model: keras.Model) -> list[keras.Layer]:
    """Returns the layers that produce a model's outputs, in order; the last layer of a subclassed model."""
    producers = [producer_of(tensor) for tensor in graph_tensors(model, "outputs")] or model.layers[-1:]
    return [producer for producer in producers if isinstance(producer, keras.Layer)]


def compute_dtypes(layer: keras.Layer) -> set[str]:
    """Returns the float dtypes that a layer and its sublayers compute in, without those of lookups, such as string."""
    dtypes = {sublayer.compute_dtype for sublayer in sublayers(layer) if not is_passthrough(sublayer)}
    return set(filter(keras.backend.is_float_dtype, dtypes))


def is_passthrough(layer: keras.Layer) -> bool:
    """Whether a layer computes nothing itself: an `InputLayer`, or a Sequential or functional model."""
    if isinstance(layer, keras.layers.InputLayer):
        return True
    return isinstance(layer, keras.Model) and is_keras_class(defining_class(type(layer), "call"))


def rnn_states(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the states that a stateful RNN keeps between batches. Keras lists them in no layer's variables."""
    is_stateful = isinstance(layer, keras.layers.RNN) and layer.stateful and layer.built
    return keras.tree.flatten(layer.states) if is_stateful else []
