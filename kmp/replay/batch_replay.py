"""Replays one training batch in the precision of the model and in float32, to find what float16 loses."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from kmp.backend import ResourceVariable
from kmp.records import GradientSample, Replay, StateError, is_harmful, layer_of
from kmp.replay.batch_checks import invalid_binary_targets, invalid_targets, nonfinite_part
from kmp.replay.eager_pass import Passes, PassResult, TrainStep, as_array
from kmp.replay.layer_search import find_float32_layers
from kmp.replay.precision_loss import gradient_errors, layer_errors, lost_weights, state_errors
from kmp.utils import FLOAT16, FLOAT32

Failure = Literal["loss", "gradients"]

_MOST_NAMED = 100
_FACTOR = 4.0  # that all gradients grow with, or the loss scale in use if it is larger
_UNSCALED = 0.1  # relative error of a gradient with a part that does not grow: of 13 % and more
_SEARCH_SECONDS = 4.0  # more, for the search in a batch that float16 ruins
_SPARE_BITS = 2  # below an overflow in the backward pass


def replay(
    model: keras.Model,
    data: Any,
    variables: Mapping[str, Any],
    *,
    step: int,
    loss_scale: float,
    train_step: TrainStep | None = None,
    batch_size: int | None = None,
    failed: Failure | None = None,
    restored: Sequence[ResourceVariable] = (),
    largest_norms: Mapping[str, float] = MappingProxyType({}),
    seconds: float = math.inf,
) -> tuple[Replay, GradientSample | None]:
    """Replays a batch, and restores the model.

    Args:
        model: A compiled and built model.
        data: The batch, as `train_step` gets it: `x`, or a tuple of `x`, `y` and `sample_weight`.
        variables: The variables to measure, by path, ordered from the input to the loss.
        step: The number of the training step of the batch.
        loss_scale: The loss scale in use.
        train_step: What to run. Defaults to the `train_step` of the model's class.
        batch_size: The number of examples in a training batch, if `data` has only some of them: the gradients of a
            mean over fewer examples are larger.
        failed: `"loss"` or `"gradients"`: what was not finite in the training step of the batch. If it is finite in a
            replay of some examples, they are replayed again as a batch of that size: a sum over the batch may overflow.
        restored: TensorFlow's variables that a training step assigns.
        largest_norms: The largest norm of each layer's gradients in float32, in earlier comparisons of the training.
        seconds: How long the first passes in each precision may take. If these show that float16 ruins the batch, the
            search for operations and layers may take 4 seconds more.

    Returns:
        What the passes showed, and the gradients in float32, or `None` if invalid targets make the loss fail.

    Raises:
        TimeoutError: If the first passes in each precision take longer than `seconds`.
    """
    deadline = time.monotonic() + seconds
    if train_step is None:
        train_step = TrainStep(functools.partial(type(model).train_step, model), [model.optimizer])
    passes = Passes(
        model,
        data,
        train_step,
        [] if train_step.run is None else list(variables.values()),  # a forward pass has no gradients
        has_dropout=failed is not None,
        restored=restored,
        deadline=deadline,
    )

    def replayed(passes: Passes) -> tuple[Replay, GradientSample | None]:
        part = 1.0 if _sums_over_examples(model) else passes.examples / (batch_size or passes.examples)
        passes = replace(passes, factor=loss_scale * part)
        search = replace(passes, deadline=deadline + _SEARCH_SECONDS)
        return _replay(passes, search, variables, step, loss_scale, part, largest_norms, was_finite=failed is None)

    result = replayed(passes)
    is_finite = result[0].loss is not None if failed == "loss" else result[0].is_finite
    if failed and is_finite and train_step.run and batch_size and batch_size > passes.examples:
        with contextlib.suppress(TimeoutError):  # the first result stands
            result = replayed(replace(passes, data=_tiled(data, batch_size)))
    return result


def _tiled(data: Any, size: int) -> Any:
    """Returns a batch of this size, with the examples of a smaller one again and again."""
    return keras.tree.map_structure(lambda tensor: tf.gather(tensor, tf.range(size) % tf.shape(tensor)[0]), data)


def _replay(
    passes: Passes,
    searching: Passes,
    variables: Mapping[str, Any],
    step: int,
    loss_scale: float,
    part: float,
    largest_norms: Mapping[str, float],
    was_finite: bool,
) -> tuple[Replay, GradientSample | None]:
    model, batch, is_forward_only = passes.model, passes.batch, passes.step.run is None
    has_keras_step = not (is_forward_only or passes.step.is_custom)
    names = [] if is_forward_only else list(variables)
    batch_part, key, is_part_finite = nonfinite_part(batch)
    nonfinite_variables = [path for path, variable in variables.items() if not np.isfinite(variable).all()]
    invalid = invalid_targets(model, batch, passes.restored) if has_keras_step else None
    known: dict[str, Any] = {
        "examples": passes.examples,
        "loss_scale": loss_scale,
        "nonfinite_variables": nonfinite_variables[:_MOST_NAMED],
        "nonfinite_part": batch_part,
        "nonfinite_key": key,
        "is_part_finite": is_part_finite,
        "has_sample_weight": len(batch) > 2 and batch[2] is not None,
        "is_forward_only": is_forward_only,
        "lost_weights": lost_weights(model),
        "float16_states": sum(each.is_assigned and each.dtype == tf.float16 for each in passes.restored),
    }

    # The pass in float32. TensorFlow refuses a batch with invalid targets, or the loss is NaN.
    try:
        exact = passes.in_float32(measure=True)
    except tf.errors.InvalidArgumentError:
        if invalid is None:
            raise
        exact = None
    if exact is None or (invalid and not exact.is_finite and batch_part is None and not nonfinite_variables):
        known |= {"loss": None, "float32_loss": None, "is_finite": False, "is_finite_in_float32": False}
        return Replay(**known, invalid_targets=invalid), None
    usable = _usable_scale(exact)
    known |= {
        # A step that accumulates gradients may not pass them on.
        "is_forward_only": all(gradient is None for gradient in exact.gradients),
        "is_finite_in_float32": exact.is_finite,
        "float32_loss": None if is_forward_only else _finite(exact.loss),
        "usable_scale": None if usable is None else min(usable / part, 2.0**FLOAT32.max_exponent),
        "invalid_targets": invalid_binary_targets(model, batch) if has_keras_step else None,
        "activation_gradients": {
            path: amax
            for path, amax in exact.marks.activation_gradients.items()
            if math.isfinite(amax) and path != model.name
        },
    }
    if exact.is_finite and passes.step.is_custom and not exact.is_random:
        # Keras' step scales its only loss. Gradients of another loss do not grow with the scale, nor do clipped ones.
        scaled = passes.in_float32(factor=max(_FACTOR, passes.factor))
        grown = gradient_errors(names, scaled, exact)
        known["unscaled_layers"] = [each.layer for each in grown if each.error > _UNSCALED]
        known["is_unscaled"] = bool(grown) and all(each.kept < 0.5 for each in grown)

    # The pass in the precision of the model.
    own = passes.in_own_precision(reference=exact)
    gradients = list(zip(names, own.gradients, exact.gradients, strict=True))
    flushed = {path: _flushed_share(half, single) for path, half, single in gradients}
    known |= {
        "is_finite": own.is_finite,
        "loss": None if is_forward_only else _finite(own.loss),
        "flushed": {path: share for path, share in flushed.items() if share},
        "zero": [path for path, _, single in gradients if single is None or not as_array(single).any()],
    }
    if not own.is_finite:
        known |= _operations(searching, exact)

    # The comparison of the two, and the search for the layers that have to compute in float32.
    float32_layers: list[str] | None = []
    if exact.is_finite and not own.is_finite:
        factor = min(max(1.0, usable or 1.0), loss_scale) * part
        float32_layers, _ = find_float32_layers(searching, lambda result: result.is_finite, exact, factor)
        is_random = own.is_random or exact.is_random
        if was_finite and not math.isfinite(own.loss) and not (passes.step.is_custom or model.run_eagerly or is_random):
            error = exact.marks.error_of(passes.compiled_outputs())
            if is_harmful(error, []):
                known |= {"output_error": error, "layer_errors": layer_errors(own, exact)}
    elif exact.is_finite and not (own.is_random or exact.is_random):
        half = _half_pass(passes)

        def compared(result: PassResult) -> dict[str, Any]:
            errors = gradient_errors(names, result, exact, half, math.sqrt(part), largest_norms)
            return {"output_error": result.marks.output_error, "gradient_errors": errors}

        lost_states = functools.partial(
            state_errors,
            model,
            exact=exact,
            half=half,
            after=functools.cache(replace(searching, states=exact.states).in_float32),
        )
        errors, of_states = compared(own), _in_time(lost_states, own)  # if it takes too long, the comparison stands
        known |= errors | {"layer_errors": layer_errors(own, exact), "state_errors": of_states}
        lost = [layer_of(each.path) for each in of_states if each.is_harmful]
        if is_harmful(**errors) or lost:
            # At the largest usable scale: if float16 only flushed gradients to zero, no layer has to change.
            float32_layers, watched = find_float32_layers(
                searching,
                lambda result: (
                    result.is_finite
                    and not is_harmful(**compared(result))
                    and not any(each.is_harmful for each in lost_states(result))
                ),
                exact,
                max(usable or 0.0, passes.factor),
                lost,
            )
            if watched:
                known |= {"nonfinite": watched.nonfinite.found, "underflows": watched.nonfinite.underflows}
    sample = None if is_forward_only else exact.sample(variables, step)
    return Replay(**known, float32_layers=float32_layers), sample


def _operations(passes: Passes, exact: PassResult) -> dict[str, Any]:
    """Returns where NaN and Inf begin, and the constants that float16 loses in those layers.

    Args:
        passes: The passes.
        exact: The pass in float32. If it is not finite, the operations are those of float32.
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


def _half_pass(passes: Passes) -> PassResult | None:
    """Returns a pass in float32 over the first half of the batch, twice; `None` for a batch that is too small."""
    if passes.examples < 4 or passes.step.run is None:
        return None
    half = keras.tree.map_structure(lambda tensor: tensor[: passes.examples // 2], passes.data)
    return replace(passes, data=_tiled(half, passes.examples)).in_float32()


def _in_time(measure: Callable[[PassResult], list[StateError]], result: PassResult) -> list[StateError]:
    """Returns what `measure` returns, or nothing if it takes too long."""
    with contextlib.suppress(TimeoutError):
        return measure(result)
    return []


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def _sums_over_examples(model: keras.Model) -> bool:
    """Whether a compiled loss is the sum over the examples of a batch, so that its gradients grow with the batch."""
    return any(getattr(loss, "reduction", None) == "sum" for loss in keras.tree.flatten(model.loss))


def _usable_scale(exact: PassResult) -> float | None:
    """Returns the largest power of two times which no gradient comes near float16's maximum."""
    magnitudes = [float(np.max(np.abs(array), initial=0.0)) for array in exact.arrays()]
    largest = max((*magnitudes, *exact.marks.activation_gradients.values()), default=0.0)
    if not largest or not math.isfinite(largest):
        return None
    return 2.0 ** (math.floor(math.log2(FLOAT16.max / largest)) - _SPARE_BITS)


def _flushed_share(own: Any, exact: Any) -> float:
    """Returns the share of elements that are zero in the model's precision only."""
    if own is None or exact is None:
        return 0.0
    half, single = as_array(own), as_array(exact)
    if half.shape != single.shape:  # the rows of an embedding, where float16 has rounded indices
        return 0.0
    flushed = (half == 0) & (single != 0)
    return float(flushed.mean()) if flushed.size else 0.0
