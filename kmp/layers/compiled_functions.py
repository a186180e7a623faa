"""Activations and softmaxes in 16 bits, each one compiled kernel in each direction on a GPU.

In graph mode, TensorFlow computes GELU and its gradient in 17 kernels of 16 bits, rounds after
each, and keeps what they computed for the backward pass. The replacements here take the functions
of Keras themselves, in float32, and round once.

Inf and NaN arrive where they do in Keras' float32 code under XLA. For the gradients of the hard
functions, XLA selects where TensorFlow's kernel multiplies by 0 or 1: the gradient is the exact 0
in place of the NaN of 0 times Inf. The output of hard-swish is Inf or NaN there.
"""

import functools
from collections.abc import Callable
from numbers import Real
from typing import Any

import keras
import tensorflow as tf

from kmp.backend import keras_internals
from kmp.backend.compiled_parts import can_compile, recomputed

_MASKED = -1e9  # as Keras has it in float32


def function_patch(original: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Patches a function of one tensor that is elementwise or reduces one axis."""

    @functools.wraps(original)
    def compute(x: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
        are_plain = all(isinstance(each, int | None) for each in (*args, *kwargs.values()))
        if not can_compile(x) or not are_plain:
            return original(x, *args, **kwargs)
        return recomputed(_applied, x, function=original, args=args, kwargs=tuple(kwargs.items()))

    return compute


def _applied(x: tf.Tensor, function: Callable[..., tf.Tensor], args: Any, kwargs: Any) -> tf.Tensor:
    return function(x, *args, **dict(kwargs))


def softmax_patch(original: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Patches the softmax, whose result remembers the logits for a loss."""
    compute = function_patch(original)

    @functools.wraps(original)
    def softmax(x: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
        return keras_internals.with_logits(compute(x, *args, **kwargs), x)

    return softmax


def attention_patch(original: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Patches the attention of Keras, which computes its weights in float32 tensors."""

    @functools.wraps(original)
    def attention(
        query: tf.Tensor,
        key: tf.Tensor,
        value: tf.Tensor,
        bias: tf.Tensor | None,
        mask: tf.Tensor | None,
        is_causal: bool,
        scale: Any,
    ) -> tf.Tensor:
        # `dot_product_attention` computes a scale that it did not get.
        is_simple = bias is None and isinstance(scale, Real)
        is_compiled = is_simple and all(map(can_compile, (query, key, value)))
        if not is_compiled or not query.dtype == key.dtype == value.dtype:
            return original(query, key, value, bias, mask, is_causal, scale)
        logits = tf.einsum("BTNH,BSNH->BNTS", query, key, optimize="optimal")
        masks = [] if mask is None else [tf.cast(mask, tf.bool)]
        weights = recomputed(
            _attention_weights, logits, *masks, scale=float(scale), is_causal=bool(is_causal)
        )
        return tf.einsum("BNTS,BSNH->BTNH", weights, value, optimize="optimal")

    return attention


def _attention_weights(
    logits: tf.Tensor, *masks: tf.Tensor, scale: float, is_causal: bool
) -> tf.Tensor:
    if is_causal:
        rows = tf.range(tf.shape(logits)[2])[:, None]
        masks = (*masks, tf.range(tf.shape(logits)[3]) <= rows)
    logits *= scale
    for mask in masks:
        logits = tf.where(mask, logits, tf.constant(logits.dtype.min * 0.7, logits.dtype))
    return tf.nn.softmax(logits)


def softmax_layer(layer: keras.layers.Softmax, inputs: Any, mask: Any = None) -> Any:
    """Computes what `keras.layers.Softmax.call` does."""
    axis = layer.axis[0] if isinstance(layer.axis, list | tuple) else layer.axis
    has_one_axis = isinstance(layer.axis, int) or len(layer.axis) == 1
    has_mask = isinstance(mask, tf.Tensor) and mask.shape.rank == inputs.shape.rank
    if not (has_one_axis and has_mask and can_compile(inputs)):
        return keras.layers.Softmax.call(layer, inputs, mask=mask)
    if mask.dtype != tf.bool:
        mask = mask > tf.cast(0.5, mask.dtype)
    return recomputed(_masked_softmax, inputs, mask, axis=axis)


def _masked_softmax(x: tf.Tensor, mask: tf.Tensor, axis: int) -> tf.Tensor:
    outputs = tf.nn.softmax(tf.where(mask, x, _MASKED), axis)
    return tf.where(mask, outputs, 0.0)  # also where all of the axis is masked
