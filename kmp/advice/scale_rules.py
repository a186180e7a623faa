"""Rules about overflows of the backward pass, and the settings of the loss scale."""

import math
from operator import itemgetter

from kmp.advice.finding import ERROR, INFO, WARNING, Finding, SetArguments
from kmp.advice.forward_rules import DIVISIONS, LOGARITHMS, forward_finding
from kmp.advice.run_metrics import RunMetrics
from kmp.advice.thresholds import (
    FEW_SKIPPED,
    MANY_SKIPPED,
    MOST_SKIPPED,
    SKIPPED_AT_START,
    SKIPPED_BY_GROWTH,
    SLOW_START,
    SMALL_GROWTH_INTERVAL,
    SPARE_BITS,
    SUBNORMAL_AT_LOW_SCALE,
)
from kmp.advice.wording import in_float32, of_steps, power
from kmp.records import LOSS_FUNCTION, NonfiniteOperation, Replay
from kmp.utils import FLOAT16, as_power


def backward(metrics: RunMetrics) -> Finding | None:
    """Reports overflows of the backward pass that a smaller loss scale does not avoid."""
    replay, (path, share) = metrics.backward_replay, metrics.main_overflow_origin
    if not _overflows_at_every_scale(metrics):
        return None
    if replay and replay.is_finite_in_float32 and (first := _infinite_before_the_loss(metrics, replay)):
        return forward_finding(metrics, first, replay)

    evidence = (
        f"{of_steps(metrics, metrics.gradient_overflows)} were skipped with a finite loss, down to a loss scale of "
        f"{as_power(metrics.scale)}; {path} was the overflow origin in {share:.0%} of them"
    )
    found = next((found for found in replay.nonfinite if found.is_backward), None) if replay else None
    if replay and not replay.is_finite_in_float32:
        where = f"backward pass of {metrics.describe(found.layer)}" if found else f"gradients near {path}"
        operation = f": {found.operation} is the first to return {found.value}" if found else ""
        return Finding(
            "backward_overflow",
            ERROR,
            f"NaN or Inf in the {where}, in float32 too.",
            f"{evidence}; replayed in float32 the gradients are not finite either{operation}",
            note="not a matter of precision: the slope of a root or a norm is infinite at 0; add a small number to it",
            location=found.layer if found else path,
        )

    layers = replay.float32_layers if replay else None
    is_any_scale = metrics.is_fixed or (metrics.is_stuck and not metrics.ends_nonfinite)
    scales = "every loss scale" if is_any_scale else f"loss scales above {as_power(metrics.scale)}"
    title, location = f"Gradients near {path} overflow at {scales}.", path
    if replay and replay.activation_gradients:
        layer, magnitude = max(replay.activation_gradients.items(), key=itemgetter(1))
        evidence += (
            f"; replayed in float32, the gradient of the output of {layer} reaches {magnitude:.3g} without scaling"
        )
        if found:
            # The backward pass of a loss that a layer adds runs outside of the layers.
            location = layers[0] if layers and found.layer == metrics.settings.get("model") else found.layer
            title = f"The backward pass of {metrics.describe(location)} overflows float16 at {scales}."
    zero = metrics.gradients.all_zero_variables
    if zero:
        evidence += f"; at this scale the gradients of {len(zero)} variables are zero, such as {zero[-1]}"
    note = "" if layers else f"or the layers between {path} and the loss"
    if replay and (replay.usable_scale or 1.0) < 1.0:
        note = "or a smaller loss: a mean in place of a sum, a smaller loss weight, or targets in other units"
    edits = in_float32(metrics, layers or [metrics.layer_of(path)])
    return Finding("backward_overflow", ERROR, title, evidence, edits, note, location)


def _overflows_at_every_scale(metrics: RunMetrics) -> bool:
    """Whether gradients of a finite loss overflow for another reason than a loss scale that is too large."""
    gradients, replay = metrics.gradients, metrics.backward_replay
    if not metrics.overflow_origins or metrics.nonfinite_losses >= metrics.gradient_overflows:
        return False
    if replay and _suits_smaller_scale(replay) and (replay.usable_scale or 0.0) < metrics.scale:
        return False  # a fixed scale that is too large, or a dynamic one that still falls
    are_many = metrics.gradient_overflows > MANY_SKIPPED * metrics.steps
    is_stuck = metrics.is_stuck and not metrics.ends_nonfinite
    if replay and not replay.is_finite_in_float32:
        return is_stuck or metrics.gradient_overflows - metrics.startup_overflows[0] > FEW_SKIPPED * metrics.steps
    if metrics.is_fixed:
        return are_many and gradients.headroom >= SPARE_BITS
    is_subnormal = gradients.subnormal_share > SUBNORMAL_AT_LOW_SCALE and metrics.startup_overflows[0] > 0
    flushes = metrics.scale < 1.0 and (bool(metrics.unexplained_zero_variables) or is_subnormal)
    lowest = metrics.settings.get("min_scale", FLOAT16.smallest_normal)
    return is_stuck or flushes or (are_many and metrics.scale <= lowest * 2.0**SPARE_BITS)


def _infinite_before_the_loss(metrics: RunMetrics, replay: Replay) -> NonfiniteOperation | None:
    """Returns a logarithm of 0 or a division by 0 whose Inf the loss does not show, but the gradients do."""
    needed = {*(replay.float32_layers or ()), LOSS_FUNCTION, metrics.settings.get("model")}
    for found in replay.nonfinite:
        is_division_by_0 = found.operation in DIVISIONS and found.smallest_input == 0.0
        if found.layer in needed and not found.is_backward and (found.operation in LOGARITHMS or is_division_by_0):
            return found
    return None


def _suits_smaller_scale(replay: Replay) -> bool:
    """Whether a smaller loss scale alone made the gradients of a replay finite."""
    return replay.is_finite_in_float32 and replay.float32_layers == []


def scale_too_large(metrics: RunMetrics) -> Finding | None:
    """Reports a fixed loss scale that overflows."""
    replay, curve = metrics.backward_replay, metrics.gradients.curve
    if not metrics.is_fixed or metrics.gradient_overflows <= FEW_SKIPPED * metrics.steps:
        return None
    if replay and not replay.is_finite_in_float32:
        return None
    path, share = metrics.main_overflow_origin
    origin = f"; {path} was the overflow origin in {share:.0%} of them" if path else ""
    recommended = curve.recommended if curve else None
    is_lower = recommended is not None and 2.0 ** recommended[1] < metrics.scale
    return Finding(
        "scale_too_large",
        ERROR,
        f"The fixed loss scale of {as_power(metrics.scale)} is too large.",
        f"{of_steps(metrics, metrics.gradient_overflows)} overflowed in the backward pass with a finite loss{origin}",
        [SetArguments(metrics.settings_call, {"loss_scale": "'dynamic'"})],
        f"or loss_scale={power(recommended[1])}" if recommended and is_lower else "",
        "loss_scale",
    )


def min_scale(metrics: RunMetrics) -> Finding | None:
    """Reports a minimum of a dynamic loss scale at which gradients still overflow."""
    replay, lowest = metrics.backward_replay, metrics.settings.get("min_scale", FLOAT16.smallest_normal)
    if metrics.is_fixed or not replay or not replay.usable_scale or not _suits_smaller_scale(replay):
        return None
    is_stuck = metrics.is_stuck and not metrics.ends_nonfinite
    are_many = metrics.gradient_overflows > MANY_SKIPPED * metrics.steps and metrics.scale <= lowest
    if replay.usable_scale >= lowest or not (is_stuck or are_many):
        return None
    suitable = power(math.log2(replay.usable_scale))
    # The scale falls from the initial one on: with the usable one the first steps are not skipped.
    arguments = {"initial_scale": suitable} if metrics.overflows == metrics.steps else {}
    return Finding(
        "scale_too_large",
        ERROR,
        f"The minimum loss scale of {as_power(lowest)} is too large.",
        f"{of_steps(metrics, metrics.gradient_overflows)} overflowed in the backward pass with a finite loss; "
        f"replayed, the gradients are finite at a loss scale of {as_power(replay.usable_scale)}",
        [SetArguments(metrics.settings_call, arguments | {"min_scale": suitable})],
        location="min_scale",
    )


def growth_interval_too_small(metrics: RunMetrics) -> Finding | None:
    """Reports a scale that grows so often that it keeps overflowing."""
    interval = metrics.settings.get("growth_interval")
    after_startup = metrics.gradient_overflows - metrics.startup_overflows[0]
    if metrics.is_fixed or interval is None or interval > SMALL_GROWTH_INTERVAL or metrics.is_stuck:
        return None
    replay = metrics.backward_replay
    if after_startup <= SKIPPED_BY_GROWTH * metrics.steps or (replay and not replay.is_finite_in_float32):
        return None
    return Finding(
        "growth_interval_too_small",
        WARNING,
        "`growth_interval` is too small: the scale overflows again and again.",
        f"{of_steps(metrics, after_startup)} overflowed after the scale had stabilized, with growth every {interval} "
        "steps",
        [SetArguments(metrics.settings_call, {"growth_interval": "2000"})],
        location="growth_interval",
    )


def initial_scale(metrics: RunMetrics) -> Finding | None:
    """Reports an initial scale that skipped the first steps."""
    count, first_clean, stable = metrics.startup_overflows
    initial, factor = metrics.settings.get("initial_scale"), metrics.settings.get("backoff_factor", 0.5)
    if metrics.is_fixed or initial is None or _overflows_at_every_scale(metrics) or min_scale(metrics):
        return None
    replay = metrics.backward_replay
    if replay and not replay.is_finite_in_float32:
        return None
    has_never_updated = metrics.consecutive_overflows == metrics.overflows == metrics.steps
    suitable = replay.usable_scale if replay and _suits_smaller_scale(replay) else None
    if has_never_updated and not metrics.nonfinite_losses and suitable:
        count, first_clean, stable = metrics.steps, metrics.steps, suitable
    has_only_decreased = stable <= initial * factor**count * metrics.settings.get("growth_factor", 2.0)
    if count <= SKIPPED_AT_START or not (has_never_updated or has_only_decreased):
        return None
    is_slow = count > max(SLOW_START, MOST_SKIPPED * metrics.steps)
    return Finding(
        "initial_scale",
        ERROR if has_never_updated else WARNING if is_slow else INFO,
        f"The initial loss scale of {as_power(initial)} is too large.",
        f"{count} of the first {first_clean} steps were skipped before the scale had dropped to {as_power(stable)}",
        [SetArguments(metrics.settings_call, {"initial_scale": power(math.log2(stable))})],
        location="initial_scale",
    )
