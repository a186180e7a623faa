"""Divides gradients by the loss scale, and flags those that are not finite after the division."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras import backend, ops

from kmp.backend import outlined, xla
from kmp.gradients import ROW_SIZE, pack_tensors, tensor_statistics, values_of, with_values
from kmp.utils import FLOAT32

# A larger loss scale is applied as this one: its reciprocal is subnormal, and TensorFlow on a CPU flushes it to zero.
LARGEST_APPLIED_SCALE = 2.0 ** (FLOAT32.max_exponent - 1)

# Under XLA, tensors with fewer elements are concatenated: copying them takes less time than compiling a loop for each.
_SMALL = 2**16
_LANE = 8  # elements that XLA on a CPU checks in one vector operation
_LANES_IN_ROW = ROW_SIZE // _LANE


def unscale(gradients: Sequence[Any], variables: Sequence[Any], scale: Any) -> list[Any]:
    """Returns gradients divided by the loss scale, in the dtypes of their variables.

    Args:
        gradients: Loss-scaled gradients: tensors, `tf.IndexedSlices` or `None`.
        variables: The variable of each gradient. The gradient of a variable that Keras overwrites with it, such as a
            float8 scale, is returned unchanged.
        scale: Scalar float32, from 2^-126 to `LARGEST_APPLIED_SCALE`.
    """
    # XLA fuses a multiplication into the loops that use it. A division there would take longer than the rest of them.
    inverse = 1.0 / scale if xla.is_tracing() else None
    return [
        _divided(gradient, variable, scale)
        if inverse is None or not _is_plain(gradient, variable)
        # tf.multiply adds Python overhead; see `_PredicatedWrites._select`.
        else with_values(gradient, tf.raw_ops.Mul(x=_as_float32(gradient), y=inverse))
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def multiply_gradients(gradients: Sequence[Any], factor: Any) -> list[Any]:
    """Returns gradients times a factor, in float32 or, for float64 gradients, in float64.

    Args:
        gradients: Tensors, `tf.IndexedSlices` or `None`.
        factor: Scalar float32, a loss scale or its reciprocal. The product is exact if it is a power of two.
    """

    def multiply(values: Any) -> Any:
        values = ops.cast(values, backend.result_type(values.dtype, FLOAT32.name))
        return values * ops.cast(factor, values.dtype)

    return [
        None if gradient is None else with_values(gradient, multiply(values_of(gradient))) for gradient in gradients
    ]


def nonfinite_flags(gradients: Sequence[Any], variables: Sequence[Any], scale: Any, replicas: int) -> tf.Tensor:
    """Flags the gradients that contain NaN or Inf after unscaling and summing over replicas.

    A scale below 1 can make a finite gradient infinite, and so can the sum over replicas. Rows of a sparse gradient
    with the same index are checked separately, not as their sum.

    Args:
        gradients: Loss-scaled gradients: tensors, `tf.IndexedSlices` or `None`; at least one.
        variables: The variable of each gradient.
        scale: Scalar float32, from 2^-126 to `LARGEST_APPLIED_SCALE`.
        replicas: Number of replicas that compute such gradients.

    Returns:
        float32 tensor of shape `(gradients,)`: 1.0 for a non-finite gradient, else 0.0. Flags add up over replicas.
    """
    pairs = list(zip(gradients, variables, strict=True))
    are_plain = [_is_plain(*pair) for pair in pairs]
    plain = [index for index, is_plain in enumerate(are_plain) if is_plain]
    others = [index for index, is_plain in enumerate(are_plain) if not is_plain]
    flags = [_separate_flag(*pairs[index], scale, replicas) for index in others]
    if plain:
        joint_flags = _flags_of_rows if xla.is_tracing() else _flags_unless_sum_is_finite
        flags.append(joint_flags([_as_float32(gradients[index]) for index in plain], scale, replicas))
    joined = tf.concat(flags, 0)
    return tf.gather(joined, np.argsort(others + plain)) if others else joined


def _is_plain(gradient: Any, variable: Any) -> bool:
    """Whether a gradient is finite in its variable's dtype exactly if it is in float32, and has a static size."""
    if gradient is None or _is_overwritten(variable) or variable.dtype != FLOAT32.name:
        return False
    values = values_of(gradient)
    return values.dtype.size <= tf.float32.size and values.shape.num_elements() is not None


def _is_overwritten(variable: Any) -> bool:
    return getattr(variable, "overwrite_with_gradient", False)


def _as_float32(gradient: Any) -> tf.Tensor:
    return tf.cast(values_of(gradient), tf.float32)


def _divided(gradient: Any, variable: Any, scale: Any) -> Any:
    if gradient is None or _is_overwritten(variable):
        return gradient
    return with_values(gradient, ops.cast(ops.divide(values_of(gradient), scale), variable.dtype))


def _separate_flag(gradient: Any, variable: Any, scale: Any, replicas: int) -> tf.Tensor:
    if gradient is None:
        return tf.zeros([1])
    return tf.reshape(tensor_statistics.nonfinite_flag(values_of(_divided(gradient, variable, scale)) * replicas), [1])


def _flags_unless_sum_is_finite(tensors: Sequence[tf.Tensor], scale: Any, replicas: int) -> tf.Tensor:
    """Returns the flags; if the sum of all elements is finite, as in most steps, one pass over them is enough.

    Finite numbers can have an infinite sum, and a scale below 1 can make them infinite. Then the elements are checked
    again. XLA can compile both branches, because a compiled function may call a function that is traced here.
    """
    is_finite = tf.math.is_finite(tf.add_n([tf.reduce_sum(tensor) for tensor in tensors]))
    return ops.cond(
        tf.logical_and(is_finite, scale >= replicas),
        lambda: tf.zeros([len(tensors)]),
        outlined(lambda: _flags_of_rows(tensors, scale, replicas)),
    )


def _flags_of_rows(tensors: Sequence[tf.Tensor], scale: Any, replicas: int) -> tf.Tensor:
    """Returns the flags from a single reduction, because XLA takes long to compile one for each tensor."""
    factor = replicas / scale
    lanes: list[tf.Tensor] = []
    row_owners: list[int] = []
    for group in pack_tensors(tensors, joined_below=_SMALL):
        values = tf.reshape(group.values, [-1]) if group.rows else group.values
        group_lanes = _finite_lanes(values, factor)
        row_count = math.ceil(sum(part.shape[0] for part in group_lanes) / _LANES_IN_ROW)
        row_owners += list(np.repeat(group.members, group.rows or row_count))
        lanes += group_lanes
    is_finite = tf.reduce_all(tf.reshape(tf.concat(lanes, 0), [-1, _LANES_IN_ROW]), 1)
    nonfinite_rows = tf.math.unsorted_segment_sum(
        1.0 - tf.cast(is_finite, tf.float32), np.array(row_owners, np.int32), len(tensors)
    )
    return tf.minimum(nonfinite_rows, 1.0)


def _finite_lanes(values: tf.Tensor, factor: Any) -> list[tf.Tensor]:
    """Returns bool vectors, padded to full rows: whether each lane of a flat tensor times a factor is finite."""
    rest = values.shape[0] % _LANE
    in_lanes = tf.reshape(values[:-rest] if rest else values, [-1, _LANE])
    lanes = [tf.reduce_all(tf.math.is_finite(in_lanes * factor), 1)]
    if rest:
        lanes.append(tf.math.is_finite(values[-rest:] * factor))
    padding = -sum(part.shape[0] for part in lanes) % _LANES_IN_ROW
    return [*lanes, tf.ones([padding], tf.bool)] if padding else lanes
