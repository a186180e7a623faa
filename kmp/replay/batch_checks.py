"""Finds what is wrong with a batch itself.

A batch may have NaN, Inf, inputs that overflow float16, and targets that are not classes.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kmp.backend.keras_internals import compute_dtypes, sublayers
from kmp.records.replay import BATCH_PARTS, BATCH_X, BatchCheck, InvalidTargets, NonfinitePart
from kmp.replay.passes import Passes, float_states
from kmp.replay.precision_loss import lost_weights
from kmp.utils.float_formats import DTYPES_16_BIT, FLOAT16, FLOAT32, computing_format

_MOST_NAMED = 100
_ROUNDED = 1e-3  # of a target beyond 0 and 1, as by resizing a mask
# Losses, each as its class and its function.
_BINARY = keras.losses.BinaryCrossentropy, keras.losses.binary_crossentropy
_SPARSE = keras.losses.SparseCategoricalCrossentropy, keras.losses.sparse_categorical_crossentropy


def check_batch(passes: Passes) -> BatchCheck:
    """Returns what is wrong with inputs and weights, before any training step."""
    batch, states = passes.batch, _states_in_16_bits(passes)
    nonfinite = nonfinite_rows(passes.model, batch)
    variables = [path for path, each in passes.variables.items() if not np.isfinite(each).all()]
    largest_input, key = _largest_input(batch[0])
    return BatchCheck(
        nonfinite=nonfinite and nonfinite.part,
        has_sample_weight=len(batch) > 2 and batch[2] is not None,
        nonfinite_variables=variables[:_MOST_NAMED],
        lost_weights=lost_weights(passes.model),
        states_in_16_bits=len(states),
        names_of_states=[name for name in states if name][:_MOST_NAMED],
        largest_input=largest_input,
        largest_input_key=key,
    )


def _states_in_16_bits(passes: Passes) -> list[str]:
    """Returns the names of variables in 16 bits that a step assigns and no pass compares.

    The name of a variable that is no attribute of the model is empty.
    """
    model = passes.model
    assigned = [
        id(each.handle)
        for each in passes.restored
        if each.is_assigned and each.dtype.name in DTYPES_16_BIT
    ]
    if not assigned:
        return []
    compared = {id(each.value.handle) for each in float_states(model).values()}
    names = {id(each.value.handle): each.path for each in model.trainable_variables}
    for name, value in attributes_of(sublayers(model)):
        if isinstance(value, tf.Variable):
            names[id(value.handle)] = name
    return [names.get(each, "") for each in assigned if each not in compared]


def attributes_of(layers: Iterable[keras.Layer]) -> Iterator[tuple[str, Any]]:
    """Yields the names and values of the attributes of layers.

    Of a list, a tuple or a dictionary, it yields the items.
    """
    for layer in layers:
        for attribute, value in vars(layer).items():
            items: Iterable[Any] = value if isinstance(value, list | tuple) else [value]
            if isinstance(value, Mapping):
                items = value.values()
            for item in items:
                yield f"{layer.name}.{attribute}", item


class NonfiniteRows(NamedTuple):
    """The rows of a batch in which a tensor has NaN, Inf or inputs that overflow float16.

    Attributes:
        part: Which tensor it is, and whether all of its values are finite.
        rows: The indices of these rows.
        of: The number of rows.
    """

    part: NonfinitePart
    rows: list[int]
    of: int


def nonfinite_rows(model: keras.Model, batch: Sequence[Any]) -> NonfiniteRows | None:
    """Returns the rows of the first such tensor of a batch, or `None` if there is none."""
    number_format = computing_format(compute_dtypes(model))
    largest_input = FLOAT16.max if number_format is FLOAT16 else FLOAT32.max
    for name, part in zip(BATCH_PARTS, batch, strict=False):
        largest = largest_input if name == BATCH_X else FLOAT32.max
        for key, tensors in _by_key(part):
            for values in map(np.asarray, keras.tree.flatten(tensors)):
                if not _is_float(values) or not values.ndim:
                    continue
                fits = np.abs(values) <= largest
                rows = np.flatnonzero(~fits.reshape(len(fits), -1).all(axis=1))
                if rows.size:
                    is_too_large = bool(np.isfinite(values).all())
                    found = NonfinitePart(name, key, is_too_large)
                    return NonfiniteRows(found, rows.tolist(), len(values))
    return None


def _largest_input(x: Any) -> tuple[float, str]:
    """Returns the largest finite magnitude among inputs that are floats, and the key of its tensor.

    Integers have none, because they may be indices.
    """
    largest = 0.0, ""
    for key, tensors in _by_key(x):
        for values in map(np.asarray, keras.tree.flatten(tensors)):
            if _is_float(values):
                magnitudes = np.abs(values.astype(np.float32, copy=False))
                amax = float(magnitudes.max(initial=0.0, where=np.isfinite(magnitudes)))
                largest = max(largest, (amax, key))
    return largest


def _is_float(values: np.ndarray) -> bool:
    return values.dtype.kind == "f" or values.dtype.name in DTYPES_16_BIT


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
        if np.isfinite(values).all() and (low < -_ROUNDED or high > 1 + _ROUNDED):
            low, high = float(np.min(values)), float(np.max(values))
            return InvalidTargets(low, high, 2, index, key, is_binary=True)
    return None


def _is_one_of(loss: Any, known: tuple[type, Any]) -> bool:
    """Whether a compiled loss is an instance of a class, that class, its function or its name."""
    if isinstance(loss, str):
        loss = keras.losses.get(loss)
    return isinstance(loss, known[0]) or loss in known


def _by_key(part: Any) -> list[tuple[str, Any]]:
    """Returns the values of a dictionary or sequence of tensors, each with its index as source."""
    if isinstance(part, Mapping):
        return [(f"[{key!r}]", part[key]) for key in sorted(part)]
    if isinstance(part, list | tuple):
        return [(f"[{index}]", value) for index, value in enumerate(part)]
    return [("", part)]


def invalid_targets(passes: Passes) -> InvalidTargets | None:
    """Returns the targets of the first output for which they are not all indices of a class."""
    model, batch = passes.model, passes.batch
    if not passes.is_of_keras or len(batch) < 2:
        return None
    if not any(_is_one_of(loss, _SPARSE) for loss in keras.tree.flatten(model.loss)):
        return None
    call = next((each for each in passes.graph.calls if each.layer == id(model)), None)
    if call is None:
        return None
    for output in _outputs(model, batch[1], call.returned):
        if _is_one_of(output.loss, _SPARSE) and _are_invalid(output):
            return _described(output, model)
    return None


class _Output(NamedTuple):
    """An output of a model: its index in order, its key, its shape, its loss and its targets."""

    number: int
    key: str
    shape: tuple[int, ...]
    loss: Any
    targets: np.ndarray
    target_key: str  # empty if `y` has one tensor only


def _outputs(model: keras.Model, y: Any, outputs: Any) -> Iterator[_Output]:
    targets, by_key = _by_key(y), _by_key(outputs)
    if isinstance(y, Mapping) and isinstance(outputs, list | tuple):
        names = zip(model.output_names, outputs, strict=True)
        by_key = [(f"[{name!r}]", output) for name, output in names]
    losses, targets_by_key = dict(_by_key(model.loss)), dict(targets)
    for index, (key, output) in enumerate(by_key):
        in_order = targets[index][1] if index < len(targets) else None
        yield _Output(
            index,
            key,
            tuple(getattr(output, "shape", ())),
            losses.get(key, losses.get(f"[{index}]", losses.get(""))),
            np.asarray(targets_by_key.get(key, in_order)),
            key if len(targets) > 1 else "",
        )


def _are_invalid(output: _Output) -> bool:
    """Whether targets are integers, and one of them is not the index of a class."""
    values, shape = output.targets, output.shape
    if values.dtype.kind not in "iuf" or not np.isfinite(values).all():
        return False
    if len(shape) < 2 or shape[-1] in (None, 1):
        return False
    per_example = math.prod(size or 1 for size in shape[1:-1])
    if None not in shape[1:-1] and values.size != len(values) * per_example:
        return False
    if not np.all(values == np.floor(values)):
        return False
    return bool(((values < 0) | (values >= shape[-1])).any())


def _described(output: _Output, model: keras.Model) -> InvalidTargets:
    values, classes = output.targets, output.shape[-1]
    invalid = np.unique(values[(values < 0) | (values >= classes)])
    from_logits = getattr(model.loss, "from_logits", False)
    if isinstance(model.loss, keras.losses.SparseCategoricalCrossentropy):
        from_logits = model.loss.get_config()["from_logits"]  # Keras 3.16 has it there only
    return InvalidTargets(
        smallest=int(np.min(values)),
        largest=int(np.max(values)),
        classes=classes,
        output=output.number,
        key=output.target_key,
        only_invalid=int(invalid[0]) if invalid.size == 1 else None,
        per_example=math.prod(size or 1 for size in output.shape[1:-1]),
        from_logits=bool(from_logits),
    )
