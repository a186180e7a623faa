"""Whether a compared pass is sound, and where a harmful error begins."""

import math
from collections.abc import Callable, Iterable, Sequence

from kmp.diagnosis import thresholds
from kmp.numerics import steepness
from kmp.records import Replay
from kmp.records.replay import (
    LOSS_FUNCTION,
    Comparison,
    GradientError,
    LayerError,
    LossyOperation,
    LostWeight,
    NonfiniteOperation,
    StateError,
)
from kmp.records.step_facts import CodeLine, StepFacts
from kmp.utils.float_formats import BFLOAT16, FLOAT16, FloatFormat


def in_float16(facts: StepFacts | None) -> list[CodeLine]:
    """Returns what rounds in float16 between the outputs of layers and the loss.

    The steepest function first; nothing if it is not known.
    """
    found = facts.operations_in_16_bits if facts else None
    in_float16 = [each for each in found or () if each.dtype == FLOAT16.name]
    return sorted(in_float16, key=lambda each: steepness(each.operation))


def unconverged(errors: Sequence[GradientError]) -> list[GradientError]:
    """Returns the errors of layers whose gradients have not nearly vanished since earlier steps.

    Errors of the others do no harm: the layer has learned what it can, or the whole training has,
    this layer with it.
    """
    norm = math.hypot(*(each.norm for each in errors))
    largest = math.hypot(*(each.largest_norm for each in errors))
    have_all_converged = norm < thresholds.CONVERGED * largest
    found = []
    for each in errors:
        limit = thresholds.CONVERGED
        if have_all_converged:
            limit = thresholds.CONVERGED_WITH_ALL
        if each.norm >= limit * each.largest_norm:
            found.append(each)
    return found


def is_harmful_gradient(error: GradientError) -> bool:
    """Whether the error is large, and far above the sampling noise, or its lost part above it."""
    if error.error <= thresholds.HARMFUL_GRADIENT_ERROR:
        return False
    noise = error.noise or 0.0
    lost = 1.0 - error.kept
    if error.error > thresholds.BEYOND_NOISE * noise:
        return True
    return lost > max(noise, thresholds.HARMFUL_GRADIENT_ERROR)


def is_harmful_state(error: StateError) -> bool:
    """Whether a state that moves slowly stays far from where the batches move it.

    Or from where the weights move it, if its update does not depend on the batch.
    """
    if error.noise >= thresholds.HARMFUL_GRADIENT_ERROR:
        return False
    limit = thresholds.MOST if error.noise else thresholds.STEADY_UPDATE
    return error.next_update > limit and error.error > thresholds.HARMFUL_GRADIENT_ERROR


def output_limit(number_format: FloatFormat) -> float:
    """Returns the error of outputs above which it is harmful, if gradients notice it."""
    if number_format is BFLOAT16:
        return thresholds.HARMFUL_OUTPUT_ERROR_IN_BFLOAT16
    return thresholds.HARMFUL_OUTPUT_ERROR


def are_harmful(
    output_error: float,
    gradient_errors: Sequence[GradientError],
    number_format: FloatFormat = FLOAT16,
) -> bool:
    """Whether errors of outputs and gradients are so large that 16 bits hurt the training."""
    if not gradient_errors:
        return output_error > thresholds.HARMFUL_OUTPUT_ERROR_ALONE
    if any(map(is_harmful_gradient, unconverged(gradient_errors))):
        return True
    largest = max(error.error for error in gradient_errors)
    is_noticed = largest > thresholds.SMALL_GRADIENT_ERROR
    return is_noticed and output_error > output_limit(number_format)


def harmful_states(errors: Iterable[StateError] | None) -> list[StateError]:
    """Returns the states that 16 bits keep far from where the batches move them."""
    return [error for error in errors or () if is_harmful_state(error)]


def lost_states(replay: Replay) -> list[StateError]:
    """Returns the `harmful_states` of a replay."""
    return harmful_states(replay.comparison.states) if replay.comparison else []


def harmful_gradients(replay: Replay) -> list[GradientError]:
    """Returns the errors of gradients of a replay that are harmful, the largest first."""
    return list(filter(is_harmful_gradient, unconverged(replay.gradient_errors)))


def is_harmful(replay: Replay, number_format: FloatFormat = FLOAT16) -> bool:
    """Whether the results of a replay differ so much that 16 bits hurt the training."""
    compared = replay.comparison
    return compared is not None and shows_harm(compared, number_format, replay.examples)


def shows_harm(comparison: Comparison, number_format: FloatFormat, examples: int) -> bool:
    """Whether a comparison of so many examples shows that 16 bits hurt the training."""
    if harmful_states(comparison.states):
        return True
    if has_few_examples(examples, number_format):
        return False
    return are_harmful(comparison.output_error, comparison.gradients, number_format)


def is_evidence(replay: Replay, number_format: FloatFormat = FLOAT16) -> bool:
    """Whether one replay is enough to show harm: not if only gradients differ."""
    if not replay.is_finite or overflow_inside(replay):
        return True
    if error_origin(replay, number_format) or lost_states(replay):
        return True
    if (replay.output_error or 0.0) > thresholds.HARMFUL_OUTPUT_ERROR_ALONE:
        return True
    # The rounding of the outputs may be all that is left of a small loss.
    loss = max(abs(replay.float32_loss or 0.0), thresholds.SMALL_LOSS)
    limit = thresholds.HARMFUL_OUTPUT_ERROR_ALONE * loss
    return is_harmful(replay, number_format) and loss_difference(replay) > limit


def agree_on_harm(comparisons: Sequence[Replay], number_format: FloatFormat = FLOAT16) -> bool:
    """Whether the comparisons of a run, since its last repair, agree that 16 bits hurt it.

    The last one has to be harmful, because harm that has passed asks for no change, and if only
    gradients differ, at least half of the last five: their errors are compared with an estimate of
    the noise, so one batch does not outvote several sound ones, while three that agree, as
    many as a repair needs, outvote the others also if the harm begins late.
    """
    if not comparisons or not is_harmful(comparisons[-1], number_format):
        return False
    if is_evidence(comparisons[-1], number_format):
        return True
    latest = comparisons[-thresholds.VOTING_COMPARISONS :]
    harmful = [replay for replay in latest if is_harmful(replay, number_format)]
    return 2 * len(harmful) >= len(latest)


def has_few_examples(examples: int, number_format: FloatFormat) -> bool:
    """Whether a comparison has too few examples to tell harm from rounding, which is coarse."""
    return number_format is BFLOAT16 and examples < thresholds.FEW_EXAMPLES


def loss_difference(replay: Replay) -> float:
    """Returns the magnitude of the loss's difference from float32; 0 if a loss is not known."""
    if replay.loss is None or replay.float32_loss is None:
        return 0.0
    return abs(replay.loss - replay.float32_loss)


def has_other_loss(replay: Replay) -> bool:
    """Whether the loss differs from float32 by more than its rounding."""
    limit = thresholds.HARMFUL_OUTPUT_ERROR * abs(replay.float32_loss or 0.0)
    return loss_difference(replay) > limit


def is_born_in_loss(replay: Replay) -> bool:
    """Whether the loss differs from float32, while the outputs it is computed from do not."""
    if (replay.output_error or 0.0) > thresholds.HARMFUL_OUTPUT_ERROR:
        return False
    return has_other_loss(replay)


def needs_another_scale_only(replay: Replay) -> bool:
    """Whether a search found that no layer has to change, but the loss scale."""
    search = replay.search
    return search is not None and search.is_found and not search.layers


def suitable_scale(replay: Replay | None) -> float | None:
    """Returns the scale at which replayed gradients are finite without a change of layers.

    `None` if it is unknown.
    """
    if replay is None or not replay.is_finite_in_float32:
        return None
    if not needs_another_scale_only(replay):
        return None
    return replay.gradients.usable_scale or 0.0


def forward_operations(replay: Replay) -> list[NonfiniteOperation]:
    """Returns the first operations of the forward pass with NaN or Inf."""
    return [found for found in replay.operations if not found.is_backward]


def overflow_inside(replay: Replay) -> NonfiniteOperation | None:
    """Returns the first forward operation with NaN or Inf in the loss or a layer of the cure.

    Others may be masks.
    """
    suspects = (LOSS_FUNCTION, *replay.float32_layers)
    return next((each for each in forward_operations(replay) if each.layer in suspects), None)


def lossy_operations(replay: Replay) -> list[LossyOperation]:
    """Returns the operations for whose results 16 bits are too few, the worst first."""
    found = replay.overflow.lossy if replay.overflow else []
    return [each for each in found if each.error > thresholds.HARMFUL_OUTPUT_ERROR]


def worst_lossy_operation(replay: Replay, is_of: Callable[[str], bool]) -> LossyOperation | None:
    """Returns the operation that loses most, of those in the layers of which `is_of` holds."""
    inside = (each for each in lossy_operations(replay) if is_of(each.layer))
    return max(inside, key=lambda each: each.error, default=None)


def lost_weights_of(replay: Replay, layer: str) -> list[LostWeight]:
    """Returns the weights of a layer and its sublayers with values that 16 bits lose."""
    return [weight for weight in replay.batch.lost_weights if weight.path.startswith(f"{layer}/")]


def error_origin(replay: Replay, number_format: FloatFormat = FLOAT16) -> LayerError | None:
    """Returns the layer where a harmful error of the outputs begins.

    It adds most to the error on inputs of float32. One of the layers of the cure, if these add to
    it. A layer with a weight that float16 loses may add little to it, which the next layers
    amplify. `None` without a harmful error, or if no layer adds to it.
    """
    if (replay.output_error or 0.0) <= output_limit(number_format):
        return None
    limit = thresholds.HARMFUL_OUTPUT_ERROR
    adding = [each for each in replay.layer_errors if _added(each) > limit]
    with_lost_weights = [
        each for each in replay.layer_errors if lost_weights_of(replay, each.layer)
    ]
    suspects = adding or with_lost_weights
    cured = [each for each in suspects if each.layer in replay.float32_layers]
    return max(cured or adding, key=_added, default=None)


def _added(error: LayerError) -> float:
    """Returns the error that a layer adds to inputs of float32; 0 if it was not measured."""
    return error.new_error or 0.0
