"""Replays one training batch in the precision of the model and in float32, to find what float16 loses."""

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from kmp.backend import keras_internals, layers_by_path
from kmp.records import GradientSample, Replay, StateError, is_harmful, layer_of
from kmp.replay.batch_capture import is_ragged
from kmp.replay.batch_checks import invalid_binary_targets, invalid_targets, nonfinite_part
from kmp.replay.eager_pass import Passes, PassResult, as_array
from kmp.replay.layer_marks import LayerMarks
from kmp.replay.layer_search import find_float32_layers
from kmp.replay.precision_loss import gradient_errors, layer_errors, lost_weights, state_errors
from kmp.utils import FLOAT16, FLOAT32, path_and_parents

Failure = Literal["loss", "gradients"]

_MOST_NAMED = 100
_FACTOR = 4.0  # that all gradients grow with, or the loss scale in use if it is larger
_UNSCALED = 0.1  # relative error of a gradient with a part that does not grow: of 13 % and more
_SEARCH_SECONDS = 4.0  # more, for the search in a batch that float16 ruins
_SPARE_BITS = 2  # below an overflow in the backward pass


def replay(
    passes: Passes,
    *,
    step: int,
    loss_scale: float,
    batch_size: int | None = None,
    failed: Failure | None = None,
    largest_norms: Mapping[str, float] = MappingProxyType({}),
) -> tuple[Replay, GradientSample | None]:
    """Replays a batch, and restores the model.

    Args:
        passes: The passes over the batch. The first ones in each precision have to end before their
            deadline. If these show that float16 ruins the batch, the search for operations and
            layers may take 4 seconds more.
        step: The number of the training step of the batch.
        loss_scale: The loss scale in use.
        batch_size: The number of examples in a training batch, if the passes have only some of
            them: the gradients of a mean over fewer examples are larger.
        failed: `"loss"` or `"gradients"`: what was not finite in the training step of the batch. If
            it is finite in a replay of some examples, they are replayed again as a batch of that
            size: a sum over the batch may overflow.
        largest_norms: The largest norm of each layer's gradients in float32, in earlier comparisons
            of the training.

    Returns:
        What the passes showed, and the gradients in float32, or `None` if invalid targets make the
        loss fail.

    Raises:
        TimeoutError: If the first passes in each precision take too long.
    """
    passes = replace(passes, has_dropout=failed is not None)
    size = batch_size or passes.examples
    result = _replay(passes, step, loss_scale, size, largest_norms)
    is_finite = result[0].loss is not None if failed == "loss" else result[0].is_finite
    if failed and is_finite and passes.step.run and size > passes.examples:
        with contextlib.suppress(
            TimeoutError, tf.errors.ResourceExhaustedError
        ):  # the first result stands
            tiled = replace(passes, data=_tiled(passes.data, size))
            result = _replay(tiled, step, loss_scale, size, largest_norms)
    return result


def failing_part(
    passes: Passes, parts: Sequence[Any], failed: Failure, loss_scale: float, batch_size: int
) -> Any:
    """Returns the first part of a batch that fails as the batch did, in a pass in the precision of the model.

    A single example may have made a step fail. Without such a part before the deadline of the
    passes, returns the first one. The other arguments are those of `replay`.
    """
    with contextlib.suppress(TimeoutError):
        for part in parts:
            passes = replace(passes, data=part)
            try:
                result = passes.in_own_precision(
                    factor=loss_scale * _share_of_batch(passes, batch_size)
                )
            except tf.errors.InvalidArgumentError:  # as in `_replay`
                return part
            if not (
                math.isfinite(result.loss)
                if failed == "loss" and passes.step.run
                else result.is_finite
            ):
                return part
    return parts[0]


def _share_of_batch(passes: Passes, batch_size: int) -> float:
    """Returns what the gradients of a batch are multiplied by: those of a sum grow with it, those of a mean do not."""
    is_sum = any(
        getattr(loss, "reduction", None) == "sum" for loss in keras.tree.flatten(passes.model.loss)
    )
    return 1.0 if is_sum else passes.examples / batch_size


def _tiled(data: Any, size: int) -> Any:
    """Returns a batch of this size, with the examples of a smaller one again and again."""
    return keras.tree.map_structure(
        lambda tensor: tf.gather(tensor, tf.range(size) % tf.shape(tensor)[0]), data
    )


def _replay(
    passes: Passes,
    step: int,
    loss_scale: float,
    batch_size: int,
    largest_norms: Mapping[str, float],
) -> tuple[Replay, GradientSample | None]:
    """Checks the batch, passes it in float32, then in the precision of the model, and compares the two passes."""
    part = _share_of_batch(passes, batch_size)
    passes = replace(passes, factor=loss_scale * part)
    searching = replace(passes, deadline=passes.deadline + _SEARCH_SECONDS)
    found = {"loss_scale": loss_scale} | _check_batch(passes)

    try:
        exact = passes.in_float32(measure=True)
    except (
        tf.errors.InvalidArgumentError
    ):  # TensorFlow refuses a batch with invalid targets, or its loss is NaN
        if found["invalid_targets"] is None:
            raise
        exact = None
    has_other_reason = found["nonfinite_part"] is not None or found["nonfinite_variables"]
    if exact is None or (found["invalid_targets"] and not exact.is_finite and not has_other_reason):
        return (
            Replay(
                **found, loss=None, float32_loss=None, is_finite=False, is_finite_in_float32=False
            ),
            None,
        )
    found |= _examine_float32_pass(passes, exact)

    own = passes.in_own_precision(reference=exact)
    usable = _usable_scale(exact, own.marks, part)
    found["usable_scale"] = usable
    flushed = {
        path: _flushed_share(own.gradients[path], each) for path, each in exact.gradients.items()
    }
    found |= {
        "is_finite": own.is_finite,
        "loss": _finite_loss(passes, own),
        "flushed": {path: share for path, share in flushed.items() if share},
        "float32_layers": [],
    }

    if not own.is_finite:
        found |= _find_operations(searching, exact)
    if not own.is_finite and exact.is_finite:
        factor = min(max(1.0, usable or 1.0), loss_scale) * part
        found["float32_layers"], _ = find_float32_layers(
            searching, lambda result: result.is_finite, exact, factor
        )
        if not passes.has_dropout and not math.isfinite(
            own.loss
        ):  # the loss of the training step was finite
            found |= _compare_compiled(passes, own, exact)
    elif own.is_finite and exact.is_finite and not (own.is_random or exact.is_random):
        found |= _compare(
            passes, searching, own, exact, math.sqrt(part), (usable or 0.0) * part, largest_norms
        )
    sample = None if passes.step.run is None else exact.sample(step)
    return Replay(**found), sample


def _check_batch(passes: Passes) -> dict[str, Any]:
    """Returns what is wrong with the batch and the weights, before any training step."""
    model, batch = passes.model, passes.batch
    part, key, is_part_finite = nonfinite_part(batch)
    nonfinite_variables = [
        path for path, variable in passes.variables.items() if not np.isfinite(variable).all()
    ]
    return {
        "examples": passes.examples,
        "nonfinite_variables": nonfinite_variables[:_MOST_NAMED],
        "nonfinite_part": part,
        "nonfinite_key": key,
        "is_part_finite": is_part_finite,
        "has_sample_weight": len(batch) > 2 and batch[2] is not None,
        "lost_weights": lost_weights(model),
        "float16_states": sum(
            each.is_assigned and each.dtype == tf.float16 for each in passes.restored
        ),
        "invalid_targets": (
            invalid_targets(model, batch, passes.restored) if passes.step.is_of_keras else None
        ),
    }


def _examine_float32_pass(passes: Passes, exact: PassResult) -> dict[str, Any]:
    """Returns what the pass in float32 shows."""
    model, gradients = passes.model, exact.marks.activation_gradients
    found = {
        # A step that accumulates gradients may not pass them on.
        "is_forward_only": all(gradient is None for gradient in exact.gradients.values()),
        "is_finite_in_float32": exact.is_finite,
        "float32_loss": _finite_loss(passes, exact),
        "invalid_targets": (
            invalid_binary_targets(model, passes.batch) if passes.step.is_of_keras else None
        ),
        "activation_gradients": {
            path: amax
            for path, amax in gradients.items()
            if math.isfinite(amax) and path != model.name
        },
        "zero": [
            path
            for path, each in exact.gradients.items()
            if each is None or not as_array(each).any()
        ],
    }
    if exact.is_finite and passes.step.is_custom and not exact.is_random:
        found |= _find_unscaled(passes, exact)
    return found


def _find_unscaled(passes: Passes, exact: PassResult) -> dict[str, Any]:
    """Returns the layers whose gradients do not grow with the loss scale: of a loss that is not scaled, or clipped."""
    factor = max(_FACTOR, passes.factor)
    scaled = passes.in_float32(factor=factor)
    grown = gradient_errors(scaled, exact)
    # The backward pass goes from the loss to the input. The layer that takes the first such output
    # changes them.
    layers, before, unscaled_by = layers_by_path(passes.model), "", ""
    for path, amax in exact.marks.activation_gradients.items():
        if abs(scaled.marks.activation_gradients.get(path, 0.0) / factor - amax) > _UNSCALED * amax:
            is_known = before in layers and path in layers
            unscaled_by = (
                before
                if is_known and keras_internals.is_input_of(layers[path], layers[before])
                else ""
            )
            break
        before = path
    return {
        "unscaled_layers": [each.layer for each in grown if each.error > _UNSCALED],
        "is_unscaled": bool(grown) and all(each.kept < 0.5 for each in grown),
        "unscaled_by": unscaled_by,
    }


def _find_operations(passes: Passes, exact: PassResult) -> dict[str, Any]:
    """Returns where NaN and Inf begin, and the constants that float16 loses in those layers.

    If the pass in float32 is not finite either, the operations are those of float32.
    """
    try:
        in_float32 = passes.in_float32(watch=True)
        watched = passes.in_own_precision(watch=True) if exact.is_finite else in_float32
    except TimeoutError:
        return {}
    layers = {found.layer for found in watched.nonfinite.found}
    constants = in_float32.nonfinite.lost_constants
    return {
        "nonfinite": list(watched.nonfinite.found),
        "lost_constants": {layer: constants[layer] for layer in constants if layer in layers},
        "nonfinite_outputs": list(watched.marks.nonfinite)[:_MOST_NAMED],
    }


def _compare_compiled(passes: Passes, own: PassResult, exact: PassResult) -> dict[str, Any]:
    """Returns what the outputs of a compiled pass show, whose loss was finite in the training."""
    is_random = (
        own.is_random or exact.is_random or own.marks.random_numbers.position > 0
    )  # compiled: other numbers
    if passes.step.is_custom or passes.model.run_eagerly or is_random:
        return {}
    error = exact.marks.error_of(passes.compiled_outputs())
    if not is_harmful(error, []):
        return {"is_finite_compiled": True}
    return {"output_error": error, "layer_errors": layer_errors(own, exact)}


def _compare(
    passes: Passes,
    searching: Passes,
    own: PassResult,
    exact: PassResult,
    noise_factor: float,
    usable: float,
    largest_norms: Mapping[str, float],
) -> dict[str, Any]:
    """Returns the errors of outputs, gradients and states, and the layers in float32 that remove harmful ones."""
    half = _half_pass(passes)
    after = functools.cache(replace(searching, states=exact.states).in_float32)

    def errors_of(result: PassResult) -> dict[str, Any]:
        errors = gradient_errors(result, exact, half, noise_factor, largest_norms)
        return {"output_error": result.marks.output_error, "gradient_errors": errors}

    def states_of(result: PassResult) -> list[StateError] | None:
        return state_errors(passes.model, result, exact, half, after)

    def is_sound(result: PassResult) -> bool:
        is_lost = any(each.is_harmful for each in states_of(result) or ())
        return result.is_finite and not is_harmful(**errors_of(result)) and not is_lost

    errors = errors_of(own)
    found = errors | {"layer_errors": layer_errors(own, exact), "state_errors": None}
    with contextlib.suppress(TimeoutError):  # the comparison of outputs and gradients stands
        found["state_errors"] = states_of(own)
    lost = [layer_of(each.path) for each in found["state_errors"] or () if each.is_harmful]
    if is_harmful(**errors) or lost:
        # At the largest usable scale: if float16 only flushed gradients to zero, no layer has to
        # change.
        found["float32_layers"], watched = find_float32_layers(
            searching, is_sound, exact, max(usable, passes.factor), lost
        )
        if watched:
            found |= {
                "nonfinite": watched.nonfinite.found,
                "underflows": watched.nonfinite.underflows,
            }
        if found["float32_layers"] is None and passes.step.is_of_keras:
            with contextlib.suppress(TimeoutError):
                found |= _find_unscaled(searching, exact)
    return found


def _half_pass(passes: Passes) -> PassResult | None:
    """Returns a pass in float32 over the first half of the batch, twice; `None` for a batch that is too small."""
    if passes.examples < 4 or passes.step.run is None or is_ragged(passes.data):
        return None
    half = keras.tree.map_structure(lambda tensor: tensor[: passes.examples // 2], passes.data)
    return replace(passes, data=_tiled(half, passes.examples)).in_float32()


def _finite_loss(passes: Passes, result: PassResult) -> float | None:
    return result.loss if passes.step.run and math.isfinite(result.loss) else None


def _usable_scale(exact: PassResult, own: LayerMarks, part: float) -> float | None:
    """Returns the largest loss scale, a power of two, at which no gradient in 16 bits comes near float16's maximum.

    Args:
        exact: The pass in float32, which has the magnitudes.
        own: The layers of a pass in the precision of the model. Gradients of those in float32 do
            not matter.
        part: What the gradients of outputs are multiplied by in a batch of the training; those of
            variables are as large there, for a mean over more examples.
    """
    float32_layers = set(own.called) - own.computing_in_16_bits
    gradients = exact.marks.activation_gradients
    magnitudes = [
        part * amax
        for layer, amax in gradients.items()
        if layer in own.in_16_bits or layer not in own.called
    ]
    for path, gradient in exact.gradients.items():
        layer = next((each for each in path_and_parents(path) if each in own.called), "")
        if gradient is not None and layer not in float32_layers:
            magnitudes.append(float(np.max(np.abs(as_array(gradient)), initial=0.0)))
    largest = max(magnitudes, default=0.0)
    if not largest or not math.isfinite(largest):
        return None
    return 2.0 ** min(
        math.floor(math.log2(FLOAT16.max / largest)) - _SPARE_BITS, FLOAT32.max_exponent
    )


def _flushed_share(own: Any, exact: Any) -> float:
    """Returns the share of elements that are zero in the model's precision only."""
    if own is None or exact is None:
        return 0.0
    half, single = as_array(own), as_array(exact)
    if half.shape != single.shape:  # the rows of an embedding, where float16 has rounded indices
        return 0.0
    flushed = (half == 0) & (single != 0)
    return float(flushed.mean()) if flushed.size else 0.0
