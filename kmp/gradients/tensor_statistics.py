"""Statistics of gradients as pure tensor operations; they run eagerly, in `tf.function` and under XLA."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from keras import ops

from kmp.backend import tensorflow_internals, xla
from kmp.gradients.tensor_packing import Group, in_batches, in_order, joined, pack_tensors
from kmp.records import BIN_COUNT, INF_BIN, NAN_BIN, ZERO_BIN
from kmp.utils import FLOAT16, FLOAT32

# Outside XLA only operations that TensorFlow has on a GPU: int32 it adds, compares, joins, reduces and even reshapes on
# the host (segments it does add up). So bins are laid out as uint32, and counts are int64.
_MAGNITUDE = 0x7FFFFFFF
_BIASED_EXPONENTS = 2**FLOAT32.exponent_bits
_BIAS = FLOAT32.max_exponent  # the biased exponent of 1.0
_SUBNORMAL_EXPONENTS = FLOAT32.fraction_bits
_INF = 0x7F800000
_BINS = 512  # the next power of two above BIN_COUNT
# Elements of gradients, and of pairs of weights, that are measured at a time: that takes several times their memory.
# The fewer, the longer it takes to trace; pairs are measured eagerly.
_AT_ONCE, _PAIRS_AT_ONCE = 2**24, 2**22
# What the bins of a small gradient count for: on a GPU each of some hundred blocks of threads has all bins for itself.
_HISTOGRAM = 2**15
_EXACT_IN_FLOAT32 = 2 ** (FLOAT32.fraction_bits + 1)

Prepare = Callable[[Sequence[tf.Tensor], Sequence[int]], Sequence[tf.Tensor]]


class GradientStatistics(NamedTuple):
    """What is measured of each gradient; a row or entry for each variable.

    Args:
        counts: int64 of shape `(variables, 280)`: elements by exponent, as in `kmp.records.ExponentHistogram`.
        amax: float32 of shape `(variables,)`, the largest magnitude; nan if there is one, 0 for no elements. One
            that is subnormal in float32 may be told as 0.
        square_sum: float64 of shape `(variables,)`, the sum of the squares of all elements; one that is subnormal in
            float32 may count as 0.
    """

    counts: tf.Tensor
    amax: tf.Tensor
    square_sum: tf.Tensor


class UpdateStatistics(NamedTuple):
    """What is measured of each variable's update; float64 of shape `(variables,)`.

    Args:
        weight_square_sum: Sum of the squares of the variable before the update.
        update_square_sum: Sum of the squares of what was added.
        changed: Elements that changed.
        lost: Elements that changed by less than 2^-11 of their magnitude: most float16 weights would not have moved.
    """

    weight_square_sum: tf.Tensor
    update_square_sum: tf.Tensor
    changed: tf.Tensor
    lost: tf.Tensor


def values_of(gradient: Any) -> tf.Tensor:
    """Returns the values of a gradient, dense or `tf.IndexedSlices`."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else ops.convert_to_tensor(gradient)


def with_values(gradient: Any, values: tf.Tensor) -> Any:
    """Returns a gradient like one, dense or `tf.IndexedSlices`, with other values."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values


def nonfinite(tensor: Any) -> tf.Tensor:
    """Returns 1.0 if any element is inf or nan, else 0.0: a scalar float32, so that flags add up across replicas.

    Args:
        tensor: A gradient or loss, of any shape and float dtype.
    """
    return 1.0 - ops.cast(ops.all(ops.isfinite(values_of(tensor))), "float32")


def of_gradients(gradients: Sequence[Any], prepare: Prepare | None = None) -> GradientStatistics:
    """Counts the elements of each gradient by binary exponent, and measures its size.

    The counts are exact: they are of the bits, because TensorFlow compares float32 subnormals as zero.

    Args:
        gradients: At least one; tensors or `tf.IndexedSlices` of any float dtype, converted to float32, where float64
            below its normal range becomes zero; `None` has no elements. Each has fewer than 2^31 elements.
        prepare: Takes the values of some of them and their places, and returns what is measured in their stead.
    """
    tensors = [tf.zeros([0]) if gradient is None else values_of(gradient) for gradient in gradients]

    def measure(some: Sequence[tf.Tensor], places: Sequence[int]) -> tuple[tf.Tensor, ...]:
        return _of_tensors(prepare(some, places) if prepare else some)

    places = range(len(tensors))
    return GradientStatistics(*in_batches(measure, tensors, places, at_most=_AT_ONCE, at_least=_HISTOGRAM))


def _of_tensors(tensors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
    groups = pack_tensors(tensors)
    counts = (_count_at_once if xla.is_tracing() else _count_in_turn)(groups)
    amax, square_sum = joined((_amax(group), _square_sum(group)) for group in groups)
    amax = tf.where(counts[:, INF_BIN] > 0, math.inf, amax)
    amax = tf.where(counts[:, NAN_BIN] > 0, math.nan, amax)
    return tuple(in_order(rows, groups) for rows in (counts, amax, square_sum))


def of_updates(before: Sequence[Any], after: Sequence[Any]) -> UpdateStatistics:
    """Measures what an optimizer's step did to each variable.

    Args:
        before: At least one tensor: a copy of each variable, of any shape and float dtype; converted to float32, so
            that a change of less than float32 tells, or than its smallest normal number, is none.
        after: The same after the step.
    """
    return UpdateStatistics(*in_batches(_of_pairs, before, after, at_most=_PAIRS_AT_ONCE))


def _of_pairs(before: Sequence[Any], after: Sequence[Any]) -> tuple[tf.Tensor, ...]:
    old_groups, new_groups = pack_tensors(before), pack_tensors(after)
    pairs = zip(old_groups, new_groups, strict=True)
    found = joined(_measure_update(old, new.values) for old, new in pairs)
    return tuple(in_order(value, old_groups) for value in found)


def _count_at_once(groups: list[Group]) -> tf.Tensor:
    """Returns the counts from one histogram: XLA works out every element's bin in the loop that counts."""
    return tf.concat([_histograms(_bins(group), _BINS, group)[:, :BIN_COUNT] for group in groups], 0)


def _bins(group: Group) -> tf.Tensor:
    magnitude = _magnitude(group)
    exponent = tf.bitwise.right_shift(magnitude, FLOAT32.fraction_bits)
    subnormal = tf.maximum(_exponent_of_integer(magnitude) - _BIAS + 1, ZERO_BIN)
    beyond = tf.where(tf.equal(magnitude, _INF), INF_BIN, NAN_BIN)
    bins = tf.where(tf.equal(exponent, 0), subnormal, exponent + _SUBNORMAL_EXPONENTS)
    return tf.where(magnitude < _INF, bins, beyond)


def _count_in_turn(groups: list[Group]) -> tf.Tensor:
    """Returns the counts from a histogram of the exponents' bits, and of what is rare only where there is some of it.

    Each operation goes over the memory once more, so those that all elements need are as few as can be.
    """
    by_exponent = tf.concat(list(map(_count_exponents, groups)), 0)
    lowest, highest = by_exponent[:, 0], by_exponent[:, -1]
    nothing = tf.zeros_like(lowest)
    zeros = tf.cond(tf.reduce_any(lowest > 0), lambda: tf.concat(list(map(_count_zeros, groups)), 0), lambda: nothing)
    subnormal, inf = tf.cond(
        tf.reduce_any((lowest != zeros) | (highest > 0)),
        lambda: joined(map(_count_rare, groups)),
        lambda: (tf.zeros([lowest.shape[0], _SUBNORMAL_EXPONENTS], tf.int64), nothing),
    )
    return tf.concat((zeros[:, None], subnormal, by_exponent[:, 1:-1], inf[:, None], (highest - inf)[:, None]), 1)


def _count_exponents(group: Group) -> tf.Tensor:
    """Returns counts by biased exponent: 0 for zeros and subnormals, 255 for inf and nan."""
    unsigned = tf.bitcast(group.values, tf.uint32)
    signed_exponent = tf.bitwise.right_shift(unsigned, tf.constant(FLOAT32.fraction_bits, tf.uint32))
    counts = _histograms(tf.bitcast(signed_exponent, tf.int32), 2 * _BIASED_EXPONENTS, group)
    return counts[:, :_BIASED_EXPONENTS] + counts[:, _BIASED_EXPONENTS:]


def _count_zeros(group: Group) -> tf.Tensor:
    return group.sizes - _how_many(tf.cast(_magnitude(group), tf.bool), group)


def _count_rare(group: Group) -> tuple[tf.Tensor, tf.Tensor]:
    """Counts subnormals by exponent, and infs."""
    counts = _histograms(_exponent_of_integer(_magnitude(group)), _BIASED_EXPONENTS, group)
    return counts[:, _BIAS : _BIAS + _SUBNORMAL_EXPONENTS], _how_many(tf.math.is_inf(group.values), group)


def _magnitude(group: Group) -> tf.Tensor:
    return tf.bitwise.bitwise_and(tf.bitcast(group.values, tf.int32), _MAGNITUDE)


def _exponent_of_integer(magnitude: tf.Tensor) -> tf.Tensor:
    """Returns the biased exponent of a magnitude's bits read as an integer and converted to float32; 0 for 0.

    A subnormal is that integer times 2^-149, and below 2^24 the conversion is exact. So subnormals have `_BIAS` to
    `_BIAS` + 22, and normal numbers more.
    """
    return tf.bitwise.right_shift(tf.bitcast(tf.cast(magnitude, tf.float32), tf.int32), FLOAT32.fraction_bits)


def _measure_update(old: Group, new: tf.Tensor) -> tuple[tf.Tensor, ...]:
    unchanged = tf.equal(new, old.values) | (tf.math.is_nan(new) & tf.math.is_nan(old.values))  # inf - inf is nan
    update = dataclasses.replace(old, values=tf.where(unchanged, 0.0, new - old.values))
    changed = tf.not_equal(update.values, 0.0)
    small = tf.abs(update.values) < 2.0 ** -(FLOAT16.fraction_bits + 1) * tf.abs(old.values)
    counts = (tf.cast(_how_many(mask, old), tf.float64) for mask in (changed, tf.logical_and(changed, small)))
    return _square_sum(old), _square_sum(update), *counts


def _histograms(bins: tf.Tensor, size: int, group: Group) -> tf.Tensor:
    """Returns int64 counts of shape `(members, size)`; `size` is a power of two, and +0.0 is in bin 0."""
    if group.rows:
        owned = tf.bitcast(tf.bitwise.bitwise_or(group.owners[:, None] * size, bins), tf.uint32)
        bins = tf.bitcast(tf.reshape(owned, [-1]), tf.int32)
    of_all = size * len(group.members)
    if (
        tensorflow_internals.is_deterministic()
    ):  # a GPU's DenseBincount refuses then, though whole numbers add up alike in every order
        counts = tf.math.unsorted_segment_sum(tf.ones_like(bins), bins, of_all)
    else:
        weights = tf.zeros([0], tf.int32)
        # tf.math.bincount works out its size on the device, which XLA refuses.
        counts = tf.raw_ops.DenseBincount(input=bins, size=of_all, weights=weights, binary_output=False)
    counts = tf.reshape(tf.cast(counts, tf.int64), [-1, size])
    if group.rows:
        counts -= tf.one_hot([0], size, dtype=tf.int64) * np.array(group.padding, np.int64)[:, None]
    return counts


def _how_many(mask: tf.Tensor, group: Group) -> tf.Tensor:
    """Returns int64 of shape `(members,)`."""
    if group.rows:
        return tf.cast(group.total(tf.cast(tf.reduce_sum(tf.cast(mask, tf.float32), 1), tf.int32)), tf.int64)
    elements = mask.shape[0]
    is_exact = elements is not None and elements <= _EXACT_IN_FLOAT32
    # Half the bytes of int64, where float32 counts exactly.
    count = tf.reduce_sum(tf.cast(mask, tf.float32 if is_exact else tf.int64), keepdims=True)
    return tf.cast(count, tf.int64)


def _amax(group: Group) -> tf.Tensor:
    """Returns float32 of shape `(members,)`; 0 for no elements."""
    axis = 1 if group.rows else None
    highest = tf.reduce_max(group.values, axis, keepdims=not group.rows)
    amax = tf.maximum(highest, -tf.reduce_min(group.values, axis, keepdims=not group.rows))
    if group.rows:
        amax = tf.math.unsorted_segment_max(amax, group.owners, len(group.members))
    return tf.maximum(amax, 0.0)


def _square_sum(group: Group) -> tf.Tensor:
    """Returns float64 of shape `(members,)`: the square of a float32 may lie outside float32's range."""
    values = tf.cast(group.values, tf.float64)
    if group.rows:
        return group.total(tf.reduce_sum(tf.square(values), 1))
    return tf.reshape(2.0 * tf.nn.l2_loss(values), [1])
