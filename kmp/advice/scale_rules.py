"""Rules about the settings of the loss scale."""

import math
from operator import itemgetter

from kmp.advice.edits import SetArguments
from kmp.advice.finding import ERROR, INFO, WARNING, Finding
from kmp.advice.run_metrics import STUCK_AFTER, RunMetrics
from kmp.advice.wording import described, in_float32, of_steps, power
from kmp.records import Replay
from kmp.utils import FLOAT16, as_power

# Thresholds. A dynamic scale normally skips a few steps at the start and about one in 2000 later: that is no problem.
_SKIPPED_BY_FIXED = 0.01
_SKIPPED_BY_GROWTH = 0.02
_SMALL_GROWTH_INTERVAL = 200
_SKIPPED_AT_START = 6
_MANY_SKIPPED = 0.1
_SKIPPED_AT_ANY_SCALE = 0.05
_SPARE_BITS = 6.0
_MANY_SUBNORMAL = 0.05  # of the nonzero gradient elements


def backward(metrics: RunMetrics) -> Finding | None:
    """Reports overflows of the backward pass that a smaller loss scale does not avoid."""
    path, share = metrics.main_overflow_origin
    are_many = metrics.gradient_overflows > _SKIPPED_AT_ANY_SCALE * metrics.steps
    is_stuck = metrics.consecutive_overflows >= STUCK_AFTER and not metrics.ends_nonfinite
    if metrics.is_fixed:
        fails_at_any_scale = are_many and metrics.gradients.headroom >= _SPARE_BITS
    else:
        lowest = metrics.setting("min_scale", FLOAT16.smallest_normal)
        is_subnormal = metrics.gradients.subnormal_share > _MANY_SUBNORMAL and metrics.startup_overflows[0] > 0
        flushes = metrics.scale < 1.0 and (bool(metrics.unexplained_zero_variables) or is_subnormal)
        fails_at_any_scale = is_stuck or flushes or (are_many and metrics.scale <= lowest * 2.0**_SPARE_BITS)
    if not fails_at_any_scale or not path or metrics.nonfinite_losses >= metrics.gradient_overflows:
        return None
    replay = metrics.backward_replay
    if replay and _suits_smaller_scale(replay) and (replay.usable_scale or 0.0) < metrics.scale:
        return None  # a fixed scale that is too large, or a dynamic one that still falls
    layers = replay.float32_layers if replay else None
    evidence = (
        f"{of_steps(metrics, metrics.gradient_overflows)} were skipped with a finite loss, down to a loss scale of "
        f"{as_power(metrics.scale)}; {path} was the overflow origin in {share:.0%} of them"
    )
    scales = f"loss scales above {as_power(metrics.scale)}"
    if is_stuck or metrics.is_fixed:
        scales = "every loss scale"
    where, location = f"Gradients near {path} overflow at {scales}.", path
    if replay and replay.activation_gradients:
        layer, magnitude = max(replay.activation_gradients.items(), key=itemgetter(1))
        evidence += (
            f"; replayed in float32, the gradient of the output of {layer} reaches {magnitude:.3g} without scaling"
        )
        found = next((found for found in replay.nonfinite if found.is_backward), None)
        if found:
            # The backward pass of a loss that a layer adds runs outside of the layers.
            location = layers[0] if layers and found.layer == metrics.setting("model", None) else found.layer
            where = f"The backward pass of {described(metrics, location)} overflows float16 at {scales}."
    zero = metrics.gradients.all_zero_variables
    if zero:
        evidence += f"; at this scale the gradients of {len(zero)} variables are zero, such as {zero[-1]}"
    edits = in_float32(metrics, layers or [metrics.layer_of(path)])
    note = "" if layers else f"or the layers between {path} and the loss"
    if replay and (replay.usable_scale or 1.0) < 1.0:
        note = "or a smaller loss: a mean in place of a sum, a smaller loss weight, or targets in other units"
    return Finding("backward_overflow", ERROR, where, evidence, edits, note, location)


def scale_too_large(metrics: RunMetrics) -> Finding | None:
    """Reports a fixed loss scale that overflows."""
    if not metrics.is_fixed or metrics.gradient_overflows <= _SKIPPED_BY_FIXED * metrics.steps:
        return None
    path, share = metrics.main_overflow_origin
    origin = f"; {path} was the overflow origin in {share:.0%} of them" if path else ""
    recommended = metrics.gradients.curve.recommended if metrics.gradients.curve else None
    alternative = ""
    if recommended and 2.0 ** recommended[1] < metrics.scale:
        alternative = f"or loss_scale={power(recommended[1])}"
    return Finding(
        "scale_too_large",
        ERROR,
        f"The fixed loss scale of {as_power(metrics.scale)} is too large.",
        f"{of_steps(metrics, metrics.gradient_overflows)} overflowed in the backward pass with a finite loss{origin}",
        (SetArguments(metrics.settings_call, {"loss_scale": "'dynamic'"}),),
        alternative,
        "loss_scale",
    )


def growth_interval_too_small(metrics: RunMetrics) -> Finding | None:
    """Reports a scale that grows so often that it keeps overflowing."""
    interval = metrics.setting("growth_interval", None)
    after_startup = metrics.gradient_overflows - metrics.startup_overflows[0]
    if metrics.is_fixed or interval is None or interval > _SMALL_GROWTH_INTERVAL:
        return None
    if after_startup <= _SKIPPED_BY_GROWTH * metrics.steps or metrics.consecutive_overflows >= STUCK_AFTER:
        return None
    return Finding(
        "growth_interval_too_small",
        WARNING,
        "`growth_interval` is too small: the scale overflows again and again.",
        f"{of_steps(metrics, after_startup)} overflowed after the scale had stabilized, with growth every {interval} "
        "steps",
        (SetArguments(metrics.settings_call, {"growth_interval": "2000"}),),
        location="growth_interval",
    )


def initial_scale(metrics: RunMetrics) -> Finding | None:
    """Reports an initial scale that skipped the first steps."""
    count, first_clean, stable = metrics.startup_overflows
    initial, factor = metrics.setting("initial_scale", None), metrics.setting("backoff_factor", 0.5)
    replay = metrics.backward_replay
    is_stuck = metrics.consecutive_overflows == metrics.overflows == metrics.steps
    if is_stuck and not metrics.nonfinite_losses and replay and _suits_smaller_scale(replay) and replay.usable_scale:
        count = first_clean = metrics.steps
        stable = replay.usable_scale
    if metrics.is_fixed or initial is None or count <= _SKIPPED_AT_START:
        return None
    has_only_decreased = stable <= initial * factor**count * metrics.setting("growth_factor", 2.0)
    if backward(metrics) or not (is_stuck or has_only_decreased):
        return None
    is_slow = count > max(10, _MANY_SKIPPED * metrics.steps)
    return Finding(
        "initial_scale",
        ERROR if is_stuck else WARNING if is_slow else INFO,
        f"The initial loss scale of {as_power(initial)} is too large.",
        f"{count} of the first {first_clean} steps were skipped before the scale had dropped to {as_power(stable)}",
        (SetArguments(metrics.settings_call, {"initial_scale": power(math.floor(math.log2(stable)))}),),
        location="initial_scale",
    )


def _suits_smaller_scale(replay: Replay) -> bool:
    """Whether a smaller loss scale alone made the gradients of a replay finite."""
    return replay.float32_layers == []
