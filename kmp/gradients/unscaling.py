"""Divides gradients by the loss scale, and flags those that are not finite after the division."""

from typing import Any

import numpy as np
import tensorflow as tf
from keras import ops

from kmp.backend import xla
from kmp.backend.xla import outlined
from kmp.gradients.tensor_groups import (
    Gradients,
    Variables,
    group_indices,
    in_order,
    join,
    rows_of,
    values_of,
)
from kmp.utils.float_formats import DTYPES_16_BIT, FLOAT32

_LARGEST_JOINED = 2**20  # elements; joining copies them


def before_cast(gradient: Any) -> Any:
    """Returns the 16-bit gradient from which a float32 gradient in a graph was cast.

    If there is none, it returns the gradient itself. A layer casts its float32 weights to 16 bits,
    so the last operation of the backward pass casts back. Compiled code then reads half the bytes,
    and fuses the cast.
    """
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            before_cast(gradient.values), gradient.indices, gradient.dense_shape
        )
    if not tf.is_symbolic_tensor(gradient) or gradient.dtype != tf.float32:
        return gradient
    operation = gradient.op
    if operation.type == "Reshape" and gradient.shape.is_fully_defined():  # of an embedding's rows
        operation = operation.inputs[0].op
    source = operation.inputs[0] if operation.type == "Cast" else gradient
    if source.dtype.name not in DTYPES_16_BIT:
        return gradient
    return source if operation is gradient.op else tf.reshape(source, gradient.shape)


def with_padded_rows(gradient: Any) -> Any:
    """Returns a sparse gradient with rows of zeros appended to a power of two; others as they are.

    XLA compiles again for each new number of rows. Adding zeros to the first row of a variable
    changes nothing. The rows are not added up, because optimizers compute with each: Adam squares
    them.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    if gradient.values.shape.num_elements() is not None:
        return gradient
    with tf.device("CPU:0"):  # sizes are on the host
        count = tf.shape(gradient.indices)[0]
        log = tf.math.log(tf.cast(tf.maximum(count, 1), tf.float64)) / np.log(2.0)
        missing = tf.maximum(tf.cast(2.0 ** tf.math.ceil(log), tf.int32) - count, 0)
    of_rows = [[0, 0]] * (len(gradient.values.shape) - 1)
    values = tf.pad(gradient.values, [[0, missing], *of_rows])
    indices = tf.pad(gradient.indices, [[0, missing]])
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def multiply_gradients(gradients: Gradients, factor: Any) -> list[Any]:
    """Returns gradients times a loss scale or its reciprocal.

    They are in float64 for float64 gradients, else in float32.
    """
    products: list[Any] = []
    for gradient in gradients:
        if gradient is None:
            products.append(None)
            continue
        values = values_of(gradient)
        dtype = tf.float64 if values.dtype == tf.float64 else tf.float32
        # `tf.multiply` adds Python overhead that would dominate the tracing time of a large model.
        product = tf.raw_ops.Mul(x=tf.cast(values, dtype), y=tf.cast(factor, dtype))
        if isinstance(gradient, tf.IndexedSlices):
            product = tf.IndexedSlices(product, gradient.indices, gradient.dense_shape)
        products.append(product)
    return products


def unscale_for_update(gradients: Gradients, variables: Variables, divisor: Any) -> list[Any]:
    """Returns gradients divided by the loss scale, in the dtypes of their variables.

    The scale is from 2^-126 to 2^126; `None` divides nothing. The gradient of a variable that Keras
    overwrites with it, such as a float8 scale, is returned unchanged.
    """
    unscaled = list(gradients)
    if divisor is not None:
        # XLA fuses a multiplication into the loops that use it. A division there would take longer
        # than the rest of them.
        unscaled = multiply_gradients(gradients, 1.0 / divisor)
    for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
        if is_overwritten(variable):
            unscaled[index] = gradient
        elif gradient is not None:
            unscaled[index] = tf.cast(unscaled[index], variable.dtype)
    return unscaled


def nonfinite_flag(tensor: Any) -> tf.Tensor:
    """Returns 1.0 if any element of a gradient or loss is Inf or NaN, else 0.0.

    It is a float32 to sum over replicas.
    """
    is_finite = ops.all(ops.isfinite(values_of(tensor)))
    return tf.where(is_finite, tf.zeros([]), tf.ones([]))  # float32 whatever Keras' floatx is


def nonfinite_flags(
    gradients: Gradients, variables: Variables, divisor: Any, replicas: int
) -> tf.Tensor:
    """Flags the gradients that contain NaN or Inf after unscaling and summing over replicas.

    A divisor below 1 can make a finite gradient infinite, and so can the sum over replicas. Rows of
    a sparse gradient with the same index are checked separately, not as their sum.

    Returns:
        float32 tensor of shape `(gradients,)`: 1.0 for a non-finite gradient, else 0.0. Flags add
        up over replicas.
    """
    joint: list[int] = []
    single: list[int] = []
    for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
        (joint if _is_checked_in_float32(gradient, variable) else single).append(index)

    # Each in the dtype of its variable.
    alone = [gradients[index] for index in single]
    of_alone = [variables[index] for index in single]
    flags = []
    for gradient in unscale_for_update(alone, of_alone, divisor):
        if gradient is None:
            flags.append(tf.zeros([1]))
        else:
            flag = nonfinite_flag(values_of(gradient) * replicas)
            flags.append(tf.reshape(flag, [1]))

    # Together in float32.
    if joint:
        tensors = [values_of(gradients[index]) for index in joint]
        factor = replicas if divisor is None else replicas / divisor
        branches_wait = xla.is_tracing() and xla.has_gpu()
        check = _flags_by_counts if branches_wait else _flags_after_one_sum
        flags.append(check(tensors, factor))

    joined = tf.concat(flags, 0)
    return tf.gather(joined, np.argsort(single + joint)) if single else joined


def _is_checked_in_float32(gradient: Any, variable: Any) -> bool:
    """Whether a gradient of static size is finite in its variable's dtype as it is in float32."""
    if gradient is None or is_overwritten(variable) or variable.dtype != FLOAT32.name:
        return False
    values = values_of(gradient)
    return values.dtype.size <= tf.float32.size and values.shape.num_elements() is not None


def _flags_by_counts(tensors: Gradients, factor: Any) -> tf.Tensor:
    """Returns the flags of gradients times `factor`, without a branch.

    A GPU would wait for the host to take one. The counts of a large tensor's rows take one kernel
    under XLA for a GPU, the count of all its elements two. Smaller tensors are concatenated first,
    in 16 bits where they have 16, which moves few bytes and saves a kernel for each.
    """
    joined: dict[tf.DType, list[int]] = {}
    large: list[int] = []
    for index, tensor in enumerate(tensors):
        if tensor.shape.num_elements() > _LARGEST_JOINED:
            large.append(index)
        else:
            joined.setdefault(tensor.dtype, []).append(index)
    groups = [*joined.values(), *([index] for index in large)]
    row_counts, owners = [], []
    for indices in groups:
        rows, owners_of_rows = rows_of([tensors[index] for index in indices])
        is_finite = tf.math.is_finite(_times(tf.cast(rows, tf.float32), factor))
        row_counts.append(tf.reduce_sum(1.0 - tf.cast(is_finite, tf.float32), 1))
        owners.append(np.array(indices)[owners_of_rows])
    counts = tf.math.unsorted_segment_sum(
        tf.concat(row_counts, 0), np.concatenate(owners), len(tensors)
    )
    return tf.minimum(counts, 1.0)


def _flags_after_one_sum(tensors: Gradients, factor: Any) -> tf.Tensor:
    """Returns the flags of gradients times `factor`, in graph mode or for a CPU.

    A branch on a CPU costs nothing there, and each operation reads the memory again. If the sum of
    all elements is finite, as in most steps, one pass over them is enough. Finite numbers can have
    an infinite sum, and a factor above 1 can make them infinite: then each is checked. Small
    tensors are concatenated, so that the step of ResNet-50 has 49 operations for this in place of
    434. XLA for a CPU adds up in vectors, but counts one by one.
    """
    # Below 2^16 elements, copying tensors takes less time than running an operation for each.
    indices = group_indices(tensors, large=2**16, max_elements=2**24)
    groups = [join([tensors[index] for index in group]) for group in indices]
    is_finite = tf.math.is_finite(tf.add_n([tf.reduce_sum(group.values) for group in groups]))

    def check_each() -> tf.Tensor:
        flags = []
        for group in groups:
            row_is_finite = tf.reduce_all(tf.math.is_finite(_times(group.values, factor)), 1)
            flags.append(group.per_tensor(1.0 - tf.cast(row_is_finite, tf.float32)))
        return tf.minimum(in_order(flags, indices), 1.0)

    all_finite = tf.logical_and(is_finite, factor <= 1)
    return ops.cond(all_finite, lambda: tf.zeros([len(tensors)]), outlined(check_each))


def _times(tensor: tf.Tensor, factor: Any) -> tf.Tensor:
    """Returns the product; the tensor itself if the factor is a Python 1."""
    return tensor if isinstance(factor, int) and factor == 1 else tensor * factor


def is_overwritten(variable: Any) -> bool:
    """Whether Keras replaces a variable's value with its gradient."""
    return getattr(variable, "overwrite_with_gradient", False)
