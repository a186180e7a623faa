"""Dividing gradients by the loss scale, and telling which of them are not finite then."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras import backend, ops

from kmp.backend import xla
from kmp.gradients import ROW, pack_tensors, tensor_statistics, values_of, with_values
from kmp.utils import FLOAT32

# The reciprocal of a larger one is subnormal, which TensorFlow on a CPU takes for zero.
LARGEST_DIVISOR = 2.0 ** (FLOAT32.max_exponent - 1)

# Under XLA, fewer elements than this are joined with others: copying them costs less than compiling a loop for each.
_SMALL = 2**16
_LANE = 8  # elements whose finiteness XLA on a CPU finds in one vector operation
_LANES_IN_ROW = ROW // _LANE


def divisor(scale: Any) -> Any:
    """Returns the loss scale that the loss is multiplied and gradients are divided by: at most 2^126."""
    return ops.minimum(scale, LARGEST_DIVISOR)


def unscale(gradients: Sequence[Any], variables: Sequence[Any], scale: Any) -> list[Any]:
    """Returns gradients divided by the loss scale, in the dtypes of their variables.

    Args:
        gradients: Loss-scaled gradients: tensors, `tf.IndexedSlices` or `None`.
        variables: The variable of each. One that Keras overwrites with its gradient, as float8's scales, gets it as it
            is.
        scale: Scalar float32, from 2^-126 to `LARGEST_DIVISOR`.
    """
    # XLA works a product out within the loops that use it; a division would take longer than all else in them.
    inverse = 1.0 / scale if xla.is_tracing() else None
    return [
        _divided(gradient, variable, scale)
        if inverse is None or not _is_plain(gradient, variable)
        # tf.multiply is this with a Python layer; see `_gate`.
        else with_values(gradient, tf.raw_ops.Mul(x=_as_float32(gradient), y=inverse))
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def multiplied(gradients: Sequence[Any], factor: Any) -> list[Any]:
    """Returns gradients times a factor, a power of two for all scales but a user's own, in float32 at least.

    Args:
        gradients: Tensors, `tf.IndexedSlices` or `None`.
        factor: Scalar float32.
    """

    def times(values: Any) -> Any:
        values = ops.cast(values, backend.result_type(values.dtype, FLOAT32.name))
        return values * ops.cast(factor, values.dtype)

    return [None if one is None else with_values(one, times(values_of(one))) for one in gradients]


def nonfinite(gradients: Sequence[Any], variables: Sequence[Any], scale: Any, replicas: int) -> tf.Tensor:
    """Tells which gradients cannot be applied, because they hold inf or nan once unscaled and added up.

    A scale below 1 can make a finite gradient infinite, and so can the sum over replicas. Rows of a sparse gradient
    that have the same index are looked at one by one, not their sum.

    Args:
        gradients: Loss-scaled gradients: tensors, `tf.IndexedSlices` or `None`; at least one.
        variables: The variable of each.
        scale: Scalar float32, as `unscale` takes it.
        replicas: How many replicas have such gradients.

    Returns:
        float32 of shape `(gradients,)`: 1.0 for each of those, else 0.0, so that flags add up across replicas.
    """
    pairs = list(zip(gradients, variables, strict=True))
    are_plain = [_is_plain(*pair) for pair in pairs]
    plain = [place for place, is_plain in enumerate(are_plain) if is_plain]
    others = [place for place, is_plain in enumerate(are_plain) if not is_plain]
    flags = [_nonfinite_by_itself(*pairs[place], scale, replicas) for place in others]
    if plain:
        together = _nonfinite_in_rows if xla.is_tracing() else _nonfinite_unless_sums_are_finite
        flags.append(together([_as_float32(gradients[place]) for place in plain], scale, replicas))
    return tf.gather(tf.concat(flags, 0), np.argsort(others + plain))


def _is_plain(gradient: Any, variable: Any) -> bool:
    """Whether a gradient is as finite in its variable's dtype as in float32, and has a known number of elements."""
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


def _nonfinite_by_itself(gradient: Any, variable: Any, scale: Any, replicas: int) -> tf.Tensor:
    if gradient is None:
        return tf.zeros([1])
    return tf.reshape(tensor_statistics.nonfinite(values_of(_divided(gradient, variable, scale)) * replicas), [1])


def _nonfinite_unless_sums_are_finite(tensors: Sequence[tf.Tensor], scale: Any, replicas: int) -> tf.Tensor:
    """Returns the flags from a branch: sums, which one reading gives, tell that all is finite, as in most steps it is.

    Finite numbers may have an infinite sum, and a scale below 1 may make them infinite; then they are read again. All
    of it can be compiled by XLA too, because a function traced here may be called from one that is.
    """
    is_finite = tf.math.is_finite(tf.add_n([tf.reduce_sum(tensor) for tensor in tensors]))
    return ops.cond(
        tf.logical_and(is_finite, scale >= replicas),
        lambda: tf.zeros([len(tensors)]),
        lambda: _nonfinite_in_rows(tensors, scale, replicas),
    )


def _nonfinite_in_rows(tensors: Sequence[tf.Tensor], scale: Any, replicas: int) -> tf.Tensor:
    """Returns the flags from one reduction for all tensors: compiling one for each takes XLA long."""
    factor = replicas / scale
    lanes: list[tf.Tensor] = []
    owners: list[int] = []
    for group in pack_tensors(tensors, joined_below=_SMALL):
        found = _lanes(tf.reshape(group.values, [-1]), factor)
        rows = math.ceil(sum(part.shape[0] for part in found) / _LANES_IN_ROW)
        owners += list(np.repeat(group.members, group.rows or rows))
        lanes += found
    finite = tf.reduce_all(tf.reshape(tf.concat(lanes, 0), [-1, _LANES_IN_ROW]), 1)
    count = tf.math.unsorted_segment_sum(1.0 - tf.cast(finite, tf.float32), np.array(owners, np.int32), len(tensors))
    return tf.minimum(count, 1.0)


def _lanes(values: tf.Tensor, factor: Any) -> list[tf.Tensor]:
    """Returns bool vectors, together of whole rows: whether each lane of a flat tensor times a factor is finite."""
    whole = values.shape[0] // _LANE * _LANE
    rest = tf.math.is_finite(values[whole:] * factor)
    found = tf.reduce_all(tf.math.is_finite(tf.reshape(values[:whole], [-1, _LANE]) * factor), 1)
    fill = -(found.shape[0] + rest.shape[0]) % _LANES_IN_ROW
    return [found, *(part for part in (rest, tf.ones([fill], tf.bool)) if part.shape[0])]
