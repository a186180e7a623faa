"""Replays one training batch in the precision of the model and in float32.

That finds what 16 bits lose. The file is read from top to bottom, starting with `replay_batch`.
"""

import contextlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from kmp.backend.keras_internals import compute_dtypes
from kmp.records import GradientSample, Replay
from kmp.records.gradient_sample import layer_of
from kmp.records.replay import (
    BatchCheck,
    Comparison,
    GradientRange,
    LayerSearch,
    Overflow,
)
from kmp.replay.batch_capture import is_ragged
from kmp.replay.batch_checks import check_batch, invalid_binary_targets, invalid_targets
from kmp.replay.criteria import Criteria
from kmp.replay.kept_branch import (
    HEADROOM_BITS,
    ScaleRange,
    branch_to_keep,
    flushed_share,
    gradients_in_16_bits,
    shares_flushed_at,
)
from kmp.replay.layer_results import LayerResults
from kmp.replay.layer_search import computing_choices, find_float32_layers
from kmp.replay.loss_scaling import unscaled_gradients
from kmp.replay.other_format import other_format
from kmp.replay.output_errors import magnitudes_of
from kmp.replay.passes import Passes, PassResult, as_array, tiled
from kmp.replay.precision_loss import Reference, gradient_errors, layer_errors, state_errors
from kmp.replay.rounded_constants import rounded_constants
from kmp.scaling import DynamicScale
from kmp.utils.float_formats import BFLOAT16, FLOAT16, FLOAT32, FloatFormat, computing_format

logger = logging.getLogger("kmp")

Failure = Literal["loss", "gradients"]

_MOST_NAMED = 100
_MANY = 2**10  # examples
_LARGE_ERROR = 0.05  # of outputs, from which that of each layer is measured, in another pass
_BFLOAT16_SECONDS = 2.0  # more, for a pass in bfloat16 after a search that has found nothing
_SEARCH_SECONDS = 4.0  # more, for the search in a batch that 16 bits ruin
_SCALE_SECONDS = 1.0  # of these, for loss scales at which no layer has to change
# Parts of a loss scale to try, because the gradients inside of a layer may be larger than those of
# its outputs.
_LOWER_SCALES = 1.0, 2.0**-4, 2.0**-8, 2.0**-12


@dataclass(frozen=True)
class StepContext:
    """What a replay knows of the training step of its batch.

    Args:
        step: The number of the training step.
        loss_scale: The loss scale in use.
        initial_scale: The loss scale at which the training began.
        min_scale: The lowest one that its rule can reach.
        batch_size: The number of examples in the training batch, if the passes have only some of
            them: the gradients of a mean over fewer examples are larger.
        failed: `"loss"` or `"gradients"`: what was not finite in the training step of the batch.
        largest_norms: The largest norm of each layer's gradients in float32, in earlier comparisons
            of the training.
        compares_formats: Whether to pass the batch in the other 16-bit format too.
    """

    step: int
    loss_scale: float
    initial_scale: float = DynamicScale.initial_scale
    min_scale: float = FLOAT16.smallest_normal
    batch_size: int | None = None
    failed: Failure | None = None
    largest_norms: Mapping[str, float] = field(default_factory=dict)
    compares_formats: bool = False


def replay_batch(
    passes: Passes, context: StepContext, criteria: Criteria
) -> tuple[Replay, GradientSample | None]:
    """Replays a batch, and restores the model.

    Args:
        passes: The passes over the batch. The first ones in each precision have to end before their
            deadline. If these show that 16 bits ruin the batch, the search for operations and
            layers may take 4 seconds more.
        context: The training step of the batch. If that failed and the replay of some examples is
            finite, they are replayed again as a batch of the original size: a sum over the batch
            may overflow.
        criteria: What the replay looks for.

    Returns:
        What the passes showed, and the gradients in float32, or `None` if invalid targets make the
        loss fail.

    Raises:
        TimeoutError: If the first passes in each precision take too long.
    """
    size = context.batch_size or passes.examples
    context = replace(context, batch_size=size)
    result = _BatchReplay(passes, context, criteria).run()
    found = result[0]
    fails_as_before = context.failed is None or not found.is_finite
    if context.failed == "loss":
        fails_as_before = not found.is_finite_forward
    if passes.has_backward and size > passes.examples and not fails_as_before:
        # The first result stands.
        with contextlib.suppress(TimeoutError, tf.errors.ResourceExhaustedError):
            whole = replace(passes, data=tiled(passes.data, size))
            result = _BatchReplay(whole, context, criteria).run()
    return result


def failing_part(
    passes: Passes, parts: Sequence[Any], failed: Failure, loss_scale: float, batch_size: int
) -> Any:
    """Returns the first part of a batch that fails as the batch did, in the model's precision.

    A single example may have made a step fail. Without such a part before the deadline of the
    passes, returns the first one. The other arguments are those of `StepContext`.
    """
    # The graph as the training runs it may fail elsewhere than the graph as it is written.
    with contextlib.suppress(TimeoutError):
        for as_trained in (False, True):
            for part in parts:
                computing = replace(passes, data=part, as_trained=as_trained)
                if _fails(computing, failed, loss_scale, batch_size):
                    return part
    return parts[0]


def _fails(passes: Passes, failed: Failure, loss_scale: float, batch_size: int) -> bool:
    try:
        factor = loss_scale * _share_of_batch(passes, batch_size)
        result = passes.in_own_precision(factor=factor)
    except tf.errors.InvalidArgumentError:  # TensorFlow refuses the batch: see `_in_float32`
        return True
    if failed == "loss" and passes.has_backward:
        return not math.isfinite(result.loss)
    return not result.is_finite


def _share_of_batch(passes: Passes, batch_size: int) -> float:
    """Returns what gradients are multiplied by: those of a sum grow with the batch size."""
    losses = keras.tree.flatten(passes.model.loss) if passes.kind != "loop" else []
    is_sum = any(getattr(loss, "reduction", None) == "sum" for loss in losses)
    return 1.0 if is_sum else passes.examples / batch_size


class _BatchReplay:
    """One replay: checks the batch, passes it in both precisions, and compares the two passes."""

    def __init__(self, passes: Passes, context: StepContext, criteria: Criteria) -> None:
        self._context, self._criteria = context, criteria
        batch_size = context.batch_size or passes.examples
        self._share = _share_of_batch(passes, batch_size)
        layers = (passes.model, *passes.beside)
        self._format = computing_format(set().union(*map(compute_dtypes, layers)))
        self._has_float16 = self._format is FLOAT16
        factor = context.loss_scale * self._share if self._has_float16 else 1.0
        self._passes = replace(passes, factor=factor)
        self._compiled_before = passes.programs.seconds

    @property
    def _searching(self) -> Passes:
        """The passes, with the time for a search, and without that of compilations."""
        compilations = self._passes.programs.seconds - self._compiled_before
        later = self._passes.deadline + _SEARCH_SECONDS + compilations
        return replace(self._passes, deadline=later)

    def run(self) -> tuple[Replay, GradientSample | None]:
        """Returns the results of `replay_batch`."""
        passes, context = self._passes, self._context
        exact, batch = self._in_float32(check_batch(passes))
        if exact is None:
            found = Replay(
                examples=passes.examples,
                loss_scale=context.loss_scale,
                loss=None,
                float32_loss=None,
                is_finite=False,
                is_finite_in_float32=False,
                batch=batch,
            )
            return found, None
        if passes.is_of_keras:
            targets = invalid_binary_targets(passes.model, passes.batch)
            batch = replace(batch, invalid_targets=targets)
        own = exact
        if self._format is not FLOAT32:
            own = passes.in_own_precision(reference=exact)

        # What both passes show.
        gradients = self._gradient_range(own, exact)
        unscaled = None
        is_custom = passes.has_backward and passes.kind != "keras"
        if is_custom and exact.is_finite and self._has_float16:
            unscaled = unscaled_gradients(passes, exact)
        found = Replay(
            examples=passes.examples,
            loss_scale=context.loss_scale,
            loss=self._finite_loss(own),
            float32_loss=self._finite_loss(exact),
            is_finite=own.is_finite,
            is_finite_in_float32=exact.is_finite,
            # A step that accumulates gradients may not pass them on.
            is_forward_only=all(gradient is None for gradient in exact.gradients.values()),
            batch=batch,
            gradients=gradients,
            unscaled=unscaled,
        )
        sample = exact.sample(context.step) if passes.has_backward else None

        # What 16 bits lose: the program that trains, an overflow, or errors of finite passes.
        shown = None
        if not self._agrees_with_training(own):
            shown = self._by_program(found, own)
        if shown is not None:
            found = shown
        elif not own.is_finite:
            found = self._with_overflow(found, own, exact)
        # A skipped step of a model in float32 says nothing about 16 bits.
        elif exact.is_finite and not (self._format is FLOAT32 and context.failed):
            found = self._with_comparison(found, own, exact)

        # What the other 16-bit format would lose.
        if context.compares_formats and exact.is_finite:
            usable = _usable_scale(exact, own.marks, self._share)
            found = replace(found, other_format=other_format(passes, exact, usable, self._share))
        return found, sample

    def _in_float32(self, batch: BatchCheck) -> tuple[PassResult | None, BatchCheck]:
        """Returns the pass in float32, and the batch with its invalid targets.

        TensorFlow refuses a batch because of these, or its loss is NaN: then there is `None` in
        place of the pass.
        """
        try:
            exact = self._passes.in_float32()
        except tf.errors.InvalidArgumentError:
            targets = invalid_targets(self._passes)
            if targets is None:
                raise
            return None, replace(batch, invalid_targets=targets)
        if exact.is_finite:
            return exact, batch
        targets = invalid_targets(self._passes)
        has_other_reason = batch.nonfinite is not None or batch.nonfinite_variables
        is_explained = targets is not None and not has_other_reason
        return None if is_explained else exact, replace(batch, invalid_targets=targets)

    def _finite_loss(self, result: PassResult) -> float | None:
        has_loss = result.knows_loss and math.isfinite(result.loss)
        return result.loss if has_loss else None

    def _gradient_range(self, own: PassResult, exact: PassResult) -> GradientRange:
        of_activations = {}
        for path, amax in exact.marks.activation_gradients.items():
            if math.isfinite(amax) and path != self._passes.model.name:
                of_activations[path] = amax
        flushed, zero = {}, []
        for path, gradient in exact.gradients.items():
            share = flushed_share(own.gradients[path], gradient)
            if share:
                flushed[path] = share
            if gradient is None or not as_array(gradient).any():
                zero.append(path)
        usable = _usable_scale(exact, own.marks, self._share) if self._has_float16 else None
        return GradientRange(usable, of_activations, flushed, zero)

    def _with_overflow(self, found: Replay, own: PassResult, exact: PassResult) -> Replay:
        """Adds where NaN and Inf begin, and the layers in float32 that avoid them."""
        overflow = self._find_operations(exact)
        if not exact.is_finite:
            return replace(found, overflow=overflow)
        found = self._at_finite_scale(found, own, exact, self._searching)
        search = self._search_after_overflow(found, own, exact)
        return replace(found, overflow=overflow, search=search)

    def _at_finite_scale(
        self, found: Replay, own: PassResult, exact: PassResult, passes: Passes
    ) -> Replay:
        """Lowers the usable loss scale to one at which a pass is finite, so no layer has to change.

        It stays as it is if that flushes gradients that it keeps, or if no lower one is finite.
        """
        if not (self._has_float16 and math.isfinite(own.loss)):
            return found
        highest = self._scale_of_search(found, own, exact)
        kept = exact.gradients.keys() - self._flushed_at(highest, exact, own)
        began = time.monotonic()
        with contextlib.suppress(TimeoutError):
            for part in _LOWER_SCALES:
                scale = highest * part
                has_time = time.monotonic() - began < _SCALE_SECONDS
                if scale < self._context.min_scale or not has_time:
                    break
                result = passes.in_own_precision(factor=scale * self._share, reference=exact)
                shares = {
                    path: flushed_share(result.gradients[path], each)
                    for path, each in exact.gradients.items()
                }
                if self._flushed(shares) & kept:
                    break
                if result.is_finite:
                    usable = found.gradients.usable_scale if part == 1.0 else scale
                    return replace(found, gradients=replace(found.gradients, usable_scale=usable))
        return found

    def _is_sound_in_bfloat16(self, exact: PassResult, factor: float) -> bool | None:
        """Whether the pass is sound in bfloat16; `None` if there is no time to try."""
        passes = replace(self._searching, deadline=time.monotonic() + _BFLOAT16_SECONDS)
        try:
            result = passes.in_format(BFLOAT16.name, factor=factor, reference=exact)
            return self._is_sound(result, self._reference(exact), BFLOAT16)
        except TimeoutError:
            return None

    def _search_after_overflow(
        self, found: Replay, own: PassResult, exact: PassResult
    ) -> LayerSearch:
        """Returns layers with which a pass is finite, at a loss scale that flushes no branch."""
        scale = self._scale_of_search(found, own, exact)
        branch = None
        highest = self._context.initial_scale
        if scale < highest:
            scales = ScaleRange(lowest=scale, highest=highest, share=self._share)
            branch = branch_to_keep(self._searching, own.marks, exact, scales, self._criteria)

        def is_sound(result: PassResult) -> bool:
            if not result.is_finite:
                return False
            return branch is None or not branch.is_flushed_in(result)

        factor = (branch.loss_scale if branch else scale) * self._share
        search, _ = find_float32_layers(
            self._searching,
            is_sound,
            exact,
            computing_choices(self._passes),
            factor=factor,
            new_errors=lambda: self._measured.new_errors,
        )
        if not search.is_found and self._has_float16:
            search = replace(search, is_sound_in_bfloat16=self._is_sound_in_bfloat16(exact, factor))
        if branch is None:
            return search
        return replace(search, loss_scale=branch.loss_scale, branch=branch.layers)

    def _scale_of_search(self, found: Replay, own: PassResult, exact: PassResult) -> float:
        """Returns the loss scale at which layers have to make a pass finite.

        It is the largest usable one that the rule can reach: where the pass is finite there as it
        is, no layer has to change, unless that scale flushes gradients that a scale of 1 keeps.
        """
        usable = found.gradients.usable_scale or 1.0
        scale = max(self._context.min_scale, usable)
        if scale < 1.0:
            flushed = self._flushed_at(scale, exact, own)
            scale = 1.0 if flushed > self._flushed_at(1.0, exact, own) else scale
        return min(scale, self._context.loss_scale)

    def _flushed_at(self, loss_scale: float, exact: PassResult, own: PassResult) -> set[str]:
        """Returns the paths of the variables of whose gradient a loss scale flushes the most."""
        return self._flushed(shares_flushed_at(loss_scale, exact, own.marks))

    def _flushed(self, shares: Mapping[str, float]) -> set[str]:
        """Returns the paths of the variables of whose gradient so much is flushed."""
        return {*self._criteria.flushed_layers(shares, lambda path: path)}

    def _find_operations(self, exact: PassResult) -> Overflow:
        """Returns where NaN and Inf begin, and the constants that float16 loses in those layers."""
        passes = self._searching
        try:
            in_float32 = passes.in_float32(watch=True)
            watched = passes.in_own_precision(watch=True) if exact.is_finite else in_float32
        except TimeoutError:
            return Overflow()
        operations = list(watched.nonfinite.found)
        layers = {found.layer for found in operations}
        rounded = None
        if not exact.is_finite:
            with contextlib.suppress(TimeoutError):
                rounded = rounded_constants(passes, operations)
        # bfloat16 has the range of float32.
        lost = in_float32.nonfinite.lost_constants if self._has_float16 else {}
        return Overflow(
            operations,
            lost_constants={layer: lost[layer] for layer in lost if layer in layers},
            outputs=list(watched.marks.nonfinite)[:_MOST_NAMED],
            magnitudes=magnitudes_of(in_float32.marks.outputs),
            rounded=rounded,
        )

    def _agrees_with_training(self, own: PassResult) -> bool:
        """Whether a pass in the precision of the model fails as the training step did.

        A pass over some examples may be finite where that over the whole batch, which is next, is
        not.
        """
        has_more = self._passes.examples < (self._context.batch_size or 0)
        if self._context.failed and own.is_finite and has_more:
            return True
        if self._context.failed == "gradients":
            # A step that scales no loss has only gradients to fail by.
            is_backward = math.isfinite(own.loss) or not own.knows_loss
            return is_backward and not own.is_finite
        return own.is_finite != (self._context.failed == "loss")

    def _by_program(self, found: Replay, as_written: PassResult) -> Replay | None:
        """Returns what the program that trains shows, where that is not the graph as it is written.

        XLA computes what it fuses in float32, and simplifies it; TensorFlow merges constants.
        Returns `None` if it shows the same harm.

        Args:
            found: What is known of the batch.
            as_written: The pass by the graph as it is written.
        """
        if self._format is FLOAT32:
            return None
        programs = replace(self._searching, as_trained=True)
        try:
            exact = programs.in_float32()
            own = programs.in_own_precision(reference=exact)
            if not exact.is_finite:
                return None
            found = replace(
                found,
                loss=self._finite_loss(own),
                float32_loss=self._finite_loss(exact),
                is_finite=own.is_finite,
                is_finite_in_float32=True,
            )
            if not own.is_finite:
                only_gradients = math.isfinite(own.loss) and not math.isfinite(as_written.loss)
                if self._context.failed is None and not only_gradients:
                    return None  # as the graph as it is written, or as no step of the training
                return self._with_failing_program(found, programs, own, exact)
            halved = partial(_half_pass, programs)
            comparison = _compared(own, replace(self._reference(exact), halved=halved))
        except Exception:  # XLA may not allow it
            logger.debug("There is no pass by the program that trains:", exc_info=True)
            return None
        is_same = as_written.is_finite and self._is_harmful(comparison)
        return None if is_same else replace(found, comparison=comparison)

    def _with_failing_program(
        self, found: Replay, programs: Passes, own: PassResult, exact: PassResult
    ) -> Replay | None:
        """Adds the layers in float32 with which the program that trains is finite.

        If only its gradients are not finite, it uses the loss scale at which no layer may have to
        change. Returns `None` if there are no such layers.
        """
        factor, suspects = self._passes.factor, list[str]()
        if math.isfinite(own.loss):
            found = self._at_finite_scale(found, own, exact, programs)
            factor = self._scale_of_search(found, own, exact) * self._share
        else:
            suspects = list(programs.in_own_precision(watch=True).marks.nonfinite)
        search, _ = find_float32_layers(
            programs,
            lambda result: result.is_finite,
            exact,
            computing_choices(self._passes),
            factor=factor,
            suspects=suspects,
        )
        if not search.is_found:
            return None
        return replace(found, overflow=Overflow(outputs=suspects[:_MOST_NAMED]), search=search)

    def _with_comparison(self, found: Replay, own: PassResult, exact: PassResult) -> Replay:
        """Adds the errors of outputs, gradients and states, and the layers that remove them."""
        reference = self._reference(exact)
        comparison = _compared(own, reference)
        states = None
        with contextlib.suppress(TimeoutError):  # the comparison of outputs and gradients stands
            states = state_errors(own, reference)
        comparison = replace(comparison, layers=layer_errors(own), states=states)
        found = replace(found, comparison=comparison)
        is_harmful = self._is_harmful(comparison)
        if is_harmful or comparison.output_error > _LARGE_ERROR:
            with contextlib.suppress(TimeoutError):
                comparison = replace(comparison, layers=layer_errors(own, self._measured))
                found = replace(found, comparison=comparison)
        if not is_harmful:
            return found
        lost = self._criteria.lost_states(comparison)
        shown = None if lost else self._by_program(found, own)
        if shown is not None:
            return shown
        return self._with_cure(found, reference, [layer_of(each.path) for each in lost])

    def _with_cure(self, found: Replay, reference: Reference, suspects: Sequence[str]) -> Replay:
        """Adds the layers that remove a harmful error, and the operations that cause it."""
        # In float16, at the largest usable scale: if it only flushed gradients to zero, no layer
        # has to change.
        usable = (found.gradients.usable_scale or 0.0) * self._share
        search, watched = find_float32_layers(
            self._searching,
            lambda result: self._is_sound(result, reference, self._format),
            reference.exact,
            computing_choices(self._passes),
            factor=max(usable, self._passes.factor),
            suspects=suspects,
            new_errors=lambda: self._measured.new_errors,
        )
        found = replace(found, search=search)
        if watched:
            nonfinite = watched.nonfinite
            overflow = Overflow(
                nonfinite.found,
                underflows=nonfinite.underflows,
                lossy=watched.lossy[:_MOST_NAMED],
            )
            found = replace(found, overflow=overflow)

        # Where no layer explains the error, gradients may not grow with the loss scale.
        if self._passes.is_of_keras and self._has_float16 and not search.is_found:
            with contextlib.suppress(TimeoutError):
                unscaled = unscaled_gradients(self._searching, reference.exact)
                found = replace(found, unscaled=unscaled)
        return found

    @cached_property
    def _measured(self) -> LayerResults:
        """The marks of a pass in float32 in which each layer also runs in its own precision."""
        return self._searching.in_float32(measure=True).marks

    def _is_sound(
        self, result: PassResult, reference: Reference, number_format: FloatFormat
    ) -> bool:
        if not result.is_finite:
            return False
        states = state_errors(result, reference)
        comparison = replace(_compared(result, reference), states=states)
        # What is too little to call a training harmed is not enough to call a cure sound.
        return not self._criteria.is_harmful(comparison, number_format, _MANY)

    def _is_harmful(self, comparison: Comparison) -> bool:
        return self._criteria.is_harmful(comparison, self._format, self._passes.examples)

    def _reference(self, exact: PassResult) -> Reference:
        return Reference(
            model=self._passes.model,
            exact=exact,
            halved=partial(_half_pass, self._passes),
            after=replace(self._searching, states=exact.states).in_float32,
            noise_factor=math.sqrt(self._share),
            largest_norms=self._context.largest_norms,
        )


def _compared(result: PassResult, reference: Reference) -> Comparison:
    """Returns the errors of outputs and gradients of a pass."""
    gradients = gradient_errors(result, reference)
    return Comparison(result.marks.output_error, gradients=gradients)


def _half_pass(passes: Passes) -> PassResult | None:
    """Returns a pass in float32 over the first half of the batch, twice.

    Returns `None` for a batch that is too small.
    """
    if passes.examples < 4 or not passes.has_backward or is_ragged(passes.data):
        return None
    size = passes.examples // 2
    half = keras.tree.map_structure(lambda tensor: tensor[:size], passes.data)
    return replace(passes, data=tiled(half, passes.examples)).in_float32()


def _usable_scale(exact: PassResult, own: LayerResults, share: float) -> float | None:
    """Returns the largest loss scale at which no gradient in 16 bits comes near the maximum.

    It is a power of two.

    Args:
        exact: The pass in float32, which has the magnitudes.
        own: The layers of a pass in the precision of the model. Gradients of those in float32 do
            not matter.
        share: What the gradients of outputs are multiplied by in a batch of the training; those of
            variables are as large there, for a mean over more examples.
    """
    of_activations = [
        share * amax
        for layer, amax in exact.marks.activation_gradients.items()
        if layer in own.in_16_bits or layer not in own.called
    ]
    of_variables = [
        float(np.max(np.abs(each), initial=0.0)) for _, each in gradients_in_16_bits(exact, own)
    ]
    largest = max([*of_activations, *of_variables], default=0.0)
    if not largest or not math.isfinite(largest):
        return None
    exponent = math.floor(math.log2(FLOAT16.max / largest)) - HEADROOM_BITS
    return 2.0 ** min(exponent, FLOAT32.max_exponent)
