"""Finds gradients that do not grow with the loss scale.

They are those of a loss that is not scaled, or were clipped, or divided by the loss scale.
"""

from dataclasses import replace

from kmp.backend import keras_internals
from kmp.backend.keras_internals import layers_by_path
from kmp.records.replay import UnscaledGradients
from kmp.replay.passes import Passes, PassResult
from kmp.replay.precision_loss import Reference, gradient_errors

_FACTOR = 4.0  # by which all gradients should grow; or the loss scale in use, if that is larger
_TINY = 2.0**-24  # a factor below which the norm of scaled gradients is below any limit
_TOLERANCE = 0.1  # of a ratio of norms that is a power of two
# Of a gradient that does not grow with the loss scale. Derived: one that grows has float32's
# rounding error, about 1e-6, which terms that cancel enlarge. Measured: found ones have 13 %. It is
# not among the thresholds of the diagnosis, because what is recorded does not depend on these.
_UNSCALED_PART = 0.1
_GROWING_PART = 0.5  # of a gradient, if the loss is scaled at all


def unscaled_gradients(passes: Passes, exact: PassResult) -> UnscaledGradients:
    """Compares a pass in float32 with one at another loss scale."""
    factor = max(_FACTOR, passes.factor)
    scaled = passes.in_float32(factor=factor)
    grown = gradient_errors(scaled, Reference(passes.model, exact))
    kept = [each.kept for each in grown]
    found = UnscaledGradients(
        layers=[each.layer for each in grown if each.error > _UNSCALED_PART],
        are_all=bool(kept) and max(kept) < _GROWING_PART,
        origin=_origin(passes, scaled, exact, factor),
    )
    return _with_change(found, passes, scaled) if found.are_all else found


def _with_change(found: UnscaledGradients, passes: Passes, scaled: PassResult) -> UnscaledGradients:
    """Adds what the training step does to the gradients, if passes show it.

    Clipped gradients grow while they are below the limit.
    """
    norm = _norm(scaled)
    if not norm:
        return found
    small, smaller = (_norm(passes.in_float32(factor=each)) for each in (_TINY, _TINY / _FACTOR))
    if smaller and abs(small / smaller / _FACTOR - 1.0) <= _TOLERANCE:
        times = small / _TINY * scaled.factor / norm
        return replace(found, change="clipped", times=times)
    return found


def _norm(result: PassResult) -> float:
    return result.sample(0).total_norm


def _origin(passes: Passes, scaled: PassResult, exact: PassResult, factor: float) -> str:
    """Returns the layer with the backward pass after which gradients do not grow; may be empty.

    The backward pass goes from the loss to the input. The layer that takes the first output whose
    gradient does not grow changes it.
    """
    layers, before = layers_by_path(passes.model), ""
    grown = scaled.marks.activation_gradients
    for path, amax in exact.marks.activation_gradients.items():
        difference = abs(grown.get(path, 0.0) / factor - amax)
        if difference > _UNSCALED_PART * amax:
            if before not in layers or path not in layers:
                return ""
            is_next = keras_internals.is_input_of(layers[path], layers[before])
            return before if is_next else ""
        before = path
    return ""
