"""Rules about overflows of the backward pass, and the settings of the loss scale."""

import math
from collections.abc import Sequence
from operator import itemgetter

from kmp.advice import thresholds
from kmp.advice.finding import ERROR, INFO, WARNING, Edit, Finding, SetArguments
from kmp.advice.forward_rules import DIVISIONS, LOGARITHMS, forward_finding
from kmp.advice.run_metrics import RunMetrics
from kmp.advice.wording import of_steps, power, replayed_change, skipped_with_finite_loss
from kmp.records import LOSS_FUNCTION
from kmp.utils import FLOAT16, as_power


def nonfinite_gradients(metrics: RunMetrics) -> Finding | None:
    """Reports gradients of a finite loss that are NaN or Inf in float32 too, so that no loss scale helps."""
    replay = metrics.backward_replay
    if not metrics.gradient_overflows or replay is None or replay.is_finite_in_float32:
        return None
    found = next((found for found in replay.nonfinite if found.is_backward), None)
    path, _ = metrics.main_overflow_origin
    where = (
        f"backward pass of {metrics.describe(found.layer)}"
        if found
        else f"gradients near {path or 'the loss'}"
    )
    operation = f": {found.operation} is the first to return {found.value}" if found else ""
    is_rare = (
        metrics.gradient_overflows <= thresholds.FEW_SKIPPED * metrics.steps
        and not metrics.is_stuck
    )
    return Finding(
        "backward_overflow",
        WARNING if is_rare else ERROR,
        f"NaN or Inf in the {where}, in float32 too.",
        f"{skipped_with_finite_loss(metrics)}; replayed in float32, the gradients are not finite"
        f" either{operation}",
        note=(
            "not a matter of precision: look at that operation; a root or a norm, say, has an"
            " infinite slope at 0"
        ),
        location=found.layer if found else path,
    )


def backward(metrics: RunMetrics) -> Finding | None:
    """Reports overflows of the backward pass that a smaller loss scale does not avoid."""
    replay, (path, share) = metrics.backward_replay, metrics.main_overflow_origin
    if not path or not _overflows_at_every_scale(metrics):
        return None
    is_any_scale = metrics.is_fixed or metrics.is_stuck
    scales = "every loss scale" if is_any_scale else f"loss scales above {as_power(metrics.scale)}"
    title, location = f"Gradients near {path} overflow at {scales}.", path
    evidence = (
        f"{skipped_with_finite_loss(metrics)}, down to a loss scale of {as_power(metrics.scale)};"
        f" {path} was the overflow origin in {share:.0%} of them"
    )
    edits: Sequence[Edit] = ()
    note = (
        f"no batch was replayed: layers between {path} and the loss, or the loss, may need float32"
    )
    if replay:
        # A logarithm of 0 or a division by 0 whose Inf the loss does not show, but the gradients
        # do.
        layers = replay.float32_layers or []
        needed = {*layers, LOSS_FUNCTION, metrics.settings.get("model")}
        for found in replay.nonfinite:
            is_cause = found.operation in LOGARITHMS or (
                found.operation in DIVISIONS and found.smallest_input == 0.0
            )
            if is_cause and found.layer in needed and not found.is_backward:
                return forward_finding(metrics, found, replay)
        if replay.activation_gradients:
            layer, magnitude = max(replay.activation_gradients.items(), key=itemgetter(1))
            evidence += (
                f"; replayed in float32, the gradient of the output of {layer} reaches"
                f" {magnitude:.3g} without scaling"
            )
            where = [found.layer for found in replay.nonfinite if found.is_backward]
            if where:
                # The backward pass of a loss that a layer adds runs outside of the layers, or in
                # another one.
                location = next((layer for layer in where if layer in layers), (layers or where)[0])
                title = (
                    f"The backward pass of {metrics.describe(location)} overflows float16 at"
                    f" {scales}."
                )
        edits, note = replayed_change(metrics, replay, "the gradients for the batch are finite")
        if (replay.usable_scale or 1.0) < 1.0:
            note = (
                "or a smaller loss: a mean in place of a sum, a smaller loss weight, or targets in"
                " other units"
            )
    if zero := metrics.all_zero_variables:
        evidence += (
            f"; at this scale the gradients of {len(zero)} variables are zero, such as {zero[-1]}"
        )
    return Finding("backward_overflow", ERROR, title, evidence, edits, note, location)


def _overflows_at_every_scale(metrics: RunMetrics) -> bool:
    """Whether gradients of a finite loss overflow for another reason than a loss scale that is too large."""
    suitable = _suitable_scale(metrics)
    if metrics.nonfinite_losses >= metrics.gradient_overflows:
        return False
    if suitable is not None and suitable < metrics.scale:
        return False  # a fixed scale that is too large, or a dynamic one that still falls
    are_many = metrics.gradient_overflows > thresholds.MANY_SKIPPED * metrics.steps
    if metrics.is_fixed:
        return are_many and metrics.headroom >= thresholds.SPARE_BITS
    is_subnormal = (
        metrics.subnormal_share > thresholds.SUBNORMAL_AT_LOW_SCALE
        and metrics.startup_overflows[0] > 0
    )
    flushes = metrics.scale < 1.0 and (bool(metrics.unexplained_zero_variables) or is_subnormal)
    is_at_minimum = metrics.scale <= metrics.min_scale * 2.0**thresholds.SPARE_BITS
    return metrics.is_stuck or flushes or (are_many and is_at_minimum)


def _suitable_scale(metrics: RunMetrics) -> float | None:
    """Returns the scale at which replayed gradients are finite without a change of layers; `None` if it is unknown."""
    replay = metrics.backward_replay
    if replay is None or not replay.is_finite_in_float32 or replay.float32_layers != []:
        return None
    return replay.usable_scale or 0.0


def scale_too_large(metrics: RunMetrics) -> Finding | None:
    """Reports a fixed loss scale that overflows."""
    if not metrics.is_fixed or metrics.gradient_overflows <= thresholds.FEW_SKIPPED * metrics.steps:
        return None
    (path, share), curve = metrics.main_overflow_origin, metrics.curve
    origin = f"; {path} was the overflow origin in {share:.0%} of them" if path else ""
    highest = curve.recommended[1] if curve and curve.recommended else math.inf
    return Finding(
        "scale_too_large",
        ERROR,
        f"The fixed loss scale of {as_power(metrics.scale)} is too large.",
        f"{of_steps(metrics, metrics.gradient_overflows)} overflowed in the backward pass with a"
        f" finite loss{origin}",
        [SetArguments(metrics.settings_call, {"loss_scale": "'dynamic'"})],
        f"or loss_scale={power(highest)}" if highest < math.log2(metrics.scale) else "",
        "loss_scale",
    )


def min_scale(metrics: RunMetrics) -> Finding | None:
    """Reports a minimum of a dynamic loss scale at which gradients still overflow."""
    suitable = _suitable_scale(metrics)
    if metrics.is_fixed or not suitable or suitable >= metrics.min_scale:
        return None
    are_many = metrics.gradient_overflows > thresholds.MANY_SKIPPED * metrics.steps
    if not metrics.is_stuck and not (are_many and metrics.scale <= metrics.min_scale):
        return None
    # A minimum needs a margin, because the gradients of other batches are larger. If no step was
    # applied, a run needs a lower start too.
    arguments = {
        "min_scale": power(
            min(math.log2(FLOAT16.smallest_normal), math.log2(suitable) - thresholds.SPARE_BITS)
        )
    }
    if metrics.overflows == metrics.steps:
        arguments |= {"initial_scale": power(math.log2(suitable))}
    return Finding(
        "scale_too_large",
        ERROR,
        f"The minimum loss scale of {as_power(metrics.min_scale)} is too large.",
        f"{of_steps(metrics, metrics.gradient_overflows)} overflowed in the backward pass with a"
        f" finite loss; replayed, the gradients are finite at a loss scale of {as_power(suitable)}",
        [SetArguments(metrics.settings_call, arguments)],
        location="min_scale",
    )


def hysteresis(metrics: RunMetrics) -> Finding | None:
    """Reports a hysteresis that keeps a scale which overflows again and again."""
    value, replay = metrics.settings.get("hysteresis", 1), metrics.backward_replay
    if metrics.is_fixed or not metrics.is_stuck or metrics.nonfinite_losses:
        return None
    if replay and replay.float32_layers != []:
        return None
    if value <= thresholds.STUCK_AFTER or metrics.consecutive_overflows >= value:
        return None
    return Finding(
        "hysteresis_too_large",
        ERROR,
        "`hysteresis` is too large: the loss scale overflows, and does not back off.",
        f"the last {metrics.consecutive_overflows} steps were skipped with a finite loss; the scale"
        f" backs off after {value} in a row",
        [SetArguments(metrics.settings_call, {"hysteresis": "1"})],
        location="hysteresis",
    )


def initial_scale(metrics: RunMetrics) -> Finding | None:
    """Reports an initial scale that skipped the first steps."""
    count, first_clean, stable = metrics.startup_overflows
    initial, factor = (
        metrics.settings.get("initial_scale"),
        metrics.settings.get("backoff_factor", 0.5),
    )
    if metrics.is_fixed or initial is None:
        return None
    has_never_updated = metrics.consecutive_overflows == metrics.overflows == metrics.steps
    suitable = _suitable_scale(metrics)
    if has_never_updated and not metrics.nonfinite_losses and suitable:
        count, first_clean, stable = metrics.steps, metrics.steps, suitable
    has_only_decreased = stable <= initial * factor**count * metrics.settings.get(
        "growth_factor", 2.0
    )
    if count <= thresholds.SKIPPED_AT_START or not (has_never_updated or has_only_decreased):
        return None
    is_slow = count > max(thresholds.SLOW_START, thresholds.MOST_SKIPPED * metrics.steps)
    return Finding(
        "initial_scale",
        ERROR if has_never_updated else WARNING if is_slow else INFO,
        f"The initial loss scale of {as_power(initial)} is too large.",
        f"{count} of the first {first_clean} steps were skipped before the scale had dropped to"
        f" {as_power(stable)}",
        [SetArguments(metrics.settings_call, {"initial_scale": power(math.log2(stable))})],
        location="initial_scale",
    )


def growth_interval_too_small(metrics: RunMetrics) -> Finding | None:
    """Reports a scale that grows so often, or backs off so slowly, that it keeps overflowing."""
    settings = metrics.settings
    interval, growth = settings.get("growth_interval"), settings.get("growth_factor", 2.0)
    backoff, patience = settings.get("backoff_factor", 0.5), settings.get("hysteresis", 1)
    if metrics.is_fixed or interval is None:
        return None
    to_undo = (
        -math.log2(growth) / math.log2(backoff) * patience
    )  # steps that are skipped after each growth
    if to_undo < interval / thresholds.SMALL_GROWTH_INTERVAL:
        return None
    if metrics.consecutive_overflows >= min(
        metrics.steps, max(thresholds.STUCK_AFTER, 2 * to_undo)
    ):
        return None  # not even one step was applied, or a longer streak than these settings cause
    after_startup = metrics.gradient_overflows - metrics.startup_overflows[0]
    if after_startup <= thresholds.SKIPPED_BY_GROWTH * metrics.steps:
        return None
    worse = {
        "growth_interval": "2000" if interval <= thresholds.SMALL_GROWTH_INTERVAL else "",
        "growth_factor": "2.0" if growth > 2.0 else "",
        "backoff_factor": "0.5" if backoff > 0.5 else "",
        "hysteresis": "1" if patience > 1 else "",
    }
    arguments = {name: value for name, value in worse.items() if value}
    what = "The loss scale grows too fast, or backs off too slowly"
    if list(arguments) == ["growth_interval"]:
        what = "`growth_interval` is too small"
    return Finding(
        "growth_interval_too_small",
        WARNING,
        f"{what}: the scale overflows again and again.",
        f"{of_steps(metrics, after_startup)} overflowed after the scale had stabilized, with growth"
        f" by {growth:g} every {interval} steps; it takes {math.ceil(to_undo)} skipped"
        f" step{'s' * (to_undo > 1)} to undo one",
        [SetArguments(metrics.settings_call, arguments)],
        location=next(iter(arguments)),
    )
