"""Replays one training batch in the precision of the model and in float32, to find what float16 loses."""

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from kmp.backend import ResourceVariable, layers_by_path
from kmp.records import GradientSample, Replay
from kmp.replay.batch_checks import invalid_binary_targets, invalid_targets, nonfinite_part
from kmp.replay.eager_pass import PassResult, Surroundings, as_array, run_pass
from kmp.utils import FLOAT16, FLOAT32

Failure = Literal["loss", "gradients"]

_MOST_LAYERS = 12  # to compute in float32
_MOST_NAMED = 100
_SPARE_BITS = 2  # below an overflow in the backward pass


def replay(
    model: keras.Model,
    batch: Sequence[Any],
    variables: Mapping[str, Any],
    *,
    step: int,
    loss_scale: float,
    batch_size: int | None = None,
    failed: Failure | None = None,
    is_forward_only: bool = False,
    restored: Sequence[ResourceVariable] = (),
    seconds: float = math.inf,
) -> tuple[Replay, GradientSample | None]:
    """Replays a batch, and restores the model.

    Args:
        model: A compiled and built model.
        batch: `(x, y)` or `(x, y, sample_weight)`.
        variables: The variables to measure, by path, ordered from the input to the loss.
        step: The training step of the batch.
        loss_scale: The loss scale in use.
        batch_size: The number of examples in a training batch, if `batch` has only some of them: the gradients of a
            mean over fewer examples are larger.
        failed: `"loss"` or `"gradients"`: what was not finite in the training step of the batch. If it is finite in a
            replay of some examples, they are replayed again as a batch of that size: a sum over the batch may overflow.
        is_forward_only: Whether to run only the forward pass, because the loss of the training is not known.
        restored: TensorFlow's variables that a training step assigns.
        seconds: After this time the search for operations and layers ends without a result.

    Returns:
        What the passes showed, and the gradients in float32, or `None` if invalid targets make the loss fail.

    Raises:
        TimeoutError: If the first passes in each precision take longer than `seconds`.
    """
    run = functools.partial(
        _replay,
        model,
        variables=variables,
        step=step,
        loss_scale=loss_scale,
        batch_size=batch_size,
        is_forward_only=is_forward_only,
        surroundings=Surroundings(restored, time.monotonic() + seconds),
    )
    result = run(batch)
    examples = len(keras.tree.flatten(batch[0])[0])
    is_finite = result[0].loss is not None if failed == "loss" else result[0].is_finite
    if failed and is_finite and not is_forward_only and batch_size and batch_size > examples:
        whole = keras.tree.map_structure(lambda tensor: _tiled(tensor, batch_size), tuple(batch))
        result = run(whole)
    return result


def _tiled(tensor: Any, size: int) -> tf.Tensor:
    """Returns a batch of this size, with the examples of a smaller one again and again."""
    return tf.gather(tensor, tf.range(size) % tf.shape(tensor)[0])


def _replay(
    model: keras.Model,
    batch: Sequence[Any],
    *,
    variables: Mapping[str, Any],
    step: int,
    loss_scale: float,
    batch_size: int | None,
    is_forward_only: bool,
    surroundings: Surroundings,
) -> tuple[Replay, GradientSample | None]:
    examples = len(keras.tree.flatten(batch[0])[0])
    part = 1.0 if _sums_over_examples(model) else examples / (batch_size or examples)
    measured = {} if is_forward_only else variables  # a forward pass has no gradients

    def run(**options: Any) -> PassResult:
        options = {"factor": loss_scale * part, "surroundings": surroundings, **options}
        return run_pass(model, batch, measured.values(), is_forward_only=is_forward_only, **options)

    batch_part, key, is_part_finite = nonfinite_part(batch)
    nonfinite_variables = [path for path, variable in variables.items() if not np.isfinite(variable).all()]
    invalid = None if is_forward_only else invalid_targets(model, batch, surroundings.variables)
    has_weight = len(batch) > 2 and batch[2] is not None
    exact = _float32_pass(model, run, may_fail=invalid is not None)
    is_sound = batch_part is None and not nonfinite_variables
    if exact is None or (invalid and not exact.is_finite and is_sound):
        return Replay(
            examples, loss_scale, None, None, False, False, invalid_targets=invalid, has_sample_weight=has_weight
        ), None
    own = run()
    watched, lost_constants = (own, {}) if own.is_finite else _watched_pass(model, run, exact)
    gradients = list(zip(measured, own.gradients, exact.gradients, strict=True))
    flushed = {path: _flushed_share(half, single) for path, half, single in gradients}
    usable = _usable_scale(exact)
    float32_layers: list[str] | None = []
    if exact.is_finite and not own.is_finite:
        factor = max(1.0, min(usable or 1.0, loss_scale)) * part
        float32_layers = _Float32Layers(model, lambda **options: run(factor=factor, **options)).find()
    result = Replay(
        examples=examples,
        loss_scale=loss_scale,
        loss=None if is_forward_only else _finite(own.loss),
        float32_loss=None if is_forward_only else _finite(exact.loss),
        is_finite=own.is_finite,
        is_finite_in_float32=exact.is_finite,
        usable_scale=None if usable is None else min(usable / part, 2.0**FLOAT32.max_exponent),
        nonfinite=list(watched.nonfinite.found),
        lost_constants=lost_constants,
        nonfinite_outputs=list(watched.marks.nonfinite)[:_MOST_NAMED],
        nonfinite_variables=nonfinite_variables[:_MOST_NAMED],
        nonfinite_part=batch_part,
        nonfinite_key=key,
        is_part_finite=is_part_finite,
        has_sample_weight=has_weight,
        invalid_targets=None if is_forward_only else invalid_binary_targets(model, batch),
        float32_layers=float32_layers,
        activation_gradients={
            path: amax
            for path, amax in exact.marks.activation_gradients.items()
            if math.isfinite(amax) and path != model.name
        },
        flushed={path: share for path, share in flushed.items() if share},
        zero=[path for path, _, single in gradients if single is None or not as_array(single).any()],
        is_forward_only=is_forward_only,
    )
    return result, None if is_forward_only else exact.sample(variables, step)


def _float32_pass(model: keras.Model, run: Callable[..., PassResult], may_fail: bool) -> PassResult | None:
    """Returns the pass in float32; `None` if TensorFlow refuses the batch and it `may_fail`."""
    try:
        return run(factor=1.0, float32_layers=[model])
    except tf.errors.InvalidArgumentError:
        if not may_fail:
            raise
        return None


def _watched_pass(
    model: keras.Model, run: Callable[..., PassResult], exact: PassResult
) -> tuple[PassResult, dict[str, list[float]]]:
    """Returns a pass that shows where NaN and Inf begin, and the constants that float16 loses in those layers.

    Args:
        model: The model.
        run: Runs a pass with the options of `run_pass`.
        exact: The pass in float32. If it is not finite, it is watched.
    """
    try:
        in_float32 = run(factor=1.0, float32_layers=[model], watch=True)
        watched = run(watch=True) if exact.is_finite else in_float32
    except TimeoutError:
        return exact, {}
    layers = {found.layer for found in watched.nonfinite.found}
    constants = in_float32.nonfinite.lost_constants
    return watched, {layer: constants[layer] for layer in constants if layer in layers}


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


class _Float32Layers:
    """Searches the layers that have to compute in float32.

    Args:
        model: The model.
        run: Runs a pass with the options of `run_pass`.
    """

    def __init__(self, model: keras.Model, run: Callable[..., PassResult]) -> None:
        self._model, self._run_pass = model, run
        self._layers = layers_by_path(model)

    def find(self) -> list[str] | None:
        """Returns layers with which loss and gradients are finite, none of them needless.

        `None` if none were found, or the time is over.
        """
        try:
            return self._search()
        except TimeoutError:
            return None

    def _search(self) -> list[str] | None:
        chosen: list[str] = []
        while not (result := self._run(chosen, watch=True)).is_finite:
            new = next((path for path in self._candidates(result) if path not in chosen), None)
            if new is None or len(chosen) == _MOST_LAYERS:
                return None
            chosen.append(new)
        for path in tuple(chosen):
            rest = [other for other in chosen if other != path]
            if self._run(rest).is_finite:
                chosen = rest
        return chosen

    def _run(self, paths: Sequence[str], watch: bool = False) -> PassResult:
        return self._run_pass(float32_layers=[self._layers[path] for path in paths], watch=watch)

    def _candidates(self, result: PassResult) -> Iterator[str]:
        """Yields the layers that may have to compute in float32 against the NaN and Inf of a pass.

        An operation between two layers belongs to neither. It computes in the dtype of the layer that was called
        before; but a cast in the forward pass is of the layer that is called next.
        """
        paths = [path for path in result.marks.called if path in self._layers]
        index_of = {path: index for index, path in enumerate(paths)}
        for found, done in zip(result.nonfinite.found, result.nonfinite.layers_done, strict=True):
            index = index_of.get(found.layer, len(paths))
            next_one = sum(path in index_of for path in list(result.marks.called)[:done])
            neighbors = [index - 1] if found.is_backward else [next_one, next_one - 1]
            if found.operation != "Cast":
                neighbors.reverse()
            yield from (paths[at] for at in (index, *neighbors) if 0 <= at < len(paths))


def _flushed_share(own: Any, exact: Any) -> float:
    """Returns the share of elements that are zero in the model's precision only."""
    if own is None or exact is None:
        return 0.0
    flushed = (as_array(own) == 0) & (as_array(exact) != 0)
    return float(flushed.mean()) if flushed.size else 0.0
