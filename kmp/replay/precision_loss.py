"""Compares a pass in the precision of the model with one in float32."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmp.backend import keras_internals
from kmp.backend.keras_internals import sublayers
from kmp.records.gradient_sample import layer_of
from kmp.records.replay import GradientError, LayerError, LostWeight, StateError
from kmp.replay.arrays import array_of, inner_product, norm_of
from kmp.replay.layer_results import LayerResults
from kmp.replay.output_errors import LARGEST_ERROR
from kmp.replay.passes import PassResult, as_array, float_states
from kmp.utils.float_formats import FLOAT16

_MOST_LAYERS = 200
_OF_LENGTH_1 = 1e-3  # the rounding of a norm in float32 is far smaller
_VANISHED = 1e-5  # of the largest gradients of any layer: smaller ones are not compared
_MEASURED_ERROR = 0.1  # of gradients, from which their noise is measured, in another pass
_LARGE_STATE_ERROR = 0.25  # of the update of a state, from which it is recorded, in two more


@dataclass(frozen=True)
class Reference:
    """The passes in float32 with which others are compared.

    Args:
        model: The model.
        exact: The pass over the batch.
        halved: Returns a pass over the first half of the batch: how far its gradients are from
            those of the batch estimates the sampling noise of these. Returns `None` for a batch
            that is too small. It is called if an error is so large that its noise matters.
        after: Returns a pass that begins with the states of `exact`.
        noise_factor: What to multiply this noise by, for the noise in a batch of the training.
        largest_norms: The largest norm of each layer's gradients in float32, in earlier
            comparisons of the training.
    """

    model: keras.Model
    exact: PassResult
    halved: Callable[[], PassResult | None] | None = None
    after: Callable[[], PassResult] | None = None
    noise_factor: float = 1.0
    largest_norms: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def half(self) -> PassResult | None:
        """The pass over the first half of the batch."""
        return self.halved() if self.halved else None

    @cached_property
    def following(self) -> PassResult:
        """The pass that begins with the states of `exact`."""
        assert self.after is not None
        return self.after()


def layer_errors(own: PassResult, measured: LayerResults | None = None) -> list[LayerError]:
    """Returns the relative error of each layer's outputs, in the order of the calls.

    If there are many layers, it returns the largest errors.

    Args:
        own: The pass in the precision of the model, compared with float32.
        measured: The marks of a pass that measured the error that each layer adds.
    """
    new = measured.new_errors if measured else {}
    of_inputs = measured.input_errors if measured else {}
    found = [
        LayerError(path, error, new.get(path), of_inputs.get(path))
        for path, error in own.marks.errors.items()
    ]
    largest_first = sorted(found, key=lambda each: (-(each.new_error or 0.0), -each.error))
    kept = largest_first[:_MOST_LAYERS]
    return [each for each in found if each in kept]


def lost_weights(model: keras.Model) -> list[LostWeight]:
    """Returns the weights with values that are 0 or Inf in a layer that computes in float16."""
    found: dict[str, LostWeight] = {}
    for layer in sublayers(model):
        if layer.compute_dtype != FLOAT16.name:
            continue
        trainable = keras_internals.declared_trainable(layer)
        for weight in (*trainable, *keras_internals.declared_not_trainable(layer)):
            lost = _lost_values(weight)
            if lost.zero > 0 or lost.infinite > 0:
                found[weight.path] = lost
    return list(found.values())


def _lost_values(weight: keras.Variable) -> LostWeight:
    if not keras.backend.is_float_dtype(weight.dtype):
        return LostWeight(weight.path, 0.0, 0.0)
    values = np.asarray(weight.value)  # a few passes, where TensorFlow takes an operation for each
    magnitudes = np.abs(values)
    count = max(int(np.count_nonzero(magnitudes > 0)), 1)
    # All that float16 makes zero, without those that are zero already.
    flushed = int(np.count_nonzero(magnitudes <= 2.0**FLOAT16.flush_exponent))
    flushed -= int(np.count_nonzero(magnitudes == 0))
    infinite = int(np.count_nonzero(magnitudes > FLOAT16.max))
    return LostWeight(weight.path, flushed / count, infinite / count)


def state_errors(result: PassResult, reference: Reference) -> list[StateError] | None:
    """Returns the large errors of the updates of states that are not trainable.

    Returns `None` if there are such errors, but no half of the batch to tell their noise from.

    The noise of a state that does not depend on the batch is 0. The vectors of power iterations are
    left out.
    """
    found: dict[str, StateError] = {}
    for path, variable in float_states(reference.model).items():
        before = array_of(variable.value)
        error = _state_error(path, before, result, reference)
        if error is None:
            continue
        if reference.half is None:
            return None
        found[path] = error
    return list(found.values())


def _state_error(
    path: str, before: np.ndarray, result: PassResult, reference: Reference
) -> StateError | None:
    """Returns the error of the update of a state, if it is large."""
    exact = reference.exact.states.get(path)
    if exact is None or path not in result.states:
        return None
    update = norm_of(exact - before)
    if not np.isfinite(update) or update == 0:
        return None
    error = norm_of(result.states[path] - exact) / update
    if error <= _LARGE_STATE_ERROR:  # not if it is NaN
        return None
    dtype = before.dtype.name
    if reference.half is None:
        return StateError(path, _bounded(error), 0.0, 0.0, dtype)
    # A small noise of few elements may be a coincidence.
    difference = norm_of(reference.half.states[path] - exact)
    noise = difference / update * (1 + 3 / exact.size)
    # The vector of a power iteration has the length 1. Rounding may turn it for long where singular
    # values are nearly equal, but not the norm that it estimates.
    is_direction = exact.size > 1 and abs(norm_of(exact) - 1.0) < _OF_LENGTH_1
    if noise == 0 and is_direction:
        return None
    following = norm_of(reference.following.states[path] - exact)
    return StateError(
        path,
        _bounded(error),
        noise=_bounded(noise),
        next_update=_bounded(following / update),
        dtype=dtype,
    )


def _bounded(error: float) -> float:
    return error if error < LARGEST_ERROR else LARGEST_ERROR  # or NaN


def gradient_errors(result: PassResult, reference: Reference) -> list[GradientError]:
    """Returns the error of the gradients of each layer of a finite pass, the largest first.

    Their noise is measured if an error is so large that it matters.
    """
    sums = _sums_by_layer(result, reference)
    largest = max((each.square for each in sums.values()), default=0.0)
    limit = _VANISHED**2 * largest
    known = {layer: each for layer, each in sums.items() if each.square > limit}
    noise: dict[str, float] = {}
    if any(each.error > _MEASURED_ERROR for each in known.values()):
        noise = _noise_by_layer(result, reference, known)
    found = []
    for layer, each in known.items():
        error = GradientError(
            layer,
            error=each.error,
            kept=each.kept,
            norm=float(np.sqrt(each.square)),
            noise=noise.get(layer),
            largest_norm=reference.largest_norms.get(layer, 0.0),
        )
        found.append(error)
    return sorted(found, key=lambda error: -error.error)[:_MOST_LAYERS]


@dataclass
class _Sums:
    """Sums over the elements of a layer's gradients.

    Attributes:
        difference: The sum of the squares of the differences from float32.
        product: That of the products of both gradients.
        square: That of the squares of the gradients in float32.
    """

    difference: float = 0.0
    product: float = 0.0
    square: float = 0.0

    def add(self, own: np.ndarray, exact: np.ndarray) -> None:
        """Adds the gradients of a variable."""
        self.difference += _square_sum(own - exact)
        self.product += inner_product(own, exact)
        self.square += _square_sum(exact)

    @property
    def error(self) -> float:
        """The error relative to the norm in float32."""
        return float(min(np.sqrt(self.difference / self.square), LARGEST_ERROR))

    @property
    def kept(self) -> float:
        """The part of the gradient in float32 that is left, as a factor."""
        return float(np.clip(self.product / self.square, -LARGEST_ERROR, LARGEST_ERROR))


def _square_sum(values: np.ndarray) -> float:
    return float(np.sum(np.square(values)))


def _sums_by_layer(result: PassResult, reference: Reference) -> dict[str, _Sums]:
    sums: dict[str, _Sums] = {}
    for name, exact in reference.exact.gradients.items():
        own = result.gradients[name]
        if own is None or exact is None:
            continue
        rows = _rows(own, exact)
        sums.setdefault(layer_of(name), _Sums()).add(
            as_array(own, rows, np.float64) / result.factor, as_array(exact, rows, np.float64)
        )
    return sums


def _noise_by_layer(
    result: PassResult, reference: Reference, sums: Mapping[str, _Sums]
) -> dict[str, float]:
    """Returns the sampling noise of the gradients of each layer, relative to their norm.

    It is empty for a batch that is too small.
    """
    half = reference.half
    if half is None:
        return {}
    differences = dict.fromkeys(sums, 0.0)
    for name, exact in reference.exact.gradients.items():
        own, of_half = result.gradients[name], half.gradients[name]
        layer = layer_of(name)
        if own is None or exact is None or layer not in sums:
            continue
        difference = math.nan  # of a gradient that half of the batch does not have
        if of_half is not None:
            rows = _rows(own, exact)
            whole = as_array(exact, rows, np.float64)
            difference = _square_sum(as_array(of_half, rows, np.float64) - whole)
        differences[layer] += difference
    noise = {}
    for layer, difference in differences.items():
        relative = math.sqrt(difference / sums[layer].square)
        if not math.isnan(relative):
            noise[layer] = min(relative * reference.noise_factor, LARGEST_ERROR)
    return noise


def _rows(own: Any, exact: Any) -> np.ndarray | None:
    """Returns the rows of an embedding; float16 may have rounded an index to that of another."""
    if not isinstance(exact, tf.IndexedSlices):
        return None
    return np.union1d(own.indices, exact.indices)
