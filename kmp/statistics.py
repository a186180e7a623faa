"""Statistics of gradients as pure tensor operations; they run eagerly, in `tf.function` and under XLA."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from keras import ops

from kmp._formats import FLOAT16, FLOAT32

# Gradients up to this many elements are laid side by side in rows and measured together: fewer, larger operations are
# quicker to trace and to compile. Larger ones go one by one, because laying them out copies them.
_SMALL = 2**22
_ROW = 512

# On the elements only operations that TensorFlow has on a GPU: it adds, compares, joins and reduces int32 on the host.
_MAGNITUDE = 0x7FFFFFFF
_BIASED_EXPONENTS = 2**FLOAT32.exponent_bits
_SUBNORMAL_EXPONENTS = FLOAT32.fraction_bits
_EXACT_IN_FLOAT32 = 2 ** (FLOAT32.fraction_bits + 1)


class GradientStatistics(NamedTuple):
    """What is measured of each gradient; a row or entry for each variable.

    Args:
        counts: int32 of shape `(variables, 280)`: elements by exponent, as in `kmp.records.ExponentHistogram`.
        amax: float32 of shape `(variables,)`, the largest magnitude; nan if there is one, 0 for no elements. One
            that is subnormal in float32 may be told as 0.
        square_sum: float64 of shape `(variables,)`, the sum of the squares of all elements.
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
        lost: Elements that changed by less than 2^-11 of their magnitude: a float16 weight would not have moved.
    """

    weight_square_sum: tf.Tensor
    update_square_sum: tf.Tensor
    changed: tf.Tensor
    lost: tf.Tensor


def values_of(gradient: Any) -> tf.Tensor:
    """Returns the values of a gradient, dense or `tf.IndexedSlices`."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else ops.convert_to_tensor(gradient)


def divided(gradient: Any, scale: Any, dtype: str) -> Any:
    """Returns a gradient, dense or `tf.IndexedSlices`, divided by a scalar float32 and cast to `dtype`."""
    values = ops.cast(ops.divide(values_of(gradient), scale), dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values


def nonfinite(tensor: Any) -> tf.Tensor:
    """Returns 1.0 if any element is inf or nan, else 0.0: a scalar float32, so that flags add up across replicas.

    Args:
        tensor: A gradient or loss, of any shape and float dtype.
    """
    return 1.0 - ops.cast(ops.all(ops.isfinite(values_of(tensor))), "float32")


def of_gradients(gradients: Sequence[Any]) -> GradientStatistics:
    """Counts the elements of each gradient by binary exponent, and measures its size.

    The counts are exact: they are of the bits, because TensorFlow compares float32 subnormals as zero.

    Args:
        gradients: At least one; tensors or `tf.IndexedSlices` of any float dtype, converted to float32; `None` has no
            elements. Each has fewer than 2^31 elements.
    """
    groups = _groups(gradients)
    by_exponent, amax, square_sum = _joined(_measure(group) for group in groups)
    nothing = tf.zeros([len(gradients)], tf.int32)
    lowest, highest = by_exponent[:, 0], by_exponent[:, -1]
    zeros = tf.cond(tf.reduce_any(lowest > 0), lambda: _joined(map(_count_zeros, groups))[0], lambda: nothing)
    subnormal, inf = tf.cond(
        tf.reduce_any((lowest != zeros) | (highest > 0)),
        lambda: _joined(map(_count_rare, groups)),
        lambda: (tf.zeros([len(gradients), _SUBNORMAL_EXPONENTS], tf.int32), nothing),
    )
    nan = highest - inf
    amax = tf.where(nan > 0, math.nan, tf.where(inf > 0, math.inf, amax))
    columns = (zeros[:, None], subnormal, by_exponent[:, 1:-1], inf[:, None], nan[:, None])
    return GradientStatistics(*(_in_order(rows, groups) for rows in (tf.concat(columns, 1), amax, square_sum)))


def of_updates(before: Sequence[Any], after: Sequence[Any]) -> UpdateStatistics:
    """Measures what an optimizer's step did to each variable.

    Args:
        before: At least one tensor: a copy of each variable, of any shape and float dtype.
        after: The same after the step.
    """
    old_groups, new_groups = _groups(before), _groups(after)
    joined = _joined(_measure_update(old, new.values) for old, new in zip(old_groups, new_groups, strict=True))
    return UpdateStatistics(*(_in_order(value, old_groups) for value in joined))


@dataclass(frozen=True)
class _Group:
    """Gradients that are measured together.

    Args:
        values: float32 of shape `(elements,)` for one gradient; for several, of shape `(rows, _ROW)`, each padded with
            zeros to whole rows.
        members: The gradients' places in the list that was given.
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

    def total(self, of_rows: tf.Tensor) -> tf.Tensor:
        """Adds up the rows of each member."""
        return tf.math.unsorted_segment_sum(of_rows, self.owners, len(self.members))


def _groups(gradients: Sequence[Any]) -> list[_Group]:
    values = [tf.zeros([0]) if gradient is None else values_of(gradient) for gradient in gradients]
    flat = tf.constant([-1])
    values = [tf.cast(tf.reshape(tensor, flat), tf.float32) for tensor in values]
    small = [place for place, tensor in enumerate(values) if tensor.shape[0] is not None and tensor.shape[0] <= _SMALL]
    alone = [place for place in range(len(values)) if place not in set(small)]
    groups = [_Group(values[place], (place,)) for place in alone]
    return [*groups, _side_by_side(values, small)] if small else groups


def _side_by_side(values: list[tf.Tensor], members: list[int]) -> _Group:
    """Lays out flat float32 tensors in rows, by one operation that joins all of them and what fills their last rows."""
    parts, rows, padding = [], [], []
    zeros = functools.cache(tf.zeros)
    for place in members:
        size = values[place].shape[0]
        rows.append(math.ceil(size / _ROW))
        padding.append(rows[-1] * _ROW - size)
        parts += [values[place], zeros((padding[-1],))] if padding[-1] else [values[place]]
    return _Group(tf.reshape(tf.concat(parts, 0), [-1, _ROW]), tuple(members), tuple(rows), tuple(padding))


def _joined(of_groups: Iterable[tuple[tf.Tensor, ...]]) -> tuple[tf.Tensor, ...]:
    return tuple(tf.concat(parts, 0) for parts in zip(*of_groups, strict=True))


def _in_order(rows: tf.Tensor, groups: list[_Group]) -> tf.Tensor:
    places = [member for group in groups for member in group.members]
    return tf.gather(rows, sorted(range(len(places)), key=places.__getitem__))


def _measure(group: _Group) -> tuple[tf.Tensor, ...]:
    """Returns counts by biased exponent, 255 for inf and nan; the largest magnitude; the sum of squares."""
    unsigned = tf.bitcast(group.values, tf.uint32)
    signed_exponent = tf.bitwise.right_shift(unsigned, tf.constant(FLOAT32.fraction_bits, tf.uint32))
    counts = _histograms(tf.bitcast(signed_exponent, tf.int32), 2 * _BIASED_EXPONENTS, group)
    if group.rows:
        counts -= tf.one_hot([0], 2 * _BIASED_EXPONENTS, dtype=tf.int32) * np.array(group.padding, np.int32)[:, None]
    return counts[:, :_BIASED_EXPONENTS] + counts[:, _BIASED_EXPONENTS:], _amax(group), _square_sum(group)


def _count_zeros(group: _Group) -> tuple[tf.Tensor]:
    magnitude = tf.bitwise.bitwise_and(tf.bitcast(group.values, tf.int32), _MAGNITUDE)
    zeros = _how_many(tf.logical_not(tf.cast(magnitude, tf.bool)), group)
    return (zeros - np.array(group.padding, np.int32) if group.rows else zeros,)


def _count_rare(group: _Group) -> tuple[tf.Tensor, tf.Tensor]:
    """Counts subnormals by exponent, and infs.

    A subnormal is its fraction times 2^-149, and an integer below 2^24 converts to float32 exactly, so the converted
    fraction's exponent, from 0 to 22, gives the subnormal's. Magnitudes of 2^23 and more have a higher one.
    """
    magnitude = tf.bitwise.bitwise_and(tf.bitcast(group.values, tf.int32), _MAGNITUDE)
    bits = tf.bitcast(tf.cast(magnitude, tf.float32), tf.int32)
    counts = _histograms(tf.bitwise.right_shift(bits, FLOAT32.fraction_bits), _BIASED_EXPONENTS, group)
    first = FLOAT32.max_exponent  # the biased exponent of 1.0
    return counts[:, first : first + _SUBNORMAL_EXPONENTS], _how_many(tf.math.is_inf(group.values), group)


def _measure_update(old: _Group, new: tf.Tensor) -> tuple[tf.Tensor, ...]:
    update = dataclasses.replace(old, values=new - old.values)
    changed = tf.not_equal(update.values, 0.0)
    small = tf.abs(update.values) < 2.0 ** -(FLOAT16.fraction_bits + 1) * tf.abs(old.values)
    counts = (tf.cast(_how_many(mask, old), tf.float64) for mask in (changed, tf.logical_and(changed, small)))
    return _square_sum(old), _square_sum(update), *counts


def _histograms(bins: tf.Tensor, size: int, group: _Group) -> tf.Tensor:
    """Returns int32 counts of shape `(members, size)`; `size` is a power of two."""
    if group.rows:
        bins = tf.reshape(tf.bitwise.bitwise_or(group.owners[:, None] * size, bins), [-1])
    weights = tf.zeros([0], tf.int32)
    # tf.math.bincount works out its size on the device, which XLA refuses.
    counts = tf.raw_ops.DenseBincount(input=bins, size=size * len(group.members), weights=weights, binary_output=False)
    return tf.reshape(counts, [-1, size])


def _how_many(mask: tf.Tensor, group: _Group) -> tf.Tensor:
    """Returns int32 of shape `(members,)`."""
    if group.rows:
        return group.total(tf.cast(tf.reduce_sum(tf.cast(mask, tf.float32), 1), tf.int32))
    elements = mask.shape[0]
    is_exact = elements is not None and elements <= _EXACT_IN_FLOAT32
    # Half the bytes of int64, where float32 counts exactly.
    count = tf.reduce_sum(tf.cast(mask, tf.float32 if is_exact else tf.int64), keepdims=True)
    return tf.cast(count, tf.int32)


def _amax(group: _Group) -> tf.Tensor:
    """Returns float32 of shape `(members,)`; 0 for no elements."""
    axis = 1 if group.rows else None
    highest = tf.reduce_max(group.values, axis, keepdims=not group.rows)
    amax = tf.maximum(highest, -tf.reduce_min(group.values, axis, keepdims=not group.rows))
    if group.rows:
        amax = tf.math.unsorted_segment_max(amax, group.owners, len(group.members))
    return tf.maximum(amax, 0.0)


def _square_sum(group: _Group) -> tf.Tensor:
    """Returns float64 of shape `(members,)`: the square of a float32 may lie outside float32's range."""
    values = tf.cast(group.values, tf.float64)
    if group.rows:
        return group.total(tf.reduce_sum(tf.square(values), 1))
    return tf.reshape(2.0 * tf.nn.l2_loss(values), [1])
