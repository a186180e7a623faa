"""Finds gradients that do not grow with the loss scale.

They are those of a loss that is not scaled, or clipped.
"""

from kmp.backend import keras_internals
from kmp.backend.keras_internals import layers_by_path
from kmp.diagnosis import thresholds
from kmp.records.replay import UnscaledGradients
from kmp.replay.eager_pass import Passes, PassResult
from kmp.replay.precision_loss import Reference, gradient_errors

_FACTOR = 4.0  # that all gradients grow with, or the loss scale in use if it is larger


def unscaled_gradients(passes: Passes, exact: PassResult) -> UnscaledGradients:
    """Compares a pass in float32 with one at another loss scale."""
    factor = max(_FACTOR, passes.factor)
    scaled = passes.in_float32(factor=factor)
    grown = gradient_errors(scaled, Reference(passes.model, exact))
    kept = [each.kept for each in grown]
    return UnscaledGradients(
        layers=[each.layer for each in grown if each.error > thresholds.UNSCALED_PART],
        are_all=bool(kept) and max(kept) < thresholds.FAITHFUL_PART,
        origin=_origin(passes, scaled, exact, factor),
    )


def _origin(passes: Passes, scaled: PassResult, exact: PassResult, factor: float) -> str:
    """Returns the layer with the backward pass after which gradients do not grow; may be empty.

    The backward pass goes from the loss to the input. The layer that takes the first output whose
    gradient does not grow changes it.
    """
    layers, before = layers_by_path(passes.model), ""
    grown = scaled.marks.activation_gradients
    for path, amax in exact.marks.activation_gradients.items():
        difference = abs(grown.get(path, 0.0) / factor - amax)
        if difference > thresholds.UNSCALED_PART * amax:
            if before not in layers or path not in layers:
                return ""
            is_next = keras_internals.is_input_of(layers[path], layers[before])
            return before if is_next else ""
        before = path
    return ""
