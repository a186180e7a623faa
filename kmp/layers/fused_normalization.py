"""Normalization that reads and writes 16 bits and computes in float32, in few kernels outside XLA.

Keras 3.15 casts the inputs to float32, keeps that copy for the backward pass and computes in about
twenty kernels. Where a training step in graph mode runs on a GPU, XLA compiles each pass of a
normalization. Elsewhere, and for given statistics, `BatchNormalization` is TensorFlow's
`FusedBatchNormV3`, one kernel with 16-bit inputs and outputs and float32 statistics. In training it
transposes channels-last tensors inside, so that it moves twice what the compiled functions move.

Under XLA, which fuses Keras' operations itself, and in all cases that these do not support, Keras'
code runs. It also runs in float32 layers: other runs are compared with a run in float32, which
computes bit for bit what it does without kmp. Source: Micikevicius et al., "Mixed Precision
Training" (ICLR 2018), section 3.3: read and write float16 tensors, and compute in float32.
"""

import math
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from kmp.backend import keras_internals, xla
from kmp.backend.compiled_parts import can_compile, with_rounded_rows
from kmp.backend.custom_gradients import custom_gradient
from kmp.layers.compiled_normalization import (
    GroupAxes,
    channel_products,
    compiled_channel_products,
    normalized_channels,
    normalized_groups,
    normalized_rows,
)
from kmp.utils.float_formats import DTYPES_16_BIT

_DTYPES = ("float16", "bfloat16", "float32")


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


def batch_normalization(
    layer: keras.layers.BatchNormalization,
    inputs: Any,
    training: bool | None = None,
    mask: Any = None,
) -> Any:
    """Computes what `keras.layers.BatchNormalization.call` does, and updates its statistics."""
    channels = _channels(inputs, layer.axis) if _is_supported(layer, inputs) else None
    has_renorm = getattr(layer, "renorm", False)  # Keras has it starting with 3.14
    if channels is None or mask is not None or has_renorm:
        return keras.layers.BatchNormalization.call(layer, inputs, training=training, mask=mask)

    shape = layer.moving_mean.shape
    gamma = _float32(layer.gamma) if layer.scale else _filled(1.0, shape[0])
    beta = _float32(layer.beta) if layer.center else _filled(0.0, shape[0])
    mean, variance = _float32(layer.moving_mean), _float32(layer.moving_variance)
    if not (training and layer.trainable):
        moving = _Moving(mean, variance, layer.epsilon)
        outputs = _scaled_by_moving(channels, gamma, beta, moving)
        return tf.cast(_shaped_like(inputs, outputs), layer.compute_dtype)
    replica = tf.distribute.get_replica_context()  # `None` outside of one
    has_other_replicas = replica is not None and replica.num_replicas_in_sync > 1
    over_replicas = layer.synchronized and has_other_replicas
    if _is_compiled(layer, inputs):
        is_last = channels.data_format == "NHWC"
        outputs, new_mean, new_variance = normalized_channels(
            tf.reshape(inputs, _by_place(inputs, is_last)),
            gamma,
            beta,
            (mean, variance),
            epsilon=layer.epsilon,
            momentum=layer.momentum,
            is_last=is_last,
            over_replicas=over_replicas,
        )
    elif over_replicas:  # the kernel uses the statistics of its own replica
        return keras.layers.BatchNormalization.call(layer, inputs, training=training)
    else:
        # The kernel updates the moving statistics too, but with Bessel's correction of the
        # variance, unlike Keras.
        correction = _bessel_correction(inputs, shape[0])
        outputs, new_mean, new_variance = _normalize(
            channels,
            gamma,
            beta,
            layer.epsilon,
            mean,
            variance * correction,
            update_factor=1.0 - layer.momentum,
        )
        new_mean = _unless_empty(inputs, new_mean, mean)
        new_variance = _unless_empty(inputs, new_variance / correction, variance)
    layer.moving_mean.assign(new_mean)
    layer.moving_variance.assign(new_variance)
    return tf.cast(_shaped_like(inputs, outputs), layer.compute_dtype)


def layer_normalization(layer: keras.layers.LayerNormalization, inputs: Any) -> Any:
    """Computes what `keras.layers.LayerNormalization.call` does, if it normalizes the last axes."""
    width = _trailing_size(inputs, layer.axis)
    if width is None or layer.rms_scaling or not _is_compiled(layer, inputs, of_any_size=True):
        return keras.layers.LayerNormalization.call(layer, inputs)
    return _normalize_rows(inputs, width, layer.gamma, layer.beta, layer.epsilon, centers=True)


def rms_normalization(layer: keras.layers.RMSNormalization, x: Any) -> Any:
    """Computes what `keras.layers.RMSNormalization.call` does, if it normalizes the last axes."""
    width = _trailing_size(x, layer.axis)
    if width is None or not _is_compiled(layer, x, of_any_size=True):
        return keras.layers.RMSNormalization.call(layer, x)
    return _normalize_rows(x, width, layer.scale, None, layer.epsilon, centers=False)


def group_normalization(layer: keras.layers.GroupNormalization, inputs: Any) -> Any:
    """Computes what `keras.layers.GroupNormalization.call` does.

    XLA compiles it for channels in the last axis or in axis 1. Keras computes all others.
    """
    rank = len(inputs.shape)
    is_last, is_first = layer.axis in (-1, rank - 1), layer.axis in (1, 1 - rank)
    if not _is_compiled(layer, inputs) or not (is_last or is_first):
        return keras.layers.GroupNormalization.call(layer, inputs)
    channels = inputs.shape[layer.axis]
    by_group = (layer.groups, channels // layer.groups)
    if is_last:
        places = (1, *inputs.shape[1:-1])
        shape = (math.prod(places[:-1]), places[-1], *by_group)
        axes = GroupAxes(1, 2, 4)
        weights_shape = (1, 1, 1, *by_group)
    else:
        shape = (*by_group, 1, math.prod(inputs.shape[2:]))
        axes = GroupAxes(3, 4, 2)
        weights_shape = (1, *by_group, 1, 1)
    gamma = _weights(layer.gamma, 1.0, channels)
    beta = _weights(layer.beta, 0.0, channels)
    outputs = normalized_groups(
        tf.reshape(inputs, (-1, *shape)),
        tf.reshape(gamma, weights_shape),
        tf.reshape(beta, weights_shape),
        layer.epsilon,
        axes,
    )
    return _shaped_like(inputs, outputs)


def spectral_normalization(
    layer: keras.layers.SpectralNormalization, inputs: Any, training: bool = False
) -> Any:
    """Computes what `keras.layers.SpectralNormalization.call` does, and the kernel in float32.

    Keras casts the kernel to 16 bits, normalizes it and writes it back. The wrapped layer casts it
    for its own computation in any case.
    """
    with keras_internals.variables_uncast():
        return keras.layers.SpectralNormalization.call(layer, inputs, training=training)


def _is_supported(layer: keras.Layer, inputs: Any) -> bool:
    """Whether the layer is one of 16 bits, outside of XLA, and the kernel takes its inputs."""
    if xla.is_tracing() or layer.compute_dtype not in DTYPES_16_BIT:
        return False
    is_dense = isinstance(inputs, tf.Tensor) and inputs.dtype.name in _DTYPES
    return is_dense and inputs.shape.rank is not None and inputs.shape.rank >= 2


def _is_compiled(layer: keras.Layer, inputs: Any, of_any_size: bool = False) -> bool:
    """Whether XLA compiles the normalization of these inputs, without the rest of the graph."""
    if not _is_supported(layer, inputs) or 0 in inputs.shape[1:]:
        return False
    return can_compile(inputs, of_any_size)


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


def _by_place(inputs: tf.Tensor, is_last: bool) -> list[Any]:
    """Returns `(rows, places, channels)` or `(rows, channels, places)`, for a reshape of inputs."""
    sizes = inputs.shape[1:-1] if is_last else inputs.shape[2:]
    places = None if None in sizes else math.prod(sizes)
    if is_last:
        return [-1, places or 1, inputs.shape[-1]]
    first = -1 if places else tf.shape(inputs)[0]
    return [first, inputs.shape[1], places or -1]


def _trailing_size(inputs: Any, axis: int | list[int]) -> int | None:
    """Returns the number of elements in these axes.

    Returns `None` if they are not the last ones, or if a size is not known.
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
    # `tf.nn.fused_batch_norm` would raise an epsilon below 1.001e-5 to that. cuDNN 9 takes any.
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


def _normalize_rows(
    inputs: tf.Tensor, width: int, gamma: Any, beta: Any, epsilon: float, centers: bool
) -> tf.Tensor:
    """Normalizes the last axes, which have `width` elements, then multiplies and adds."""
    gamma, beta = _weights(gamma, 1.0, width), _weights(beta, 0.0, width)

    def normalized(rows: tf.Tensor) -> tf.Tensor:
        return normalized_rows(rows, gamma, beta, epsilon, centers)

    if None in inputs.shape[1:]:
        rows = tf.reshape(inputs, [-1, width])
        outputs = with_rounded_rows(lambda padded: normalized(padded[:, None])[:, 0], rows)
    else:
        # The first axis is that of the batch: XLA sums over the others first.
        by_row = [-1, math.prod(inputs.shape[1:]) // width, width]
        outputs = normalized(tf.reshape(inputs, by_row))
    return _shaped_like(inputs, outputs)


def _weights(variable: Any, default: float, size: int) -> tf.Tensor:
    """Returns the values of a variable as a vector, or one of a default without a variable."""
    if variable is None:
        return _filled(default, size)
    return tf.reshape(tf.convert_to_tensor(variable), [size])


def _filled(value: float, size: int) -> tf.Tensor:
    """Returns a vector of one value: a constant, which is no kernel."""
    return tf.constant(value, tf.float32, [size])


class _Moving(NamedTuple):
    """Given statistics of each channel, and what is added to the variance."""

    mean: tf.Tensor
    variance: tf.Tensor
    epsilon: float


def _scaled_by_moving(
    channels: _Channels, scale: tf.Tensor, offset: tf.Tensor, moving: _Moving
) -> tf.Tensor:
    """Normalizes each channel by given statistics: one kernel in each direction.

    The gradient of the inputs is that of the outputs by the same factor, so that no input is kept
    for it. TensorFlow's gradient of the kernel keeps the inputs, also where no weight is trained,
    and fails on a GPU with op determinism.
    """
    data_format = channels.data_format
    is_last = data_format == "NHWC"
    products_of = compiled_channel_products if can_compile(channels.values) else channel_products

    # The statistics are arguments too, where a second derivative finds them.
    @custom_gradient
    def compute(
        values: tf.Tensor,
        scale: tf.Tensor,
        offset: tf.Tensor,
        mean: tf.Tensor,
        variance: tf.Tensor,
    ) -> Any:
        def gradients(upstream: tf.Tensor) -> Any:
            centered = _Moving(tf.zeros_like(mean), variance, moving.epsilon)
            of_values = _scaled_by_moving(
                _Channels(upstream, data_format), scale, tf.zeros_like(offset), centered
            )
            shape = _by_place(values, is_last)
            products = products_of(
                tf.reshape(values, shape),
                tf.reshape(upstream, shape),
                mean,
                tf.math.rsqrt(variance + moving.epsilon),
                is_last=is_last,
            )
            return of_values, products.first, products.second, None, None

        source = _Channels(values, data_format)
        normalized = _normalize(source, scale, offset, moving.epsilon, mean, variance)
        return normalized.values, gradients

    return compute(channels.values, scale, offset, moving.mean, moving.variance)


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
    is_image = outputs.shape.rank == inputs.shape.rank == 4
    has_shape = is_image and outputs.shape[1:] == inputs.shape[1:]
    shaped = outputs if has_shape else tf.reshape(outputs, tf.shape(inputs))
    shaped.set_shape(inputs.shape)
    return shaped
