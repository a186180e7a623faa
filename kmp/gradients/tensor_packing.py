"""Many tensors laid out to be measured at once."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from kmp.backend import xla

# Tensors of fewer elements are laid side by side in rows and measured together: fewer, larger operations are quicker
# to trace and to compile. Larger ones go one by one, because laying them out copies them.
_LARGE = 2**22
ROW = 512


@dataclass(frozen=True)
class Group:
    """Tensors that are measured together.

    Args:
        values: float32 of shape `(elements,)` for one tensor; for several, of shape `(rows, ROW)`, each padded with
            zeros to whole rows.
        members: The tensors' places in the list that was given.
        rows: How many rows each has.
        padding: How many zeros were added to each.
    """

    values: tf.Tensor
    members: tuple[int, ...]
    rows: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()

    @property
    def owners(self) -> np.ndarray:
        """int32 of shape `(rows,)`, whose each row is."""
        return np.repeat(np.arange(len(self.members), dtype=np.int32), self.rows)

    @property
    def sizes(self) -> Any:
        """int64 of shape `(members,)`, how many elements each has."""
        if self.rows:
            return np.array(self.rows, np.int64) * ROW - np.array(self.padding, np.int64)
        return tf.reshape(tf.size(self.values, tf.int64), [1])

    def total(self, of_rows: tf.Tensor) -> tf.Tensor:
        """Adds up the rows of each member."""
        return tf.math.unsorted_segment_sum(of_rows, self.owners, len(self.members))


def in_batches(
    measure: Callable[..., tuple[tf.Tensor, ...]],
    tensors: Sequence[tf.Tensor],
    *lists: Sequence[Any],
    at_most: int,
    at_least: int = 0,
) -> tuple[tf.Tensor, ...]:
    """Measures a few tensors at a time, one batch after another, so that what that takes of memory has an end.

    Args:
        measure: Takes as many lists, the same part of each, and returns tensors with a row for each entry; those of the
            first hold no number below 0.
        tensors: At least one.
        *lists: As many of what goes with them.
        at_most: Elements of a batch, unless it is a single tensor. One whose size is unknown is a batch of its own.
        at_least: As many elements a smaller tensor counts for.
    """
    found: list[tuple[tf.Tensor, ...]] = []
    for places in _batches(tensors, at_most, at_least):
        with tf.control_dependencies(found[-1] if found else []):
            batch = tensors[places]
            if found and xla.is_tracing():
                batch = _known_after(found[-1][0], batch)
            found.append(measure(batch, *(others[places] for others in lists)))
    return joined(found)


def _known_after(measured: tf.Tensor, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the same tensors, as XLA can only know them once others were measured: it drops control dependencies.

    Those that are laid out with others wait with the first of them.
    """
    is_negative = tf.reshape(measured, [-1])[0] < 0  # never, which XLA does not know
    small = [place for place, tensor in enumerate(tensors) if (tensor.shape.num_elements() or _LARGE) < _LARGE]

    def waiting(tensor: tf.Tensor) -> tf.Tensor:
        bits = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}[tensor.dtype.size]
        return tf.bitcast(tf.bitcast(tensor, bits) | tf.cast(is_negative, bits), tensor.dtype)

    return [tensor if place in small[1:] else waiting(tensor) for place, tensor in enumerate(tensors)]


def _batches(tensors: Sequence[tf.Tensor], at_most: int, at_least: int) -> Iterator[slice]:
    begin = elements = 0
    for place, tensor in enumerate(tensors):
        elements_of_it = tensor.shape.num_elements()
        size = at_most if elements_of_it is None else max(elements_of_it, at_least)
        if place > begin and elements + size > at_most:
            yield slice(begin, place)
            begin, elements = place, 0
        elements += size
    yield slice(begin, len(tensors))


def pack_tensors(tensors: Sequence[tf.Tensor], joined_below: int | None = None) -> list[Group]:
    """Returns tensors as groups to measure; each tensor is in one of them.

    Args:
        tensors: Of any shape and float dtype.
        joined_below: Those of fewer elements are joined; 2^22 by default.
    """
    limit = _LARGE if joined_below is None else joined_below
    flat = tf.constant([-1])
    values = [tf.cast(tf.reshape(tensor, flat), tf.float32) for tensor in tensors]
    small = [place for place, tensor in enumerate(values) if _is_small(tensor, limit)]
    together = set(small) if len(small) > 1 else set()
    groups = [Group(tensor, (place,)) for place, tensor in enumerate(values) if place not in together]
    return [*groups, _side_by_side(values, small)] if together else groups


def _is_small(tensor: tf.Tensor, limit: int) -> bool:
    """Whether a flat tensor is to be joined with others; one of unknown size is not."""
    return tensor.shape[0] is not None and tensor.shape[0] < limit


def _side_by_side(values: list[tf.Tensor], members: list[int]) -> Group:
    """Lays out flat float32 tensors in rows, by one operation that joins all of them and what fills their last rows."""
    parts, rows, padding = [], [], []
    zeros = functools.cache(tf.zeros)
    for place in members:
        size = values[place].shape[0]
        rows.append(math.ceil(size / ROW))
        padding.append(rows[-1] * ROW - size)
        parts += [values[place], zeros((padding[-1],))] if padding[-1] else [values[place]]
    return Group(tf.reshape(tf.concat(parts, 0), [-1, ROW]), tuple(members), tuple(rows), tuple(padding))


def joined(of_groups: Iterable[tuple[tf.Tensor, ...]]) -> tuple[tf.Tensor, ...]:
    """Returns what was measured of each group, for all of them one after another."""
    return tuple(tf.concat(parts, 0) for parts in zip(*of_groups, strict=True))


def in_order(rows: tf.Tensor, groups: list[Group]) -> tf.Tensor:
    """Returns the rows of all groups in the order in which the tensors were given."""
    places = [member for group in groups for member in group.members]
    return tf.gather(rows, sorted(range(len(places)), key=places.__getitem__))
