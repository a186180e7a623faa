"""What is wrong with a batch itself: NaN, Inf, inputs that overflow float16, and targets that are not classes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from kmp.backend import ResourceVariable, equal_random_numbers, state_restored
from kmp.records import BATCH_PARTS, BATCH_X, InvalidTargets
from kmp.utils import DTYPES_16_BIT, FLOAT16, FLOAT32

_ROUNDING = 1e-3  # beyond 0 and 1, as by resizing a mask
# The class and the function of a loss.
_BINARY = keras.losses.BinaryCrossentropy, keras.losses.binary_crossentropy
_SPARSE = keras.losses.SparseCategoricalCrossentropy, keras.losses.sparse_categorical_crossentropy


def nonfinite_part(batch: Sequence[Any]) -> tuple[str | None, str, bool]:
    """Returns the part of a batch, and the key in it, with NaN or Inf, or with inputs that overflow float16.

    And whether it has only the latter.
    """
    for name, part in zip(BATCH_PARTS, batch, strict=False):
        largest = FLOAT16.max if name == BATCH_X else FLOAT32.max
        for key, tensors in _by_key(part):
            for values in map(np.asarray, keras.tree.flatten(tensors)):
                is_float = values.dtype.kind == "f" or values.dtype.name in DTYPES_16_BIT
                if is_float and not (np.abs(values) <= largest).all():
                    return name, key, bool(np.isfinite(values).all())
    return None, "", False


def invalid_binary_targets(model: keras.Model, batch: Sequence[Any]) -> InvalidTargets | None:
    """Returns the first targets of a binary cross-entropy that are not all from 0 to 1."""
    if len(batch) != 2 or batch[1] is None:
        return None  # sample weights may mask targets
    targets = dict(_by_key(batch[1]))
    for index, (key, loss) in enumerate(_by_key(model.loss)):
        if not _is_one_of(loss, _BINARY) or key not in targets:
            continue
        values = np.asarray(targets[key])
        low, high = float(np.min(values, initial=0.0)), float(np.max(values, initial=0.0))
        if np.isfinite(values).all() and (low < -_ROUNDING or high > 1 + _ROUNDING):
            low, high = float(np.min(values)), float(np.max(values))
            return InvalidTargets(low, high, 2, index, key, is_binary=True)
    return None


def _is_one_of(loss: Any, known: tuple[type, Any]) -> bool:
    """Whether a compiled loss is of a class, or it, its function or the name of one."""
    if isinstance(loss, str):
        loss = keras.losses.get(loss)
    return isinstance(loss, known[0]) or loss in known


def _by_key(part: Any) -> list[tuple[str, Any]]:
    """Returns the values of a dictionary or sequence of tensors, each with its index as Python source."""
    if isinstance(part, Mapping):
        return [(f"[{key!r}]", part[key]) for key in sorted(part)]
    if isinstance(part, list | tuple):
        return [(f"[{index}]", value) for index, value in enumerate(part)]
    return [("", part)]


def invalid_targets(
    model: keras.Model, batch: Sequence[Any], restored: Sequence[ResourceVariable] = ()
) -> InvalidTargets | None:
    """Returns the targets of the first output for which they are not all indices of a class."""
    if len(batch) < 2 or not any(
        _is_one_of(loss, _SPARSE) for loss in keras.tree.flatten(model.loss)
    ):
        return None
    with equal_random_numbers(), state_restored(model, restored):
        outputs = model(batch[0], training=False)
    targets, by_key = _by_key(batch[1]), _by_key(outputs)
    if isinstance(batch[1], Mapping) and isinstance(outputs, list | tuple):
        by_key = [
            (f"[{name!r}]", output)
            for name, output in zip(model.output_names, outputs, strict=True)
        ]
    losses = dict(_by_key(model.loss))
    for index, (key, output) in enumerate(by_key):
        loss = losses.get(key, losses.get(f"[{index}]", losses.get("")))
        target = dict(targets).get(key, targets[index][1] if index < len(targets) else None)
        values, shape = np.asarray(target), tuple(getattr(output, "shape", ()))
        if not _is_one_of(loss, _SPARSE) or not np.isfinite(values).all():
            continue
        if (
            len(shape) < 2
            or shape[-1] == 1
            or values.dtype.kind not in "iuf"
            or values.size != math.prod(shape[:-1])
        ):
            continue
        low, high = float(np.min(values, initial=0.0)), float(np.max(values, initial=0.0))
        if np.all(values == np.floor(values)) and (low < 0 or high >= shape[-1]):
            invalid = np.unique(values[(values < 0) | (values >= shape[-1])])
            return InvalidTargets(
                int(np.min(values)),
                int(np.max(values)),
                shape[-1],
                index,
                key * (len(targets) > 1),
                int(invalid[0]) if invalid.size == 1 else None,
                math.prod(shape[1:-1]),
                bool(getattr(model.loss, "from_logits", False)),
            )
    return None
