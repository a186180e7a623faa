"""Normalization that reads and writes 16 bits and computes in float32, in one kernel outside XLA.

Keras 3.15 casts the inputs to float32, keeps that copy for the backward pass and computes in about
twenty kernels. TensorFlow has one kernel with 16-bit inputs and outputs and float32 statistics,
`FusedBatchNormV3`. It normalizes each channel, so other normalizations make the elements that they
normalize together a channel of their own.

Under XLA, which fuses Keras' operations itself, and in all cases that the kernel does not support,
Keras' code runs. So it does in layers of float32: a run in float32 is what others are compared
with, and computes bit for bit what it does without kmp. Source: Micikevicius et al., "Mixed
Precision Training" (ICLR 2018), section 3.3: read and write float16 tensors, and compute in
float32.
"""

import math
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from kmp.backend import xla
from kmp.backend.thread_overrides import dtype_outside_of_passes
from kmp.utils.float_formats import DTYPES_16_BIT

_DTYPES = ("float16", "bfloat16", "float32")
# With a variance of 1 - epsilon, the kernel divides by exactly 1.
_UNIT_EPSILON = 2.0**-10


class _Channels(NamedTuple):
    """A tensor as the kernel takes it.

    It has rank 4, and the axis of the channels is last (NHWC) or second (NCHW).
    """

    values: tf.Tensor
    data_format: str


class _Normalized(NamedTuple):
    """Outputs of the kernel: normalized values, and float32 statistics of shape `(channels,)`."""

    values: tf.Tensor
    mean: tf.Tensor
    variance: tf.Tensor


def fuse_normalization(layer: keras.Layer) -> None:
    """Makes a normalization layer of Keras use the fused kernel.

    Does nothing for other layers and subclasses. Sets `call` of this layer only.
    """
    call = _FUSED_CALLS.get(type(layer))
    if call:
        vars(layer)["call"] = MethodType(call, layer)  # not tracked by Keras' `__setattr__`


def unfuse_normalization(layer: keras.Layer) -> None:
    """Undoes `fuse_normalization`."""
    if getattr(vars(layer).get("call"), "__func__", None) in _FUSED_CALLS.values():
        del vars(layer)["call"]


def batch_normalization(
    layer: keras.layers.BatchNormalization,
    inputs: Any,
    training: bool | None = None,
    mask: Any = None,
) -> Any:
    """Computes what `keras.layers.BatchNormalization.call` does.

    Updates the same moving statistics.
    """
    channels = _channels(inputs, layer.axis) if _is_supported(layer, inputs) else None
    has_renorm = getattr(layer, "renorm", False)  # Keras has it starting with 3.14
    if channels is None or mask is not None or has_renorm or layer.synchronized:
        return keras.layers.BatchNormalization.call(layer, inputs, training=training, mask=mask)

    shape = layer.moving_mean.shape
    gamma = _float32(layer.gamma) if layer.scale else _filled(1.0, shape[0])
    beta = _float32(layer.beta) if layer.center else _filled(0.0, shape[0])
    mean, variance = _float32(layer.moving_mean), _float32(layer.moving_variance)
    if not (training and layer.trainable):
        normalized = _normalize(channels, gamma, beta, layer.epsilon, mean, variance)
        return tf.cast(_shaped_like(inputs, normalized.values), layer.compute_dtype)

    # The kernel updates the moving statistics too, but with Bessel's correction of the variance,
    # unlike Keras.
    correction = _bessel_correction(inputs, shape[0])
    normalized = _normalize(
        channels,
        gamma,
        beta,
        layer.epsilon,
        mean,
        variance * correction,
        update_factor=1.0 - layer.momentum,
    )
    new_variance = normalized.variance / correction
    layer.moving_mean.assign(_unless_empty(inputs, normalized.mean, mean))
    layer.moving_variance.assign(_unless_empty(inputs, new_variance, variance))
    return tf.cast(_shaped_like(inputs, normalized.values), layer.compute_dtype)


def layer_normalization(layer: keras.layers.LayerNormalization, inputs: Any) -> Any:
    """Computes what `keras.layers.LayerNormalization.call` does, if it normalizes the last axes."""
    width = _trailing_size(inputs, layer.axis)
    if not _is_supported(layer, inputs) or width is None or layer.rms_scaling:
        return keras.layers.LayerNormalization.call(layer, inputs)
    outputs = _normalize_rows(inputs, width, layer.epsilon)
    outputs = _scale_and_shift(
        _Channels(tf.reshape(outputs, [1, -1, 1, width]), "NHWC"), layer.gamma, layer.beta
    )
    return tf.cast(_shaped_like(inputs, outputs), layer.compute_dtype)


def group_normalization(layer: keras.layers.GroupNormalization, inputs: Any) -> Any:
    """Computes what `keras.layers.GroupNormalization.call` does.

    For channels in the last axis or in axis 1.
    """
    channels = _channels(inputs, layer.axis) if _is_supported(layer, inputs) else None
    sizes = inputs.shape[1:]
    if channels is None or None in sizes:
        return keras.layers.GroupNormalization.call(layer, inputs)
    size, groups = math.prod(sizes), layer.groups
    width = size // groups
    if channels.data_format == "NCHW":
        outputs = _normalize_rows(inputs, width, layer.epsilon)
    else:
        # The elements of a group are not adjacent. Two transpositions in 16 bits move less than
        # Keras' float32 does.
        by_group = tf.reshape(inputs, [-1, size // sizes[-1], groups, sizes[-1] // groups])
        rows = _normalize_rows(tf.transpose(by_group, [0, 2, 1, 3]), width, layer.epsilon)
        rows = tf.reshape(rows, [-1, groups, size // sizes[-1], sizes[-1] // groups])
        outputs = tf.transpose(rows, [0, 2, 1, 3])
    by_channel = _Channels(tf.reshape(outputs, tf.shape(channels.values)), channels.data_format)
    outputs = _scale_and_shift(by_channel, layer.gamma, layer.beta)
    return tf.cast(_shaped_like(inputs, outputs), layer.compute_dtype)


def rms_normalization(layer: keras.layers.RMSNormalization, x: Any) -> Any:
    """Computes what `keras.layers.RMSNormalization.call` does, if it normalizes the last axes.

    The kernel subtracts the mean. Joined with its negative, a row has the mean 0, and its mean
    square as the variance.
    """
    width = _trailing_size(x, layer.axis)
    if not _is_supported(layer, x) or width is None:
        return keras.layers.RMSNormalization.call(layer, x)
    rows = tf.reshape(x, [-1, width])
    joined = _normalize_rows(tf.concat([rows, -rows], 1), 2 * width, layer.epsilon)
    # Half of the difference, and not the first half alone: its gradient is symmetric, so nothing
    # cancels in 16 bits.
    first, second = tf.split(tf.reshape(joined, [-1, 2 * width]), 2, 1)
    outputs = tf.reshape((first - second) * 0.5, [1, -1, 1, width])
    return _shaped_like(x, _scale_and_shift(_Channels(outputs, "NHWC"), layer.scale, None))


_FUSED_CALLS: dict[type, Callable[..., Any]] = {
    keras.layers.BatchNormalization: batch_normalization,
    keras.layers.LayerNormalization: layer_normalization,
    keras.layers.GroupNormalization: group_normalization,
    keras.layers.RMSNormalization: rms_normalization,
}


def _is_supported(layer: keras.Layer, inputs: Any) -> bool:
    """Whether the layer is one of 16 bits, outside of XLA, and the kernel takes its inputs.

    A pass of a replay in float32 uses the kernel too: its gradients are compared with those of the
    training, and those of a gradient penalty differ between Keras' code and the kernel.
    """
    if xla.is_tracing() or dtype_outside_of_passes(layer) not in DTYPES_16_BIT:
        return False
    is_dense = isinstance(inputs, tf.Tensor) and inputs.dtype.name in _DTYPES
    return is_dense and inputs.shape.rank is not None and inputs.shape.rank >= 2


def _channels(inputs: tf.Tensor, axis: int) -> _Channels | None:
    """Returns the inputs with the channels in this axis; else `None`.

    The inputs need rank 2 or more, and axis 1 or -1 a known size.
    """
    rank, size = inputs.shape.rank, inputs.shape[axis]
    if size is None:
        return None
    if axis in (-1, rank - 1):
        # The kernel reduces all axes but that of the channels. cuDNN limits the size of the first
        # axis.
        return _Channels(inputs if rank == 4 else tf.reshape(inputs, [1, -1, 1, size]), "NHWC")
    if axis in (1, 1 - rank):
        others = math.prod(inputs.shape[2:]) if None not in inputs.shape[2:] else None
        first = -1 if others is not None else tf.shape(inputs)[0]
        shape = [first, size, -1 if others is None else others, 1]
        return _Channels(inputs if rank == 4 else tf.reshape(inputs, shape), "NCHW")
    return None


def _trailing_size(inputs: Any, axis: int | list[int]) -> int | None:
    """Returns the number of elements in these axes.

    `None` unless they are the last ones and of known size.
    """
    rank = len(inputs.shape)
    axes = sorted(each % rank for each in ([axis] if isinstance(axis, int) else axis))
    sizes = inputs.shape[axes[0] :]
    return math.prod(sizes) if axes == list(range(axes[0], rank)) and None not in sizes else None


def _normalize(
    channels: _Channels,
    scale: tf.Tensor,
    offset: tf.Tensor,
    epsilon: float,
    mean: tf.Tensor | None = None,
    variance: tf.Tensor | None = None,
    update_factor: float | None = None,
) -> _Normalized:
    """Normalizes each channel, then multiplies and adds.

    Uses the given `mean` and `variance` or, with an `update_factor`, those of the values, and
    returns the given ones moved towards these by that factor: by 1 without any given.
    """
    if update_factor == 1.0:
        mean = variance = tf.zeros([0])  # as the kernel requires
    # Not `tf.nn.fused_batch_norm`, which raises an epsilon below 1.001e-5 to that. cuDNN 9 takes
    # any.
    outputs = tf.raw_ops.FusedBatchNormV3(
        x=channels.values,
        scale=scale,
        offset=offset,
        mean=mean,
        variance=variance,
        epsilon=epsilon,
        exponential_avg_factor=1.0 if update_factor is None else update_factor,
        data_format=channels.data_format,
        is_training=update_factor is not None,
    )
    return _Normalized(outputs.y, outputs.batch_mean, outputs.batch_variance)


def _normalize_rows(inputs: tf.Tensor, width: int, epsilon: float) -> tf.Tensor:
    """Normalizes each `width` adjacent elements; returns shape `(1, rows, width, 1)`."""
    rows = tf.reshape(inputs, [1, -1, width, 1])
    ones, zeros = _per_row(rows)
    return _normalize(_Channels(rows, "NCHW"), ones, zeros, epsilon, update_factor=1.0).values


def _per_row(rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns a one and a zero for each row."""
    count = rows.shape[1] if rows.shape[1] is not None else tf.shape(rows)[1]
    return _filled(1.0, count), _filled(0.0, count)


def _filled(value: float, size: Any) -> tf.Tensor:
    """Returns a vector of one value: a constant, which is no kernel, if the size is known."""
    return (
        tf.constant(value, tf.float32, [size]) if isinstance(size, int) else tf.fill([size], value)
    )


def _scale_and_shift(channels: _Channels, scale: Any, offset: Any) -> tf.Tensor:
    """Returns the values times `scale` plus `offset`: one kernel, in float32.

    Both have shape `(channels,)` or are `None`.

    The gradients of both are sums over 16-bit values, in float32 too.
    """
    if scale is None and offset is None:
        return channels.values
    size = channels.values.shape[1 if channels.data_format == "NCHW" else 3]
    scale = _filled(1.0, size) if scale is None else tf.reshape(_float32(scale), [size])
    offset = _filled(0.0, size) if offset is None else tf.reshape(_float32(offset), [size])
    mean, variance = _filled(0.0, size), _filled(1.0 - _UNIT_EPSILON, size)
    return _normalize(channels, scale, offset, _UNIT_EPSILON, mean, variance).values


def _bessel_correction(inputs: tf.Tensor, channels: int) -> Any:
    """Returns n / (n - 1) for the number n of values of each channel.

    It is 1 for a single value, as the kernel has it.
    """
    elements = inputs.shape.num_elements()
    if elements is not None:
        count = elements // channels
        return count / max(count - 1, 1)
    dynamic_count = tf.cast(tf.size(inputs) // channels, tf.float32)
    return dynamic_count / tf.maximum(dynamic_count - 1.0, 1.0)


def _unless_empty(inputs: tf.Tensor, new: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
    """Returns `new`, or `old` where `new` is NaN, as it is without inputs.

    The gradients do not show that a batch is empty.
    """
    if inputs.shape.num_elements():
        return new
    return tf.where(tf.size(inputs) > 0, new, old)


def _float32(variable: Any) -> tf.Tensor:
    return tf.cast(tf.convert_to_tensor(variable), tf.float32)


def _shaped_like(inputs: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    if outputs.shape.rank == inputs.shape.rank == 4:
        shaped = (
            outputs
            if outputs.shape[1:] == inputs.shape[1:]
            else tf.reshape(outputs, tf.shape(inputs))
        )
    else:
        shaped = tf.reshape(outputs, tf.shape(inputs))
    shaped.set_shape(inputs.shape)
    return shaped
