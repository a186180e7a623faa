"""Packs many tensors into a few, so that they are measured together."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from kmp.backend import xla

# Tensors with fewer elements are packed into rows: fewer, larger operations trace and compile faster. Packing copies
# them, so larger tensors are measured separately.
_LARGE = 2**22
ROW_SIZE = 512


@dataclass(frozen=True)
class PackedTensors:
    """Tensors that are measured together.

    Args:
        values: float32, of shape `(elements,)` for a single tensor. Several tensors have shape `(rows, ROW_SIZE)`;
            each is padded with zeros to full rows.
        members: Indices of the tensors in the list passed to `pack_tensors`.
        rows: Number of rows of each member; empty for a single tensor.
        padding: Number of zeros appended to each member; empty for a single tensor.
    """

    values: tf.Tensor
    members: tuple[int, ...]
    rows: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()

    @property
    def segment_ids(self) -> np.ndarray:
        """int32 of shape `(rows,)`: the position in `members` that each row belongs to."""
        return np.repeat(np.arange(len(self.members), dtype=np.int32), self.rows)

    @property
    def sizes(self) -> Any:
        """int64 of shape `(members,)`: the number of elements of each member, without padding."""
        if self.rows:
            return np.array(self.rows, np.int64) * ROW_SIZE - np.array(self.padding, np.int64)
        return tf.reshape(tf.size(self.values, tf.int64), [1])

    def segment_sum(self, row_values: tf.Tensor) -> tf.Tensor:
        """Returns the sum over the rows of each member."""
        return tf.math.unsorted_segment_sum(row_values, self.segment_ids, len(self.members))


def in_batches(
    measure: Callable[..., tuple[tf.Tensor, ...]],
    tensors: Sequence[tf.Tensor],
    *lists: Sequence[Any],
    max_elements: int,
    min_size: int = 0,
) -> tuple[tf.Tensor, ...]:
    """Measures tensors in consecutive batches, to bound the memory use.

    Args:
        measure: A function that takes the same slice of `tensors` and of each of `lists`. It returns tensors with one
            row per entry; the first of them has no negative values.
        tensors: At least one tensor.
        *lists: Lists of the same length as `tensors`.
        max_elements: Maximum number of elements in a batch of several tensors. A tensor of unknown size gets a batch
            of its own.
        min_size: Minimum number of elements that a tensor counts as.
    """
    results: list[tuple[tf.Tensor, ...]] = []
    for part in _batches(tensors, max_elements, min_size):
        with tf.control_dependencies(results[-1] if results else []):
            batch = tensors[part]
            if results and xla.is_tracing():
                batch = _with_dependency(results[-1][0], batch)
            results.append(measure(batch, *(entries[part] for entries in lists)))
    return concatenated(results)


def _with_dependency(measured: tf.Tensor, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the same tensors with a data dependency on `measured`, because XLA drops control dependencies.

    Small tensors are packed together, so only the first of them gets the dependency.
    """
    is_negative = tf.reshape(measured, [-1])[0] < 0  # always False, but XLA cannot infer that
    small = [index for index, tensor in enumerate(tensors) if (tensor.shape.num_elements() or _LARGE) < _LARGE]

    def dependent(tensor: tf.Tensor) -> tf.Tensor:
        bits = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}[tensor.dtype.size]
        return tf.bitcast(tf.bitcast(tensor, bits) | tf.cast(is_negative, bits), tensor.dtype)

    return [tensor if index in small[1:] else dependent(tensor) for index, tensor in enumerate(tensors)]


def _batches(tensors: Sequence[tf.Tensor], max_elements: int, min_size: int) -> Iterator[slice]:
    begin = elements = 0
    for index, tensor in enumerate(tensors):
        tensor_size = tensor.shape.num_elements()
        size = max_elements if tensor_size is None else max(tensor_size, min_size)
        if index > begin and elements + size > max_elements:
            yield slice(begin, index)
            begin, elements = index, 0
        elements += size
    yield slice(begin, len(tensors))


def pack_tensors(tensors: Sequence[tf.Tensor], joined_below: int | None = None) -> list[PackedTensors]:
    """Packs tensors into groups to measure; each tensor is in exactly one group.

    Args:
        tensors: Tensors of any shape and float dtype, converted to float32.
        joined_below: Tensors with fewer elements than this share one group; 2^22 by default.
    """
    limit = _LARGE if joined_below is None else joined_below
    flat = tf.constant([-1])
    values = [tf.cast(tf.reshape(tensor, flat), tf.float32) for tensor in tensors]
    small = [index for index, tensor in enumerate(values) if _is_small(tensor, limit)]
    packed = set(small) if len(small) > 1 else set()
    groups = [PackedTensors(tensor, (index,)) for index, tensor in enumerate(values) if index not in packed]
    return [*groups, _packed_in_rows(values, small)] if packed else groups


def _is_small(tensor: tf.Tensor, limit: int) -> bool:
    """Whether a flat tensor has a known size below the limit."""
    return tensor.shape[0] is not None and tensor.shape[0] < limit


def _packed_in_rows(values: list[tf.Tensor], members: list[int]) -> PackedTensors:
    """Packs flat float32 tensors and their padding into rows with a single concatenation."""
    parts, rows, padding = [], [], []
    zeros = functools.cache(tf.zeros)
    for index in members:
        size = values[index].shape[0]
        rows.append(math.ceil(size / ROW_SIZE))
        padding.append(rows[-1] * ROW_SIZE - size)
        parts += [values[index], zeros((padding[-1],))] if padding[-1] else [values[index]]
    return PackedTensors(tf.reshape(tf.concat(parts, 0), [-1, ROW_SIZE]), tuple(members), tuple(rows), tuple(padding))


def concatenated(results: Iterable[tuple[tf.Tensor, ...]]) -> tuple[tf.Tensor, ...]:
    """Concatenates the results of several groups or batches, statistic by statistic."""
    return tuple(tf.concat(parts, 0) for parts in zip(*results, strict=True))


def in_order(rows: tf.Tensor, groups: list[PackedTensors]) -> tf.Tensor:
    """Reorders the concatenated rows of all groups to the order of the tensors passed to `pack_tensors`."""
    indices = [member for group in groups for member in group.members]
    return tf.gather(rows, sorted(range(len(indices)), key=indices.__getitem__))
