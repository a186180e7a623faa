"""Which layers and operations need float32 in place of a 16-bit policy, why, and by which source.

`kmp.layers.float32_rules` has the layers that need it, and `operation_rules` the operations of
`keras.ops`. Here are the layers that gain from 16 bits, and the rules that need the graph or the
attributes of a built model. `plan.make_plan` applies them.

The rules follow what Keras' code computes. Layers that compute critical steps in float32
themselves, such as `BatchNormalization`, may run in 16 bits.
"""

import inspect
import math
from collections.abc import Iterator

import keras

from kmp.backend import keras_internals
from kmp.backend.keras_internals import is_keras_class, is_passthrough, sublayers
from kmp.conversion.op_rule import (
    FOLLOWS_INPUTS,
    NEEDS_FLOAT32,
    RUNS_IN_16_BITS,
    OpRule,
    rules_of_constants,
)
from kmp.conversion.operation_rules import PRODUCT, rules_of_operation
from kmp.conversion.value_bounds import product_may_overflow
from kmp.enabling import exact_indices
from kmp.layers.float32_rules import Moment, float32_rule
from kmp.utils.float_formats import FLOAT16

_KERAS = "Keras' source"
NOT_EXAMINED = "a custom layer: kmp does not examine its `call`"


# The classes of layers that run in 16 bits, each with its rule.
_IN_16_BITS = (
    (
        "BatchNormalization LayerNormalization GroupNormalization RMSNormalization",
        OpRule(RUNS_IN_16_BITS, "Keras computes the statistics in float32", _KERAS),
    ),
    (
        "SpectralNormalization",
        OpRule(RUNS_IN_16_BITS, "kmp normalizes the kernel in float32", "kmp.layers"),
    ),
    (
        "Attention AdditiveAttention MultiHeadAttention GroupQueryAttention",
        OpRule(
            RUNS_IN_16_BITS,
            "without dropout, if Keras uses ops.dot_product_attention, its softmax runs in float32;"
            " otherwise in 16 bits, with float32 accumulation on GPUs",
            "Keras' source, TensorFlow's softmax_op_gpu.cu.cc",
        ),
    ),
    (
        "Dense EinsumDense Dot Embedding RNN SimpleRNNCell LSTMCell GRUCell Conv1D Conv2D Conv3D"
        " Conv1DTranspose Conv2DTranspose Conv3DTranspose DepthwiseConv1D DepthwiseConv2D"
        " SeparableConv1D SeparableConv2D",
        OpRule(
            RUNS_IN_16_BITS,
            "",
            "torch.amp's op reference, TensorFlow's auto_mixed_precision_lists.h",
        ),
    ),
)


def rule_for(operation: keras.Operation, policy: str = "mixed_float16") -> OpRule:
    """Returns the rule for a layer or operation that would have a 16-bit policy."""
    dtype_policy = keras.DTypePolicy(policy)
    if isinstance(operation, keras.Layer):
        return next(_rules_of_layer(operation, dtype_policy))
    return next(rules_of_operation(operation, dtype_policy.compute_dtype))


def _rules_of_layer(layer: keras.Layer, policy: keras.DTypePolicy) -> Iterator[OpRule]:
    """Yields the rules that match a layer; the first applies."""
    dtype = policy.compute_dtype
    needed = float32_rule(layer, policy, Moment.CONVERSION)
    if needed:
        yield OpRule(NEEDS_FLOAT32, needed.reason(dtype), needed.source)
    epsilon = getattr(layer, "epsilon", None)
    if isinstance(epsilon, float) and not is_keras_class(type(layer)):
        yield from rules_of_constants([epsilon], dtype)
    yield from _rules_of_float_indices(layer, dtype)
    if isinstance(layer, keras.layers.Multiply) and dtype == FLOAT16.name:
        calls = keras_internals.calls_of(layer)
        if any(product_may_overflow(call.input_tensors) for call in calls):
            yield OpRule(NEEDS_FLOAT32, PRODUCT, "IEEE 754 binary16")
    for classes, rule in _IN_16_BITS:
        if isinstance(layer, tuple(getattr(keras.layers, name) for name in classes.split())):
            yield rule
    yield _rule_of_other_layer(layer)


def _rule_of_other_layer(layer: keras.Layer) -> OpRule:
    if not keras.backend.is_float_dtype(layer.compute_dtype):  # a look-up of strings
        return OpRule(FOLLOWS_INPUTS)
    category = RUNS_IN_16_BITS if layer.weights else FOLLOWS_INPUTS
    # The `call` of a model that only calls layers in a graph is that of Keras.
    module = str(getattr(inspect.unwrap(type(layer).call), "__module__", ""))
    if module.startswith(("keras.", "kmp.")):
        return OpRule(category)
    return OpRule(category, NOT_EXAMINED, "kmp")


def _rules_of_float_indices(layer: keras.Layer, dtype: str) -> Iterator[OpRule]:
    """Yields a rule for each `Input` of floats that may have the indices of a look-up in a layer.

    The layer would round them. Look-up layers themselves and functional models do not cast their
    arguments to their compute dtype.
    """
    rows = max(map(exact_indices.rows_of, sublayers(layer)))
    casts_no_arguments = exact_indices.rows_of(layer) or is_passthrough(layer)
    if casts_no_arguments or not exact_indices.rounds_indices(rows, dtype):
        return
    looked_up = f"{rows} rows" if rows < math.inf else "any integer"
    for call in keras_internals.calls_of(layer):
        for tensor in call.input_tensors:
            source = keras_internals.producer_of(tensor)
            is_input = isinstance(source, keras.layers.InputLayer)
            if is_input and keras.backend.is_float_dtype(tensor.dtype):
                reason = (
                    f"it looks up {looked_up} and gets input {source.name!r} as floats: declare"
                    f" keras.Input(..., name={source.name!r}, dtype='int32') if it holds the"
                    " indices"
                )
                yield OpRule(NEEDS_FLOAT32, reason, _KERAS)
