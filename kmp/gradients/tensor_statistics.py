"""Statistics of gradients and updates as pure tensor operations.

They run eagerly, in `tf.function` and under XLA.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from keras import ops

from kmp.backend import tensorflow_internals, xla
from kmp.gradients.tensor_groups import (
    Gradients,
    TensorGroup,
    Variables,
    group_indices,
    in_order,
    join,
    values_of,
)
from kmp.records import BIN_COUNT, GradientSample
from kmp.records.exponent_histogram import INF_BIN, NAN_BIN, ZERO_BIN
from kmp.utils.float_formats import FLOAT16, FLOAT32

# Outside XLA, only operations with a TensorFlow GPU kernel are used: on int32, addition,
# comparison, concatenation, reduction and even reshaping run on the host, and `tf.split` on int64.
# So bins are reshaped as uint32, and counts are int64.
_MAGNITUDE = 0x7FFFFFFF
_BIASED_EXPONENTS = 2**FLOAT32.exponent_bits
_BIAS = FLOAT32.max_exponent  # the biased exponent of 1.0
_SUBNORMAL_EXPONENTS = FLOAT32.fraction_bits
# In a group: measuring takes several times their memory, and smaller groups take longer to trace.
_MAX_ELEMENTS = 2**24
_MAX_IN_ONE_PASS = 2**18  # in a group outside of XLA
_MAX_PAIRS = 2**22  # the same for weights before and after a step


class GradientStatistics(NamedTuple):
    """Statistics of gradients, with one row or entry per variable.

    Args:
        counts: int64 of shape `(variables, 280)`: elements by exponent, as in
            `kmp.records.ExponentHistogram`.
        amax: float32 of shape `(variables,)`: the largest magnitude, NaN if any element is NaN, 0
            without elements. A float32 subnormal may be reported as 0.
        square_sum: float64 of shape `(variables,)`: the sum of squares of all elements. Float32
            subnormals may count as 0.
    """

    counts: Any
    amax: Any
    square_sum: Any


class UpdateStatistics(NamedTuple):
    """How an optimizer step changed each variable: columns of `kmp.records.GradientSample`.

    Args:
        weight_norm: float64 of shape `(variables,)`: the norm of the weights before the step.
        update_norm: float64 of shape `(variables,)`: the norm of the change.
        updates: int64 of shape `(variables,)`: the number of weights that changed.
        lost_updates: int64 of shape `(variables,)`: the number of those that would not have
            changed in float16.
    """

    weight_norm: tf.Tensor
    update_norm: tf.Tensor
    updates: tf.Tensor
    lost_updates: tf.Tensor


def gradient_statistics(gradients: Gradients) -> GradientStatistics:
    """Counts the elements of each gradient by binary exponent and measures its magnitude.

    The counts are exact: they are computed from the bits, because TensorFlow treats float32
    subnormals as zero in comparisons.

    Args:
        gradients: At least one gradient, each with fewer than 2^31 elements: a tensor or
            `tf.IndexedSlices` of any float dtype, or `None`, which has no elements. All are
            converted to float32; float64 values below its normal range become zero.
    """
    tensors = [tf.zeros([0]) if gradient is None else values_of(gradient) for gradient in gradients]
    return GradientStatistics(*_measure_in_groups(_measure_gradients, [tensors], _MAX_ELEMENTS))


def merged_sample(
    step: int, loss_scale: float, names: tuple[str, ...], replicas: Sequence[GradientStatistics]
) -> GradientSample:
    """Returns the sample of what each replica has measured."""
    counts, amax, square_sum = map(np.stack, zip(*replicas, strict=True))
    return GradientSample(
        step,
        loss_scale,
        names,
        counts.sum(axis=0, dtype=np.int64),
        amax=amax.max(axis=0).astype(np.float64),
        norm=np.sqrt(square_sum.sum(axis=0)) / loss_scale,
    )


def update_statistics(before: Variables, after: Variables) -> UpdateStatistics:
    """Measures how an optimizer step changed each variable.

    Args:
        before: At least one tensor: a copy of each variable before the step, of any shape and float
            dtype. All are converted to float32, so changes below its precision or its smallest
            normal number are not counted.
        after: The same variables after the step.
    """
    old = [ops.convert_to_tensor(weights) for weights in before]
    new = [ops.convert_to_tensor(weights) for weights in after]
    return UpdateStatistics(*_measure_in_groups(_measure_updates, [old, new], _MAX_PAIRS))


def _measure_in_groups(
    measure: Callable[..., tuple[tf.Tensor, ...]],
    lists: Sequence[Sequence[tf.Tensor]],
    max_elements: int,
) -> list[tf.Tensor]:
    """Measures tensors group by group.

    Each group waits for the previous one, which bounds the memory use. Without groups, the updates
    of 400 small variables take ten times as long (November 2026).

    Args:
        measure: A function that takes a `TensorGroup` of each list. It returns tensors with one row
            per tensor; the first of them has no negative values.
        lists: Lists of tensors, at least one tensor each. Tensors with the same index have the same
            shape.
        max_elements: Maximum number of elements in a group of several tensors.
    """
    groups = group_indices(lists[0], min(max_elements, 2**22), max_elements)
    results: list[tuple[tf.Tensor, ...]] = []
    for indices in groups:
        previous = results[-1] if results else ()
        with tf.control_dependencies(previous):
            parts = [[tensors[index] for index in indices] for tensors in lists]
            if previous and xla.is_tracing():
                # XLA drops control dependencies, and cannot infer that this is always False.
                is_negative = tf.reshape(previous[0], [-1])[0] < 0
                first = parts[0][0]
                parts[0][0] = tf.where(is_negative, tf.zeros_like(first), first)
            results.append(measure(*map(join, parts)))
    return [in_order(rows, groups) for rows in zip(*results, strict=True)]


def _measure_updates(before: TensorGroup, after: TensorGroup) -> tuple[tf.Tensor, ...]:
    old, new = before.values, after.values
    # The difference of two equal Infs is NaN.
    unchanged = tf.equal(new, old) | (tf.math.is_nan(new) & tf.math.is_nan(old))
    update = tf.where(unchanged, 0.0, new - old)
    changed = tf.not_equal(update, 0.0)
    is_small = tf.abs(update) < 2.0 ** -(FLOAT16.fraction_bits + 1) * tf.abs(old)
    norms = (tf.sqrt(before.square_sum(values)) for values in (old, update))
    return *norms, before.count_true(changed), before.count_true(tf.logical_and(changed, is_small))


def _measure_gradients(group: TensorGroup) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    # Two algorithms, because neither is best everywhere. On two CPU cores (November 2026), in graph
    # mode, few operations take half as long per element, and 60 ms more to trace than one pass,
    # which is 5 % of the first call of a small network. Under XLA, few operations take 1.04 to 1.22
    # times as long, 1.5 times with subnormals or Inf, and 1.6 times at the first call.
    elements = group.values.shape.num_elements()
    is_small = elements is not None and elements <= _MAX_IN_ONE_PASS
    in_one_pass = xla.is_tracing() or is_small
    count = _count_in_one_pass if in_one_pass else _count_in_few_operations
    counts = count(group)
    amax = tf.maximum(tf.reduce_max(group.values, 1), -tf.reduce_min(group.values, 1))
    amax = tf.maximum(group.per_tensor(amax, tf.math.unsorted_segment_max), 0.0)
    amax = tf.where(counts[:, INF_BIN] > 0, math.inf, amax)
    amax = tf.where(counts[:, NAN_BIN] > 0, math.nan, amax)
    return counts, amax, group.square_sum(group.values)


def _count_in_one_pass(group: TensorGroup) -> tf.Tensor:
    """Returns the counts from a single histogram.

    XLA fuses the computation of the bins into the counting loop. The bins are computed as floats,
    which are exact, because a GPU has no kernels for int32.
    """
    magnitude = _magnitude(group)
    exponent = tf.cast(tf.bitwise.right_shift(magnitude, FLOAT32.fraction_bits), tf.float32)
    of_integer = tf.cast(_exponent_of_integer(magnitude), tf.float32)
    subnormal_bin = tf.maximum(of_integer - (_BIAS - 1), ZERO_BIN)
    bins = tf.where(tf.equal(exponent, 0), subnormal_bin, exponent + _SUBNORMAL_EXPONENTS)
    nonfinite_bin = tf.where(tf.math.is_nan(group.values), float(NAN_BIN), float(INF_BIN))
    bins = tf.where(exponent < _BIASED_EXPONENTS - 1, bins, nonfinite_bin)
    return _histograms(tf.cast(bins, tf.int32), 512, group)[:, :BIN_COUNT]


def _count_in_few_operations(group: TensorGroup) -> tf.Tensor:
    """Returns the counts from a histogram of the exponent bits.

    Rare values are counted only if there are any. Every operation reads the memory again, so as few
    as possible run on all elements.
    """
    # By biased exponent: 0 for zeros and subnormals, 255 for Inf and NaN. The sign, in front of it,
    # is added up.
    unsigned = tf.bitcast(group.values, tf.uint32)
    signed_exponent = tf.bitwise.right_shift(
        unsigned, tf.constant(FLOAT32.fraction_bits, tf.uint32)
    )
    by_exponent = _histograms(tf.bitcast(signed_exponent, tf.int32), 2 * _BIASED_EXPONENTS, group)
    by_exponent = by_exponent[:, :_BIASED_EXPONENTS] + by_exponent[:, _BIASED_EXPONENTS:]
    lowest, normal, highest = by_exponent[:, :1], by_exponent[:, 1:-1], by_exponent[:, -1:]
    none = tf.zeros_like(lowest)

    def count_zeros() -> tf.Tensor:
        elements = tf.cast(tf.reduce_sum(tf.cast(by_exponent, tf.float64), 1), tf.int64)
        return (elements - group.count_true(tf.cast(_magnitude(group), tf.bool)))[:, None]

    def count_subnormals_and_infs() -> tuple[tf.Tensor, tf.Tensor]:
        counts = _histograms(_exponent_of_integer(_magnitude(group)), _BIASED_EXPONENTS, group)
        subnormals = counts[:, _BIAS : _BIAS + _SUBNORMAL_EXPONENTS]
        return subnormals, group.count_true(tf.math.is_inf(group.values))[:, None]

    zeros = tf.cond(tf.reduce_any(lowest > 0), count_zeros, lambda: none)
    subnormal, inf = tf.cond(
        tf.reduce_any((lowest != zeros) | (highest > 0)),
        count_subnormals_and_infs,
        lambda: (tf.zeros([lowest.shape[0], _SUBNORMAL_EXPONENTS], tf.int64), none),
    )
    return tf.concat((zeros, subnormal, normal, inf, highest - inf), 1)


def _magnitude(group: TensorGroup) -> tf.Tensor:
    """Returns the bits of the values without the sign, as int32."""
    return tf.bitwise.bitwise_and(tf.bitcast(group.values, tf.int32), _MAGNITUDE)


def _exponent_of_integer(magnitude: tf.Tensor) -> tf.Tensor:
    """Converts the integer `magnitude` to float32, and returns its biased exponent; 0 for 0.

    A subnormal equals this integer times 2^-149, and the conversion is exact below 2^24. So
    subnormals map to `_BIAS` through `_BIAS` + 22, and normal numbers to larger values.
    """
    return tf.bitwise.right_shift(
        tf.bitcast(tf.cast(magnitude, tf.float32), tf.int32), FLOAT32.fraction_bits
    )


def _histograms(bins: tf.Tensor, size: int, group: TensorGroup) -> tf.Tensor:
    """Returns int64 counts of shape `(tensors, size)`.

    `size` is a power of two, and +0.0 is in bin 0.
    """
    tensors = len(group.padding)
    if tensors > 1:
        bins = tf.bitwise.bitwise_or(group.owners[:, None] * size, bins)
    bins = tf.bitcast(tf.reshape(tf.bitcast(bins, tf.uint32), [-1]), tf.int32)
    if tensorflow_internals.is_deterministic():
        # DenseBincount raises an error on a GPU then, although integer sums do not depend on the
        # order.
        counts = tf.math.unsorted_segment_sum(tf.ones_like(bins), bins, tensors * size)
    else:
        weights = tf.zeros([0], tf.int32)
        # tf.math.bincount computes its size on the device, which XLA does not support.
        counts = tf.raw_ops.DenseBincount(
            input=bins, size=tensors * size, weights=weights, binary_output=False
        )
    counts = tf.reshape(tf.cast(counts, tf.int64), [-1, size])
    if not group.padding.any():
        return counts
    return counts - tf.one_hot([0], size, dtype=tf.int64) * group.padding[:, None]
