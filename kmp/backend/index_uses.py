"""Finds which operations of a TensorFlow graph use an input as an index, and which use it as a float.

Keras has no such information about custom layers: only the graph shows what their code does with an argument. The names
of the operations are those that Keras and TensorFlow create for `Embedding`, `take`, `one_hot`, `gather` and lookups.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmp.backend import tensorflow_internals
from kmp.backend.layer_traversal import direct_sublayers
from kmp.utils import FORMATS_16_BIT, FloatFormat

# The operations that use one of their inputs as an index, with the position of that input.
_INDICES = {"GatherV2": 1, "ResourceGather": 1, "GatherNd": 1, "OneHot": 0, "DenseBincount": 0}
# Those that make an index of any integer, as in IntegerLookup, Hashing, and `id % buckets`.
_INTEGER_FUNCTIONS = {"LookupTableFindV2": 1, "AsString": 0, "FloorMod": 0, "FloorDiv": 0}
# The elements of the output are elements of the input.
_moves_values = re.compile(
    "BroadcastTo|Cast|ClipByValue|ConcatV2|EnsureShape|ExpandDims|GatherNd|GatherV2|Identity|Maximum|Minimum|MirrorPad|"
    "Pack|Pad|PadV2|PreventGradient|Reshape|ReverseV2|Roll|SelectV2|Slice|Split|SplitV|Squeeze|StopGradient|"
    "StridedSlice|Tile|Transpose|Unpack"
).fullmatch
# The output is the same for an integer and for the float that is equal to it.
_is_exact = re.compile(
    "Equal|Greater|GreaterEqual|Less|LessEqual|NotEqual|OnesLike|Rank|Shape|ShapeN|Size|ZerosLike"
).fullmatch


@dataclass(frozen=True)
class IndexUse:
    """One operation that uses an input as an index.

    Args:
        operation: The operation's name in the graph, such as `"model/tokens_1/embedding_1/GatherV2"`.
        indices: The tensor of indices.
        rows: The number of rows that it selects from; infinity for a function of any integer, 0 if unknown.
        rounded_to: The narrowest 16-bit format that the indices were cast to, if any.
    """

    operation: str
    indices: tf.Tensor
    rows: float
    rounded_to: FloatFormat | None

    @property
    def is_rounded(self) -> bool:
        """Whether the indices were cast to a format that would round some of them."""
        return self.rounded_to is not None and self.exceeds(self.rounded_to)

    def exceeds(self, float_format: FloatFormat) -> bool:
        """Whether a format does not have the indices of all rows."""
        return self.rows - 1 > float_format.max_exact_integer


@dataclass(frozen=True)
class InputUses:
    """What a graph does with one input.

    Args:
        indices: The operations that use it as an index.
        float_operations: The names of the operations that use it as a float, or whose use of it is not known.
        is_float: Whether it is a float itself.
    """

    indices: tuple[IndexUse, ...]
    float_operations: tuple[str, ...]
    is_float: bool

    @property
    def rounded(self) -> tuple[IndexUse, ...]:
        """The uses as an index for which it is rounded."""
        return tuple(use for use in self.indices if use.is_rounded)


@dataclass(frozen=True)
class _Value:
    """A tensor that holds values of the input, and the formats they passed through."""

    tensor: tf.Tensor
    rounded_to: FloatFormat | None = None
    was_integer: bool = False

    def moved_to(self, tensor: tf.Tensor) -> "_Value":
        formats = [self.rounded_to, FORMATS_16_BIT.get(tensor.dtype.name)]
        narrowest = min(filter(None, formats), key=lambda float_format: float_format.fraction_bits, default=None)
        return _Value(tensor, narrowest, self.was_integer or tensor.dtype.is_integer)


def uses_of(tensor: tf.Tensor, outputs: Sequence[tf.Tensor] = ()) -> InputUses:
    """Returns the uses of a tensor in its graph. Does not follow it into control flow and called functions.

    Args:
        tensor: The tensor.
        outputs: Tensors whose floats are used outside the graph.
    """
    indices: dict[str, IndexUse] = {}
    float_operations: dict[str, None] = {}
    pending, seen = [replace(_Value(tensor).moved_to(tensor), was_integer=False)], set()
    while pending:
        value = pending.pop()
        key = (value.tensor.name, value.rounded_to, value.was_integer)
        if key in seen:
            continue
        seen.add(key)
        if not value.was_integer and any(value.tensor is output for output in outputs):
            float_operations[value.tensor.name] = None
        for operation in value.tensor.consumers():
            if _is_index(operation, value.tensor):
                use = IndexUse(operation.name, value.tensor, _rows(operation), value.rounded_to)
                if use.is_rounded or use.operation not in indices:
                    indices[use.operation] = use
            elif _moves_values(operation.type) or value.tensor.dtype.is_integer:
                pending += map(value.moved_to, _outputs_with_values(operation))
            elif not _is_exact(operation.type) and not value.was_integer:
                float_operations[operation.name] = None
    return InputUses(tuple(indices.values()), tuple(float_operations), tensor.dtype.is_floating)


def traced_uses(layer: keras.Layer, inputs: Any) -> list[InputUses] | None:
    """Returns the uses of each input of a built layer or model, in the order of `keras.tree.flatten`.

    Args:
        layer: The layer, which is traced in inference and training mode. Its state does not change.
        inputs: A structure of tensors, arrays or symbolic tensors, of which only shapes and dtypes are used.

    Returns:
        The uses; `None` if the layer cannot be traced.
    """
    try:
        inference, training = (_trace(layer, inputs, mode)[0] for mode in (False, True))
    except Exception:  # custom code may raise anything
        return None
    return [_with_float_uses(*uses) for uses in zip(inference, training, strict=True)]


def index_values(layer: keras.Layer, inputs: Any) -> list[tuple[str, np.ndarray]]:
    """Returns the indices that a built layer or model uses for a batch, with the names of the operations that use them.

    In the order in which the operations were created; empty if the layer cannot be traced. Its state does not change.
    """
    try:
        tensors = keras.tree.map_structure(tf.convert_to_tensor, inputs)
        found, index_function = _trace(layer, tensors, training=False)
        values = index_function(tensors)
    except Exception:  # custom code may raise anything
        return []
    return [(use.operation, value.numpy()) for use, value in zip(_index_uses(found), values, strict=True)]


def layer_path(model: keras.Layer, operation: str) -> str:
    """Returns the path, below the model, of the layer that creates an operation; empty for the model itself.

    Keras opens a name scope named after the layer in `__call__`. TensorFlow appends a number to a repeated one.
    """
    names, layer = [], model
    for scope in operation.split("/")[:-1]:
        children = {child.name: child for child in direct_sublayers(layer)}
        child = children.get(scope.rpartition("_")[0]) or children.get(scope)
        if child is not None:
            layer = child
            names.append(child.name)
    return "/".join(names)


def _trace(layer: keras.Layer, inputs: Any, training: bool) -> tuple[list[InputUses], Any]:
    """Returns the uses of each input, and a concrete function that returns the indices for a batch."""
    found: list[InputUses] = []

    @tf.function(autograph=False)
    def indices_of(inputs: Any) -> list[tf.Tensor]:
        with keras.StatelessScope():  # no updates of variables, no added losses
            outputs = layer(inputs, training=training)
        found[:] = [uses_of(tensor, keras.tree.flatten(outputs)) for tensor in keras.tree.flatten(inputs)]
        return [use.indices for use in _index_uses(found)]

    specs = keras.tree.map_structure(lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype), inputs)
    return found, indices_of.get_concrete_function(specs)


def _with_float_uses(uses: InputUses, others: InputUses) -> InputUses:
    return replace(uses, float_operations=(*uses.float_operations, *others.float_operations))


def _index_uses(found: list[InputUses]) -> list[IndexUse]:
    uses = {use.operation: use for input_uses in found for use in input_uses.indices}
    if not uses:
        return []
    operations = next(iter(uses.values())).indices.graph.get_operations()
    return [uses[operation.name] for operation in operations if operation.name in uses]


def _outputs_with_values(operation: tf.Operation) -> Iterator[tf.Tensor]:
    """Yields the outputs that hold values of an input: those of an integer operation that are integers themselves."""
    if _is_exact(operation.type):
        return
    for output in operation.outputs:
        if output.dtype.is_integer or (_moves_values(operation.type) and output.dtype.is_floating):
            yield output


def _is_index(operation: tf.Operation, tensor: tf.Tensor) -> bool:
    position = _INDICES.get(operation.type)
    if operation.type in _INTEGER_FUNCTIONS and tensor.dtype.is_integer:
        position = _INTEGER_FUNCTIONS[operation.type]
    return position is not None and operation.inputs[position].name == tensor.name


def _rows(operation: tf.Operation) -> float:
    if operation.type in _INTEGER_FUNCTIONS:
        return math.inf
    handle_shapes = tensorflow_internals.shapes_held_by(operation.inputs[0])
    table, argument = next(iter(handle_shapes), operation.inputs[0].shape), operation.inputs[1]
    if operation.type in ("OneHot", "DenseBincount"):
        return _static_value(argument)
    if operation.type == "ResourceGather" and table.rank:
        return table[0] or 0
    if operation.type == "GatherV2" and table.rank:
        return table[_static_value(operation.inputs[2])] or 0
    if operation.type == "GatherNd" and table.rank and argument.shape.rank:
        return max((size or 0 for size in table[: argument.shape[-1]]), default=0)
    return 0


def _static_value(tensor: tf.Tensor) -> int:
    """Returns an integer constant, or the one that bounds a scalar; 0 if there is none."""
    bounds = tensor.op.inputs if tensor.op.type in ("Minimum", "Maximum") else ()
    constants = [tf.get_static_value(candidate) for candidate in (tensor, *bounds)]
    return next((int(value) for value in constants if value is not None and value.ndim == 0), 0)
