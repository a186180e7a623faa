"""The values of gradients, and many tensors joined into a few groups: fewer, larger operations."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from keras import ops

from kmp.utils.float_formats import FLOAT32

Gradients = Sequence[Any]  # of tensors, `tf.IndexedSlices` or `None`
Variables = Sequence[Any]  # of `keras.Variable` or `tf.Variable`

_ROW_SIZE = 512
# in a group: on a GPU, each of several hundred thread blocks has its own copy of all histograms
_MAX_TENSORS = 512


def values_of(gradient: Any) -> tf.Tensor:
    """Returns the values of a dense gradient or `tf.IndexedSlices`."""
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values
    return ops.convert_to_tensor(gradient)


class TensorGroup(NamedTuple):
    """Tensors of a group, as one float32 tensor.

    Args:
        values: Shape `(rows, row size)`. A single tensor is one row; several are padded with zeros
            to rows of 512.
        owners: int32 of shape `(rows,)`: the index in the group of the tensor that each row belongs
            to.
        padding: int64 of shape `(tensors,)`: the number of zeros appended to each tensor.
    """

    values: tf.Tensor
    owners: np.ndarray
    padding: np.ndarray

    def per_tensor(
        self, rows: tf.Tensor, reduce: Callable[..., tf.Tensor] = tf.math.unsorted_segment_sum
    ) -> tf.Tensor:
        """Reduces values of shape `(rows,)` to shape `(tensors,)`."""
        return rows if len(self.padding) == 1 else reduce(rows, self.owners, len(self.padding))

    def count_true(self, mask: tf.Tensor) -> tf.Tensor:
        """Counts the true elements of each tensor: int64 of shape `(tensors,)`."""
        # float32 takes half the bytes of float64.
        is_exact = mask.shape[1] is not None and mask.shape[1] <= FLOAT32.max_exact_integer
        counts = tf.reduce_sum(tf.cast(mask, tf.float32 if is_exact else tf.float64), 1)
        return tf.cast(self.per_tensor(tf.cast(counts, tf.float64)), tf.int64)

    def square_sum(self, values: tf.Tensor) -> tf.Tensor:
        """Sums squares of each tensor: float64 of shape `(tensors,)`.

        They can exceed float32's range.
        """
        values = tf.cast(values, tf.float64)
        if len(self.padding) == 1:
            return tf.reshape(2.0 * tf.nn.l2_loss(values), [1])  # does not store the squares
        return self.per_tensor(tf.reduce_sum(tf.square(values), 1))


def group_indices(tensors: Sequence[tf.Tensor], large: int, max_elements: int) -> list[list[int]]:
    """Assigns tensors to groups, by index.

    Args:
        tensors: The tensors.
        large: Tensors of at least this number of elements, or of unknown size, each form one group,
            because joining copies them.
        max_elements: Maximum number of elements in a group of several tensors.
    """
    groups: list[list[int]] = []
    joined: list[int] = []
    elements = max_elements
    for index, tensor in enumerate(tensors):
        size = tensor.shape.num_elements()
        if size is None or size >= large:
            groups.append([index])
            continue
        size = max(size, max_elements // _MAX_TENSORS)
        if elements + size > max_elements:
            joined, elements = [], 0
            groups.append(joined)
        joined.append(index)
        elements += size
    return groups


def rows_of(tensors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, np.ndarray]:
    """Returns tensors of one dtype as rows, and the index of the tensor that each row belongs to.

    The tensors have any shapes. A single tensor has its own rows; several are padded with zeros to
    rows of 512.
    """
    if len(tensors) == 1:
        size = tensors[0].shape.num_elements()
        width = (tensors[0].shape[-1] if tensors[0].shape.rank else 1) or 1
        return tf.reshape(tensors[0], [size // width, width]), np.zeros(size // width, np.int32)
    flat = tf.constant([-1])
    sizes = np.array([tensor.shape.num_elements() for tensor in tensors])
    rows = -(-sizes // _ROW_SIZE)
    zeros = functools.cache(functools.partial(tf.zeros, dtype=tensors[0].dtype))
    padding = (rows * _ROW_SIZE - sizes).tolist()
    parts = []
    for tensor, missing in zip(tensors, padding, strict=True):
        parts.append(tf.reshape(tensor, flat))
        if missing:
            parts.append(zeros((missing,)))
    owners = np.repeat(np.arange(len(tensors), dtype=np.int32), rows)
    return tf.reshape(tf.concat(parts, 0), [-1, _ROW_SIZE]), owners


def join(tensors: Sequence[tf.Tensor]) -> TensorGroup:
    """Returns tensors of any shape and float dtype as one group."""
    if len(tensors) == 1:
        values = tf.cast(tf.reshape(tensors[0], [1, -1]), tf.float32)
        return TensorGroup(values, np.zeros(1, np.int32), np.zeros(1, np.int64))
    values, owners = rows_of([tf.cast(tensor, tf.float32) for tensor in tensors])
    sizes = np.array([tensor.shape.num_elements() for tensor in tensors])
    padding = np.bincount(owners, minlength=len(tensors)) * _ROW_SIZE - sizes
    return TensorGroup(values, owners, padding.astype(np.int64))


def in_order(rows: Sequence[tf.Tensor], groups: list[list[int]]) -> tf.Tensor:
    """Concatenates the results of groups, in the order of the tensors passed to `group_indices`."""
    indices = [index for group in groups for index in group]
    return tf.gather(tf.concat(rows, 0), np.argsort(indices))
