"""Traversal of a model's layers, and properties of layers that depend on their sublayers."""

from collections.abc import Iterable

import keras

from kmp.backend.keras_internals import declared_trainable, graph_tensors, producer_of
from kmp.backend.monkeypatch import defining_class, is_keras_class
from kmp.utils import DTYPES_16_BIT, FLOAT32


def sublayers(layer: keras.Layer) -> Iterable[keras.Layer]:
    """Returns the layer and all its sublayers, wrapped and nested ones included."""
    return layer._flatten_layers()  # no public traversal finds them all


def direct_sublayers(layer: keras.Layer) -> Iterable[keras.Layer]:
    """Returns the sublayers of a layer, without their own sublayers."""
    return layer._flatten_layers(recursive=False, include_self=False)  # as above


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


def float32_variables(layer: keras.Layer) -> set[int]:
    """Returns the `id`s of the trainable variables that only float32 layers use."""
    dtypes_and_ids = [
        (sublayer.compute_dtype, id(variable))
        for sublayer in sublayers(layer)
        for variable in declared_trainable(sublayer)
    ]
    float32_ids = {variable_id for dtype, variable_id in dtypes_and_ids if dtype == FLOAT32.name}
    return float32_ids - {variable_id for dtype, variable_id in dtypes_and_ids if dtype != FLOAT32.name}


def own_dtype_variables(layer: keras.Layer) -> set[int]:
    """Returns the `id`s of the trainable variables with another dtype than the policy of their layer gives."""
    return {
        id(variable)
        for sublayer in sublayers(layer)
        for variable in declared_trainable(sublayer)
        if variable.dtype != sublayer.variable_dtype
    }


def is_passthrough(layer: keras.Layer) -> bool:
    """Whether a layer computes nothing itself: an `InputLayer`, or a Sequential or functional model."""
    if isinstance(layer, keras.layers.InputLayer):
        return True
    return isinstance(layer, keras.Model) and is_keras_class(defining_class(type(layer), "call"))


def computes_in_16_bits(model: keras.Model) -> bool:
    """Whether any layer of a model computes in float16 or bfloat16."""
    return bool(compute_dtypes(model) & set(DTYPES_16_BIT))


def rnn_states(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the states that a stateful RNN keeps between batches. Keras lists them in no layer's variables."""
    is_stateful = isinstance(layer, keras.layers.RNN) and layer.stateful and layer.built
    return keras.tree.flatten(layer.states) if is_stateful else []
