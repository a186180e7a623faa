"""A model's layers and the state they hold: what it was before a step, to put back if the step does not count."""

from collections.abc import Iterable

import keras

from kmp.backend.keras_internals import declared_trainable
from kmp.backend.monkeypatch import defining_class, is_keras_class
from kmp.utils import FLOAT32, HALF


def sublayers(layer: keras.Layer) -> Iterable[keras.Layer]:
    """Returns the layer and all layers below it, wrapped and nested ones included."""
    return layer._flatten_layers()  # Keras has no public walk that finds them all


def direct_sublayers(layer: keras.Layer) -> Iterable[keras.Layer]:
    """Returns the layers that a layer holds itself."""
    return layer._flatten_layers(recursive=False, include_self=False)  # as above


def compute_dtypes(layer: keras.Layer) -> set[str]:
    """Returns the dtypes that the layer, and the layers below it, compute in."""
    return {inner.compute_dtype for inner in sublayers(layer) if not is_passthrough(inner)}


def float32_variables(layer: keras.Layer) -> set[int]:
    """Returns the identities of the variables that only layers which compute in float32 have as their own."""
    owned = [
        (inner.compute_dtype, id(variable)) for inner in sublayers(layer) for variable in declared_trainable(inner)
    ]
    wide = {variable for dtype, variable in owned if dtype == FLOAT32.name}
    return wide - {variable for dtype, variable in owned if dtype != FLOAT32.name}


def is_passthrough(layer: keras.Layer) -> bool:
    """Whether a layer computes nothing itself, as inputs and Sequential and functional models do not."""
    if isinstance(layer, keras.layers.InputLayer):
        return True
    return isinstance(layer, keras.Model) and is_keras_class(defining_class(type(layer), "call"))


def computes_in_16_bits(model: keras.Model) -> bool:
    """Whether any part of a model computes in 16 bits."""
    return bool(compute_dtypes(model) & set(HALF))


def rnn_states(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the states that a stateful RNN keeps from batch to batch, which Keras counts to no layer's variables."""
    is_stateful = isinstance(layer, keras.layers.RNN) and layer.stateful and layer.built
    return keras.tree.flatten(layer.states) if is_stateful else []
