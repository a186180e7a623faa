"""Describes indices, such as those of an `Embedding`, that Keras rounds because it casts floats to 16 bits.

An `Input` without a dtype is float32, and a layer casts its float32 arguments to its compute dtype. float16 has every
integer only up to 2048, bfloat16 up to 256, and float32 up to 2^24. Integer tensors are not cast.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from kmp.backend import computes_in_16_bits, index_uses, is_keras_class, keras_internals, sublayers
from kmp.utils import DTYPES_16_BIT

_INDEXING = (
    keras.layers.CategoryEncoding,
    keras.layers.Embedding,
    keras.layers.Hashing,
    keras.layers.IntegerLookup,
    keras.layers.Lambda,
)
_ROUNDED = (
    "{places} gets its indices from {source} as {dtype}, which has every integer only up to {limit}: larger indices "
    "select other rows. {remedy}"
)
_OTHER_USES = (
    "It is also used as a float, or in a loop or function that kmp cannot analyze. If it holds only indices, declare "
    "it with dtype='int32'; otherwise pass the indices as a separate input with dtype='int32'."
)
_DECLARE_INPUT = "Declare it with dtype='int32': keras.Input(..., name={name!r}, dtype='int32')."
_ADD_INPUT = "Make keras.Input(..., dtype='int32') the first layer of the Sequential model."
_PASS_INTEGERS = "Pass it as integers, such as x.astype('int32')."
_DECLARE_INNER_INPUT = "Declare each keras.Input that it passes through with dtype='int32'."


def may_use_indices(model: keras.Model) -> bool:
    """Whether a model may round indices: it has custom code, or layers between an input and a layer that indexes."""
    return any(
        not is_keras_class(type(layer)) or (isinstance(layer, _INDEXING) and not _reads_float32_inputs(layer))
        for layer in sublayers(model)
    )


def _reads_float32_inputs(layer: keras.Layer) -> bool:
    """Whether all arguments of a layer are inputs of the model that are not in 16 bits, which Keras does not cast."""
    producers = [
        keras_internals.producer_of(tensor) for call in keras_internals.calls_of(layer) for tensor in call.input_tensors
    ]
    are_inputs = [isinstance(each, keras.layers.InputLayer) and each.dtype not in DTYPES_16_BIT for each in producers]
    return bool(are_inputs) and all(are_inputs)


def rounding_in_step(model: keras.Model, data: Any) -> str:
    """Returns which indices a training step rounds and how to change that; an empty string if it rounds none.

    Args:
        model: The model.
        data: The batch of the step. In a graph, the step must be traced already; in eager execution, the model is
            traced. Nothing is returned for a model that cannot be traced, and for indices used in control flow.
    """
    if not (computes_in_16_bits(model) and may_use_indices(model)):
        return ""
    try:
        return _rounding(model, data)
    except Exception:  # custom code may hold anything, and a hint must not end the training
        return ""


def _rounding(model: keras.Model, data: Any) -> str:
    try:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    except ValueError:  # the batch of a custom `train_step`
        x = data
    names = [keras_internals.producer_of(tensor).name for tensor in keras_internals.graph_tensors(model, "inputs")]
    if isinstance(x, dict) and set(names) <= set(x):  # Keras selects by name
        x = [x[name] for name in names] if not tf.executing_eagerly() else {name: x[name] for name in names}
    if tf.executing_eagerly():
        uses = index_uses.traced_uses(model, x) or []
    else:
        uses = [index_uses.uses_of(tensor) for tensor in keras.tree.flatten(x) if isinstance(tensor, tf.Tensor)]
    return " ".join(describe(model, uses))


def describe(
    model: keras.Model, uses: Sequence[index_uses.InputUses], path_of: Callable[[str], str] = str
) -> list[str]:
    """Returns one description for each input of a model that is rounded before it is used as an index.

    Args:
        model: The model.
        uses: The uses of each of its inputs.
        path_of: Takes the path of a layer below the model, and returns the path to show.
    """
    inputs = keras_internals.graph_tensors(model, "inputs")
    inputs = inputs if len(inputs) == len(uses) else [None] * len(uses)
    return [
        _description(model, tensor, used, places_of(model, used.rounded, path_of))
        for tensor, used in zip(inputs, uses, strict=True)
        if used.rounded
    ]


def places_of(model: keras.Model, uses: Sequence[index_uses.IndexUse], path_of: Callable[[str], str] = str) -> str:
    """Returns the paths of the layers that use an index, with the number of rows that they select from."""
    rows = {path_of(index_uses.layer_path(model, use.operation)) or model.name: use.rows for use in uses}
    return ", ".join(path + (f" ({count} rows)" if count < math.inf else "") for path, count in rows.items())


def _description(model: keras.Model, tensor: keras.KerasTensor | None, used: index_uses.InputUses, places: str) -> str:
    rounded_to = used.rounded[0].rounded_to
    assert rounded_to is not None
    return _ROUNDED.format(
        places=places,
        source="the input" if tensor is None else f"input {keras_internals.producer_of(tensor).name!r}",
        dtype=rounded_to.name,
        limit=rounded_to.max_exact_integer,
        remedy=_remedy(model, tensor, used),
    )


def _remedy(model: keras.Model, tensor: keras.KerasTensor | None, used: index_uses.InputUses) -> str:
    if used.float_operations:
        return _OTHER_USES
    if tensor is None:
        return _PASS_INTEGERS if used.is_float else _DECLARE_INNER_INPUT
    if not keras.backend.is_float_dtype(tensor.dtype):
        return _DECLARE_INNER_INPUT
    if isinstance(model, keras.Sequential):
        return _ADD_INPUT
    return _DECLARE_INPUT.format(name=keras_internals.producer_of(tensor).name)
