"""Statistics of gradients as pure tensor operations; they run eagerly, in `tf.function` and under XLA."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from keras import ops

from kmp import records
from kmp._formats import FLOAT32

# Gradients up to this many elements are joined before they are counted: many small counts make XLA slow to compile.
_SMALL = 65536


def values_of(gradient: Any) -> tf.Tensor:
    """Returns the values of a gradient, dense or `tf.IndexedSlices`."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else ops.convert_to_tensor(gradient)


def nonfinite(tensor: Any) -> tf.Tensor:
    """Returns 1.0 if any element is inf or nan, else 0.0: a scalar float32, so that flags add up across replicas.

    Args:
        tensor: A gradient or loss, of any shape and float dtype.
    """
    return 1.0 - ops.cast(ops.all(ops.isfinite(values_of(tensor))), "float32")


def exponent_bins(tensor: Any) -> tf.Tensor:
    """Returns the bin of `records.ExponentHistogram` that each element falls into.

    Works on the bits, because TensorFlow compares float32 subnormals as zero. A subnormal is its fraction times 2^-149,
    and an integer below 2^24 converts to float32 exactly, so the converted fraction's exponent gives the subnormal's.

    Args:
        tensor: Float tensor of any shape; converted to float32.

    Returns:
        An int32 tensor of the same shape, with values from 0 to 279.
    """
    bits = tf.bitwise.bitwise_and(tf.bitcast(tf.cast(tensor, tf.float32), tf.int32), 0x7FFFFFFF)
    biased = tf.bitwise.right_shift(bits, FLOAT32.fraction_bits)
    fraction = tf.bitwise.bitwise_and(bits, 2**FLOAT32.fraction_bits - 1)
    normal = biased - FLOAT32.max_exponent
    subnormal = _exponent_of_integer(fraction) + FLOAT32.min_subnormal_exponent
    bins = tf.where(biased == 0, subnormal, normal) - records.FIRST_EXPONENT + 1
    special = tf.where(fraction == 0, records.INF_BIN, records.NAN_BIN)
    bins = tf.where(biased == 2**FLOAT32.exponent_bits - 1, special, bins)
    return tf.where(bits == 0, records.ZERO_BIN, bins)


def exponent_counts(gradients: Sequence[Any]) -> tf.Tensor:
    """Counts the elements of all gradients by binary exponent.

    Args:
        gradients: Tensors or `tf.IndexedSlices` of any float dtype; `None` entries are passed over.

    Returns:
        An int64 tensor of shape `(280,)`; see `records.ExponentHistogram`.
    """
    counts = [_count_bins(group) for group in _groups(gradients)]
    return tf.add_n(counts) if counts else tf.zeros([records.BIN_COUNT], tf.int64)


def _exponent_of_integer(integer: tf.Tensor) -> tf.Tensor:
    bits = tf.bitcast(tf.cast(integer, tf.float32), tf.int32)
    return tf.bitwise.right_shift(bits, FLOAT32.fraction_bits) - FLOAT32.max_exponent


def _groups(gradients: Sequence[Any]) -> list[tf.Tensor]:
    flat = [tf.reshape(tf.cast(values_of(g), tf.float32), [-1]) for g in gradients if g is not None]
    small = [g for g in flat if g.shape[0] is not None and g.shape[0] <= _SMALL]
    large = [g for g in flat if g.shape[0] is None or g.shape[0] > _SMALL]
    return large + ([tf.concat(small, 0)] if small else [])


def _count_bins(flat: tf.Tensor) -> tf.Tensor:
    ones = tf.ones_like(flat, tf.int32)
    counts = tf.math.unsorted_segment_sum(ones, exponent_bins(flat), records.BIN_COUNT)
    return tf.cast(counts, tf.int64)
