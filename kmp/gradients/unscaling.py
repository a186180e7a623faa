"""Divides gradients by the loss scale, and flags those that are not finite after the division."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras import backend, ops

from kmp.backend import outlined, xla
from kmp.gradients.tensor_packing import in_order, pack_tensors
from kmp.gradients.tensor_statistics import nonfinite_flag, values_of, with_values
from kmp.utils import FLOAT32

_SMALL = 2**16  # elements: below this, copying tensors takes less time than running an operation for each


def unscale(gradients: Sequence[Any], variables: Sequence[Any], scale: Any) -> list[Any]:
    """Returns gradients divided by the loss scale, in the dtypes of their variables.

    Args:
        gradients: Loss-scaled gradients: tensors, `tf.IndexedSlices` or `None`.
        variables: The variable of each gradient. The gradient of a variable that Keras overwrites with it, such as a
            float8 scale, is returned unchanged.
        scale: Scalar float32, from 2^-126 to 2^126.
    """
    # XLA fuses a multiplication into the loops that use it. A division there would take longer than the rest of them.
    inverse = 1.0 / scale if xla.is_tracing() else None
    return [
        _divided(gradient, variable, scale)
        if inverse is None or not _is_plain(gradient, variable)
        # tf.multiply adds Python overhead; as in `predicated_writes`.
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
        scale: Scalar float32, from 2^-126 to 2^126.
        replicas: Number of replicas that compute such gradients.

    Returns:
        float32 tensor of shape `(gradients,)`: 1.0 for a non-finite gradient, else 0.0. Flags add up over replicas.
    """
    pairs = list(zip(gradients, variables, strict=True))
    plain = [index for index, pair in enumerate(pairs) if _is_plain(*pair)]
    others = [index for index in range(len(pairs)) if index not in set(plain)]
    flags = []
    for gradient, variable in (pairs[index] for index in others):
        unscaled = None if gradient is None else values_of(_divided(gradient, variable, scale)) * replicas
        flags.append(tf.zeros([1]) if unscaled is None else tf.reshape(nonfinite_flag(unscaled), [1]))
    if plain:
        flags.append(_joint_flags([_as_float32(gradients[index]) for index in plain], scale, replicas))
    joined = tf.concat(flags, 0)
    return tf.gather(joined, np.argsort(others + plain)) if others else joined


def _joint_flags(tensors: Sequence[tf.Tensor], scale: Any, replicas: int) -> tf.Tensor:
    """Returns the flags of float32 tensors.

    If the sum of all elements is finite, as in most steps, one pass over them is enough. Finite numbers can have an
    infinite sum, and a scale below 1 can make them infinite: then each is checked. Small tensors are concatenated, so
    that the step of ResNet-50 has 49 operations for this in place of 434, and XLA has fewer loops to compile.
    """
    groups = pack_tensors(tensors, joined_below=_SMALL)
    is_finite = tf.math.is_finite(tf.add_n([tf.reduce_sum(group.values) for group in groups]))

    def check_each() -> tf.Tensor:
        flags = []
        for group in groups:
            finite = tf.math.is_finite(group.values * (replicas / scale))
            nonfinite = 1.0 - tf.cast(tf.reduce_all(finite, 1 if group.rows else None, not group.rows), tf.float32)
            flags.append(group.segment_sum(nonfinite) if group.rows else nonfinite)
        return tf.minimum(in_order(tf.concat(flags, 0), groups), 1.0)

    # XLA can compile both branches, because a compiled function may call a function that is traced here.
    all_finite = tf.logical_and(is_finite, scale >= replicas)
    return ops.cond(all_finite, lambda: tf.zeros([len(tensors)]), outlined(check_each))


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
