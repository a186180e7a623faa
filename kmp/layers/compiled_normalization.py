"""Normalization of rows, groups and channels, of which XLA compiles each pass.

The functions take 16 bits, compute in float32 and return 16 bits. Only the inputs are kept for the
backward pass, and the statistics of channels. It computes those of rows and groups again: XLA would
need three reads of the inputs in place of one to return them from the forward pass too.

With mean m and standard deviation s of a row, group or channel, n = (x - m) / s and y = gamma n +
beta, the gradients are, with d for that of y and d' = gamma d,

    of x:      (d' - mean(d') - n mean(d' n)) / s
    of gamma:  the sum of d n over rows
    of beta:   the sum of d over rows

Where mean and variance come from one read, the values are taken relative to one of them, because
the square of a large mean would cancel that of the deviations. It is the median of three, on which
the results do not depend: a single outlier would cancel as a large mean does.

Source: Ba et al., "Layer Normalization" (2016), and Wu and He, "Group Normalization" (2018), whose
gradient is that of Ioffe and Szegedy, "Batch Normalization" (2015), section 3.
"""

import functools
from typing import Any, NamedTuple

import tensorflow as tf

from kmp.backend.compiled_parts import compiled, with_gradients, without_tape
from kmp.backend.custom_gradients import custom_gradient
from kmp.backend.distribution import sum_over_replicas
from kmp.backend.xla import fuses_reductions, opaque

# How many rows are summed in the first stage: of one place each, and at most.
_ROWS, _MOST_ROWS = 32, 1024


def normalized_rows(
    rows: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: float, centers: bool
) -> tf.Tensor:
    """Normalizes the last axis, then multiplies and adds.

    XLA compiles three functions: TensorFlow leaves out the gradients of the weights where nothing
    needs them.

    Args:
        rows: 16-bit tensor of shape `(batch, rows, width)`.
        gamma: Float tensor of shape `(width,)`.
        beta: Float tensor of shape `(width,)`.
        epsilon: Added to the variance.
        centers: Whether the mean is subtracted, as in layer normalization; else the variance is the
            mean square, as in RMS normalization.
    """
    options = {"epsilon": epsilon, "centers": centers}
    both = {**options, "in_one_read": not fuses_reductions()}

    def gradients(upstream: tf.Tensor, x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> Any:
        of_inputs = _row_gradient(x, gamma, upstream, **both)
        of_gamma, of_beta = _row_weight_gradients(x, upstream, **options)
        return of_inputs, tf.cast(of_gamma, gamma.dtype), tf.cast(of_beta, beta.dtype)

    normalize = with_gradients(functools.partial(_normalize_rows, **both), gradients)
    return normalize(rows, gamma, beta)


@compiled
def _normalize_rows(
    x: tf.Tensor,
    gamma: tf.Tensor,
    beta: tf.Tensor,
    *,
    epsilon: float,
    centers: bool,
    in_one_read: bool,
) -> tf.Tensor:
    normalized, _ = _exact_rows(x, epsilon, centers, in_one_read)
    return tf.cast(normalized * _float32(gamma) + _float32(beta), x.dtype)


@compiled
def _row_gradient(
    x: tf.Tensor,
    gamma: tf.Tensor,
    upstream: tf.Tensor,
    *,
    epsilon: float,
    centers: bool,
    in_one_read: bool,
) -> tf.Tensor:
    scaled = _float32(upstream) * _float32(gamma)
    if not centers:
        # Both sums are over the inputs, so that XLA computes them in one read.
        exact = _float32(x)
        inverse = tf.math.rsqrt(tf.reduce_mean(tf.square(exact), -1, keepdims=True) + epsilon)
        product = tf.reduce_mean(scaled * exact, -1, keepdims=True)
        return tf.cast(inverse * (scaled - exact * (product * inverse * inverse)), x.dtype)
    normalized, inverse = _exact_rows(x, epsilon, centers, in_one_read)
    along = normalized * tf.reduce_mean(scaled * normalized, -1, keepdims=True)
    mean = tf.reduce_mean(scaled, -1, keepdims=True)
    return tf.cast(inverse * (scaled - mean - along), x.dtype)


@compiled
def _row_weight_gradients(
    x: tf.Tensor, upstream: tf.Tensor, *, epsilon: float, centers: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the gradients of gamma and beta: sums, in float32, over all axes but the last."""
    normalized, _ = _exact_rows(x, epsilon, centers, in_one_read=True)
    exact = _float32(upstream)
    return _sum_of_rows(exact * normalized), _sum_of_rows(exact)


def _exact_rows(
    x: tf.Tensor, epsilon: float, centers: bool, in_one_read: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the normalized rows, and the inverse of their standard deviations.

    Args:
        x: The rows.
        epsilon: Added to the variance.
        centers: Whether the mean is subtracted.
        in_one_read: Whether the statistics are computed in one read of the rows, apart from what
            needs them. Else XLA fuses all of it to one kernel, if it fuses reductions.
    """
    exact = _float32(x)
    if centers and in_one_read:
        last = x.shape[-1] - 1
        exact -= _median(*(exact[..., at : at + 1] for at in (0, last // 2, last)))
    mean = tf.reduce_mean(exact, -1, keepdims=True) if centers else tf.zeros([])
    if not in_one_read:
        exact -= mean
        variance = tf.reduce_mean(tf.square(exact), -1, keepdims=True)
        inverse = tf.math.rsqrt(variance + epsilon)
        return exact * inverse, inverse
    variance = tf.reduce_mean(tf.square(exact), -1, keepdims=True) - tf.square(mean)
    inverse = opaque(tf.math.rsqrt(tf.maximum(variance, 0.0) + epsilon))
    return (exact - opaque(mean)) * inverse, inverse


def _sum_of_rows(values: tf.Tensor) -> tf.Tensor:
    """Returns the sum over the first two axes of three, in two stages.

    In one, XLA has too few blocks of threads if there are few columns, and writes the float32
    values to sum them in another kernel.
    """
    rows = values.shape[1]
    if rows == 1 or rows > _MOST_ROWS:
        joined = _ROWS if rows == 1 else _MOST_ROWS
        values = tf.reshape(values, [-1, values.shape[-1]])
        padded = tf.pad(values, [[0, -tf.shape(values)[0] % joined], [0, 0]])
        values = tf.reshape(padded, [-1, joined, values.shape[-1]])
    return tf.reduce_sum(opaque(tf.reduce_sum(values, 1)), 0)


def _median(one: tf.Tensor, other: tf.Tensor, third: tf.Tensor) -> tf.Tensor:
    """Returns the median of three values, without a gradient."""
    larger = tf.maximum(one, other)
    median = tf.maximum(tf.minimum(one, other), tf.minimum(larger, third))
    return tf.stop_gradient(median)


class GroupAxes(NamedTuple):
    """Which axis of a tensor of groups is which; the first one is the batch.

    Attributes:
        outer: The first axis of the places of an image.
        inner: The second axis of the places.
        channels: The channels of a group.

    Example:
    Images of 8 x 9 places with 6 channels in 2 groups, channels last, have groups of shape
    `(batch, 8, 9, 2, 3)`: `GroupAxes(outer=1, inner=2, channels=4)`, and axis 3 is that of the
    groups. With the channels in axis 1 the shape is `(batch, 2, 3, 1, 72)`:
    `GroupAxes(outer=3, inner=4, channels=2)`.
    """

    outer: int
    inner: int
    channels: int


def normalized_groups(
    groups: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: float, axes: GroupAxes
) -> tf.Tensor:
    """Normalizes each group of channels of an example, then multiplies and adds by channel.

    Args:
        groups: 16-bit tensor of rank 5. The axis that `axes` does not name is that of the groups.
        gamma: Float tensor with the groups and channels, of size 1 on the other axes.
        beta: Float tensor of the same shape.
        epsilon: Added to the variance.
        axes: The axes of the tensor.
    """
    options = {"epsilon": epsilon, "axes": axes}

    def gradients(upstream: tf.Tensor, x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> Any:
        return _group_gradients(x, gamma, beta, upstream, **options)

    normalize = with_gradients(functools.partial(_normalize_groups, **options), gradients)
    return normalize(groups, gamma, beta)


@compiled
def _normalize_groups(
    x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, *, epsilon: float, axes: GroupAxes
) -> tf.Tensor:
    normalized, _ = _exact_groups(x, epsilon, axes)
    return tf.cast(normalized * _float32(gamma) + _float32(beta), x.dtype)


@compiled
def _group_gradients(
    x: tf.Tensor,
    gamma: tf.Tensor,
    beta: tf.Tensor,
    upstream: tf.Tensor,
    *,
    epsilon: float,
    axes: GroupAxes,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    exact, scale = _float32(upstream), _float32(gamma)
    normalized, inverse = _exact_groups(x, epsilon, axes)
    # The sums of each channel of an example, from which XLA computes all three gradients.
    products = opaque(_sum_of_places(exact * normalized, axes))
    sums = opaque(_sum_of_places(exact, axes))
    mean_product = tf.reduce_mean(products * scale, axes.channels, keepdims=True) / _places(x, axes)
    mean = tf.reduce_mean(sums * scale, axes.channels, keepdims=True) / _places(x, axes)
    return (
        tf.cast(inverse * (exact * scale - mean - normalized * mean_product), x.dtype),
        tf.cast(tf.reduce_sum(products, 0, keepdims=True), gamma.dtype),
        tf.cast(tf.reduce_sum(sums, 0, keepdims=True), beta.dtype),
    )


def _exact_groups(x: tf.Tensor, epsilon: float, axes: GroupAxes) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the normalized groups, and the inverse of their standard deviations.

    The statistics come from those of each channel, computed in one read.
    """
    exact, places = _float32(x), _places(x, axes)
    center = _median(*(_place(exact, share, axes) for share in (0.0, 0.5, 1.0)))
    mean = _sum_of_places(exact - center, axes) / places
    variance = _sum_of_places(tf.square(exact - center), axes) / places - tf.square(mean)
    mean += center
    group_mean = tf.reduce_mean(mean, axes.channels, keepdims=True)
    # The variance within the channels, and that of their means.
    variance += tf.square(mean - group_mean)
    group_variance = tf.reduce_mean(variance, axes.channels, keepdims=True)
    inverse = tf.math.rsqrt(tf.maximum(group_variance, 0.0) + epsilon)
    return (exact - opaque(group_mean)) * opaque(inverse), opaque(inverse)


def _sum_of_places(values: tf.Tensor, axes: GroupAxes) -> tf.Tensor:
    """Returns the sums over the places in two stages, as `_sum_of_rows` does."""
    by_outer = opaque(tf.reduce_sum(values, axes.inner, keepdims=True))
    return tf.reduce_sum(by_outer, axes.outer, keepdims=True)


def _place(x: tf.Tensor, share: float, axes: GroupAxes) -> tf.Tensor:
    """Returns the values of one place: the first one for a share of 0, and the last one for 1."""
    for axis in (axes.outer, axes.inner):
        x = tf.gather(x, [int(share * (x.shape[axis] - 1))], axis=axis)
    return x


def _places(x: tf.Tensor, axes: GroupAxes) -> float:
    return float(x.shape[axes.outer] * x.shape[axes.inner])


class NormalizedChannels(NamedTuple):
    """Outputs, and the moving statistics after the step."""

    outputs: tf.Tensor
    moving_mean: tf.Tensor
    moving_variance: tf.Tensor


def normalized_channels(
    x: tf.Tensor,
    gamma: tf.Tensor,
    beta: tf.Tensor,
    moving: tuple[tf.Tensor, tf.Tensor],
    *,
    epsilon: float,
    momentum: float,
    is_last: bool,
    over_replicas: bool,
) -> NormalizedChannels:
    """Normalizes each channel by the statistics of a batch, then multiplies and adds.

    XLA compiles a function for each direction or, for the statistics of several replicas, two: one
    before and one after the sums over replicas.

    Args:
        x: 16-bit tensor of shape `(batch, places, channels)`, or `(batch, channels, places)`.
        gamma: Float32 tensor of shape `(channels,)`.
        beta: Float32 tensor of shape `(channels,)`.
        moving: The moving mean and variance before the step, of the same shape.
        epsilon: Added to the variance.
        momentum: The weight of the moving statistics in the new ones.
        is_last: Whether the channels are last.
        over_replicas: Whether the statistics are those of all replicas.
    """
    options = {"epsilon": epsilon, "momentum": momentum, "is_last": is_last}

    @custom_gradient
    def compute(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> Any:
        own_x, *weights = without_tape([x, gamma, beta])
        if over_replicas:
            # The distances are from a number that all replicas have.
            sums = sum_over_replicas(_compiled_distances(own_x, moving[0], is_last=is_last))
            found = _compiled_normalize(own_x, *weights, *moving, moving[0], *sums, **options)
        else:
            found = _normalize_batch(own_x, *weights, *moving, **options)
        *results, mean, inverse = found

        def gradients(upstream: tf.Tensor, *_: tf.Tensor) -> Any:
            statistics = _statistics_of(x, mean, inverse, is_last, over_replicas)
            tensors = x, upstream, *statistics
            if not over_replicas:
                return _batch_gradients(*tensors, gamma, is_last=is_last)
            own_sums = compiled_channel_products(*tensors, is_last=is_last)
            sums = sum_over_replicas(own_sums)
            of_inputs = _compiled_gradient(*tensors, gamma, *sums, is_last=is_last)
            return of_inputs, own_sums.first, own_sums.second

        return tuple(results), gradients

    return NormalizedChannels(*compute(x, gamma, beta))


def _statistics_of(
    x: tf.Tensor, mean: tf.Tensor, inverse: tf.Tensor, is_last: bool, over_replicas: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns statistics as they are, with the gradients of computing them from the values.

    Only second derivatives need these gradients. For first derivatives, nothing is computed here.
    """

    # What a second derivative needs are arguments: the graph of the backward pass has these, and
    # TensorFlow cannot find the tensors of the forward pass from there.
    @custom_gradient
    def statistics_of(x: tf.Tensor, mean: tf.Tensor, inverse: tf.Tensor) -> Any:
        def gradient(of_mean: tf.Tensor, of_inverse: tf.Tensor) -> Any:
            sums = ChannelSums(of_mean, of_inverse, _count(x, is_last))
            if over_replicas:
                sums = sum_over_replicas(sums)
            slope = _along(-sums.second * inverse**3 / sums.count, is_last)
            offset = _along(sums.first / sums.count, is_last)
            centered = _float32(x) - _along(mean, is_last)
            return tf.cast(offset + slope * centered, x.dtype), None, None

        return (tf.identity(mean), tf.identity(inverse)), gradient

    return statistics_of(x, mean, inverse)


class ChannelSums(NamedTuple):
    """Sums over the values of each channel, of shape `(channels,)`, and the number of values."""

    first: tf.Tensor
    second: tf.Tensor
    count: tf.Tensor


def _distances(x: tf.Tensor, center: tf.Tensor, *, is_last: bool) -> ChannelSums:
    """Returns the sums of the distances from `center` and of their squares."""
    distances = _float32(x) - _along(center, is_last)
    return _sums_of_channels(distances, tf.square(distances), is_last)


def _normalize(
    x: tf.Tensor,
    gamma: tf.Tensor,
    beta: tf.Tensor,
    moving_mean: tf.Tensor,
    moving_variance: tf.Tensor,
    center: tf.Tensor,
    distances: tf.Tensor,
    squares: tf.Tensor,
    count: tf.Tensor,
    *,
    epsilon: float,
    momentum: float,
    is_last: bool,
) -> tuple[tf.Tensor, ...]:
    """Normalizes by what `_distances` returns.

    Returns the outputs, the new moving statistics, the mean, and the inverse of the standard
    deviation.
    """
    not_0 = tf.maximum(count, 1.0)
    distance = distances / not_0
    mean = center + distance
    variance = tf.maximum(squares / not_0 - tf.square(distance), 0.0)
    inverse = tf.math.rsqrt(variance + epsilon)
    factor = _along(inverse * gamma, is_last)
    normalized = (_float32(x) - _along(mean, is_last)) * factor + _along(beta, is_last)
    # A batch without rows changes no statistics.
    momentum = tf.where(count > 0.0, momentum, 1.0)
    return (
        tf.cast(normalized, x.dtype),
        moving_mean * momentum + mean * (1.0 - momentum),
        moving_variance * momentum + variance * (1.0 - momentum),
        mean,
        inverse,
    )


def channel_products(
    x: tf.Tensor, upstream: tf.Tensor, mean: tf.Tensor, inverse: tf.Tensor, *, is_last: bool
) -> ChannelSums:
    """Returns the gradients of gamma and beta, as float32 sums.

    Args:
        x: The values of each channel, as for `normalized_channels`.
        upstream: The gradient of the outputs, of the same shape.
        mean: The mean of each channel.
        inverse: The inverse of the standard deviation of each channel.
        is_last: Whether the channels are last.
    """
    exact = _float32(upstream)
    normalized = (_float32(x) - _along(mean, is_last)) * _along(inverse, is_last)
    return _sums_of_channels(exact * normalized, exact, is_last)


def _input_gradient(
    x: tf.Tensor,
    upstream: tf.Tensor,
    mean: tf.Tensor,
    inverse: tf.Tensor,
    gamma: tf.Tensor,
    products: tf.Tensor,
    upstreams: tf.Tensor,
    count: tf.Tensor,
    *,
    is_last: bool,
) -> tf.Tensor:
    """Returns the gradient of the values, given what `channel_products` returns."""
    not_0 = tf.maximum(count, 1.0)
    # Vectors that share a factor are computed in one kernel.
    factor = inverse * gamma
    slope, offset = factor * inverse * products / not_0, factor * upstreams / not_0
    scaled = _along(factor, is_last) * _float32(upstream) - _along(offset, is_last)
    centered = _float32(x) - _along(mean, is_last)
    return tf.cast(scaled - _along(slope, is_last) * centered, x.dtype)


@compiled
def _normalize_batch(
    x: tf.Tensor,
    gamma: tf.Tensor,
    beta: tf.Tensor,
    moving_mean: tf.Tensor,
    moving_variance: tf.Tensor,
    *,
    epsilon: float,
    momentum: float,
    is_last: bool,
) -> tuple[tf.Tensor, ...]:
    """Normalizes by the statistics of the values, which it reads twice."""
    rows, places = tf.shape(x)[0], tf.shape(x)[1 if is_last else 2]
    center = _median(
        _channels_at(x, 0, 0, is_last),
        _channels_at(x, rows // 2, places // 2, is_last),
        _channels_at(x, rows - 1, places - 1, is_last),
    )
    sums = _distances(x, center, is_last=is_last)
    tensors = x, gamma, beta, moving_mean, moving_variance, center
    return _normalize(*tensors, *sums, epsilon=epsilon, momentum=momentum, is_last=is_last)


@compiled
def _batch_gradients(
    x: tf.Tensor,
    upstream: tf.Tensor,
    mean: tf.Tensor,
    inverse: tf.Tensor,
    gamma: tf.Tensor,
    *,
    is_last: bool,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the gradients of the values, gamma and beta."""
    tensors = x, upstream, mean, inverse
    sums = channel_products(*tensors, is_last=is_last)
    return _input_gradient(*tensors, gamma, *sums, is_last=is_last), sums.first, sums.second


_compiled_distances, _compiled_normalize = compiled(_distances), compiled(_normalize)
compiled_channel_products = compiled(channel_products)
_compiled_gradient = compiled(_input_gradient)


def _channels_at(x: tf.Tensor, row: Any, place: Any, is_last: bool) -> tf.Tensor:
    """Returns the values of the channels at a place of a row: zeros if there are no rows."""
    values = x[row : row + 1]
    values = values[:, place] if is_last else values[:, :, place]
    return tf.reduce_sum(_float32(values), 0)


def _sums_of_channels(first: tf.Tensor, second: tf.Tensor, is_last: bool) -> ChannelSums:
    def sum_of(values: tf.Tensor) -> tf.Tensor:
        if is_last:
            return _sum_of_rows(values)
        return tf.reduce_sum(opaque(tf.reduce_sum(values, 2)), 0)

    return ChannelSums(sum_of(first), sum_of(second), _count(first, is_last))


def _count(x: tf.Tensor, is_last: bool) -> tf.Tensor:
    rows, places = tf.shape(x)[0], tf.shape(x)[1 if is_last else 2]
    return _float32(rows) * _float32(places)


def _along(vector: tf.Tensor, is_last: bool) -> tf.Tensor:
    """Returns the values of the channels in the shape in which they are used with others."""
    return vector if is_last else vector[:, None]


def _float32(values: tf.Tensor) -> tf.Tensor:
    return tf.cast(values, tf.float32)
