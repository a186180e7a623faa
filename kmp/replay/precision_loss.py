"""Compares a pass in the precision of the model with one in float32: outputs, and gradients by layer."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import keras
import numpy as np
import tensorflow as tf

from kmp.backend import keras_internals, sublayers
from kmp.records import (
    HARMFUL_GRADIENT_ERROR,
    GradientError,
    LayerError,
    LostWeight,
    StateError,
    layer_of,
)
from kmp.replay.eager_pass import PassResult, as_array, float_states
from kmp.replay.layer_marks import LARGEST_ERROR
from kmp.utils import FLOAT16

_MOST_LAYERS = 200
_VANISHED = (
    1e-5  # a gradient that small, relative to the largest of a layer, may be nothing but rounding
)


def layer_errors(own: PassResult, exact: PassResult) -> list[LayerError]:
    """Returns the relative error of each layer's outputs, in the order of the calls; the largest ones of many."""
    new, of_inputs = exact.marks.new_errors, exact.marks.input_errors
    found = [
        LayerError(path, error, new.get(path), of_inputs.get(path))
        for path, error in own.marks.errors.items()
    ]
    kept = sorted(found, key=lambda each: -(each.new_error or 0.0))[:_MOST_LAYERS]
    return [each for each in found if each in kept]


def lost_weights(model: keras.Model) -> list[LostWeight]:
    """Returns the weights with values that are 0 or Inf in a layer that computes in float16."""
    found: dict[str, LostWeight] = {}
    for layer in sublayers(model):
        weights = (
            *keras_internals.declared_trainable(layer),
            *keras_internals.declared_not_trainable(layer),
        )
        for weight in weights if layer.compute_dtype == FLOAT16.name else ():
            if not keras.backend.is_float_dtype(weight.dtype):
                continue
            size = tf.abs(weight.value)
            is_nonzero = size > 0
            count = tf.maximum(tf.math.count_nonzero(is_nonzero), 1)
            zero = tf.math.count_nonzero(is_nonzero & (size <= 2.0**FLOAT16.flush_exponent)) / count
            infinite = tf.math.count_nonzero(size > FLOAT16.max) / count
            if zero > 0 or infinite > 0:
                found[weight.path] = LostWeight(weight.path, float(zero), float(infinite))
    return list(found.values())


def state_errors(
    model: keras.Model,
    own: PassResult,
    exact: PassResult,
    half: PassResult | None,
    after: Callable[[], PassResult],
) -> list[StateError] | None:
    """Returns the large errors of the updates of states that are not trainable.

    Or `None` if there are such errors, but no `half` to tell their noise from.

    Args:
        model: The model.
        own: The pass in the precision of the model.
        exact: The pass in float32.
        half: A pass in float32 over the first half of the batch, or `None` for a batch that is too
            small.
        after: Returns a pass in float32 that begins with the states of `exact`.

    States that do not depend on the batch, such as the vector of a power iteration, are left out:
    nothing tells how much of their update is needed.
    """
    found = {}
    for path, variable in float_states(model).items():
        if path not in exact.states:
            continue
        value = exact.states[path]
        update = float(np.linalg.norm(value - np.asarray(variable.value)))
        if path not in own.states or not np.isfinite(update) or update == 0:
            continue
        error = np.linalg.norm(own.states[path] - value) / update
        if error <= HARMFUL_GRADIENT_ERROR:  # not if it is NaN
            continue
        if half is None:
            return None
        # Of few elements, a small noise may be a coincidence.
        noise = np.linalg.norm(half.states[path] - value) / update * (1 + 3 / value.size)
        if noise > 0:
            found[path] = (
                update,
                float(error) if error < LARGEST_ERROR else LARGEST_ERROR,
                float(noise),
            )
    if not found:
        return []
    later = after()
    following = {
        path: float(np.linalg.norm(later.states[path] - exact.states[path])) for path in found
    }
    return [
        StateError(
            path, error, min(noise, LARGEST_ERROR), min(following[path] / update, LARGEST_ERROR)
        )
        for path, (update, error, noise) in found.items()
    ]


def gradient_errors(
    own: PassResult,
    exact: PassResult,
    half: PassResult | None = None,
    noise_factor: float = 1.0,
    largest_norms: Mapping[str, float] = MappingProxyType({}),
) -> list[GradientError]:
    """Returns the error of the gradients of each layer, the largest first.

    Args:
        own: The pass in the precision of the model; finite.
        exact: The pass in float32.
        half: A pass in float32 over the first half of the batch: how far its gradients are from
            those of the batch estimates the sampling noise of these.
        noise_factor: What to multiply this noise by, for the noise in a batch of the training.
        largest_norms: The largest norm of each layer's gradients in float32, in earlier comparisons
            of the training.
    """
    sums: dict[str, np.ndarray] = {}
    for name, theirs in exact.gradients.items():
        ours, of_half = own.gradients[name], None if half is None else half.gradients[name]
        if ours is None or theirs is None:
            continue
        # The rows of an embedding; float16 may have rounded an index to that of another row.
        rows = (
            np.union1d(ours.indices, theirs.indices)
            if isinstance(theirs, tf.IndexedSlices)
            else None
        )
        mine, reference = (
            as_array(ours, rows, np.float64) / own.factor,
            as_array(theirs, rows, np.float64),
        )
        noise = (
            np.nan
            if of_half is None
            else np.sum(np.square(as_array(of_half, rows, np.float64) - reference))
        )
        values = [
            np.sum(np.square(mine - reference)),
            np.vdot(mine, reference),
            np.sum(np.square(reference)),
            noise,
        ]
        sums[layer_of(name)] = sums.get(layer_of(name), np.zeros(4)) + np.array(values, np.float64)
    largest = max((square for _, _, square, _ in sums.values()), default=0.0)
    found = []
    for layer, (difference, product, square, noise) in sums.items():
        if not square > _VANISHED**2 * largest:
            continue
        relative_noise = np.sqrt(noise / square) * noise_factor
        found.append(
            GradientError(
                layer,
                error=float(min(np.sqrt(difference / square), LARGEST_ERROR)),
                kept=float(np.clip(product / square, -LARGEST_ERROR, LARGEST_ERROR)),
                norm=float(np.sqrt(square)),
                noise=(
                    None if np.isnan(relative_noise) else float(min(relative_noise, LARGEST_ERROR))
                ),
                largest_norm=largest_norms.get(layer, 0.0),
            )
        )
    return sorted(found, key=lambda each: -each.error)[:_MOST_LAYERS]
