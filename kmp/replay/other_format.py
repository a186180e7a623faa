"""Passes a batch in the 16-bit format that the model does not compute in."""

import contextlib

import keras

from kmp.backend.keras_internals import compute_dtypes
from kmp.records.replay import Comparison, Format16, OtherFormat, Overflow
from kmp.replay.passes import Passes, PassResult
from kmp.replay.precision_loss import Reference, gradient_errors, layer_errors
from kmp.scaling import DynamicScale
from kmp.utils.float_formats import FLOAT16

_MOST_NAMED = 100
OTHER_FORMATS: dict[str, Format16] = {"float16": "bfloat16", "bfloat16": "float16"}


def other_format_of(model: keras.Model) -> Format16 | None:
    """Returns the 16-bit format that a model does not compute in.

    `None` for a model that computes in none of the two, or in both.
    """
    used = compute_dtypes(model).intersection(OTHER_FORMATS)
    return OTHER_FORMATS[used.pop()] if len(used) == 1 else None


def other_format(
    passes: Passes, exact: PassResult, usable_scale: float | None, share: float
) -> OtherFormat | None:
    """Passes a batch in the other format, and compares it with float32.

    Args:
        passes: The passes over the batch.
        exact: The pass in float32, which is finite.
        usable_scale: The largest loss scale at which float16 holds the gradients, if any is not
            zero.
        share: What the loss is multiplied by besides the loss scale: see `StepContext.batch_size`.

    Returns:
        What the pass showed; without gradients, of a step that scales no loss. `None` if there is
        no other format, or the pass takes too long or is not possible.
    """
    other = other_format_of(passes.model)
    if other is None:
        return None
    loss_scale = 1.0  # bfloat16 has the exponent range of float32
    if other == FLOAT16.name:
        loss_scale = min(usable_scale or DynamicScale.initial_scale, DynamicScale.initial_scale)
    factor = loss_scale * share
    try:
        result = passes.in_format(other, factor=factor, reference=exact)
    except Exception:  # the user's code may not take this format; the comparison stands
        return None
    # A step in bfloat16 may scale no loss, and float16 would flush its gradients.
    is_unscaled = bool(result.gradients) and (not result.knows_loss or result.factor != factor)
    if is_unscaled:
        loss_scale = 1.0
    if not result.is_finite:
        overflow = _overflow(passes, other, result, exact)
        return OtherFormat(other, loss_scale, is_finite=False, overflow=overflow)
    gradients = []
    if not is_unscaled:
        gradients = gradient_errors(result, Reference(passes.model, exact))
    comparison = Comparison(
        result.marks.output_error,
        layers=layer_errors(result),
        gradients=gradients,
        states=None,
    )
    return OtherFormat(other, loss_scale, is_finite=True, comparison=comparison)


def _overflow(passes: Passes, name: str, result: PassResult, exact: PassResult) -> Overflow:
    """Returns the layers and operations where NaN and Inf begin that float32 does not have."""
    nonfinite = [path for path in result.marks.nonfinite if path not in exact.marks.nonfinite]
    operations = []
    with contextlib.suppress(TimeoutError):  # the names of the layers stand
        watched = passes.in_format(name, factor=result.factor, watch=True)
        operations = list(watched.nonfinite.found)
    return Overflow(operations, outputs=nonfinite[:_MOST_NAMED])
