"""The rules of `kmp.advise`: each returns a finding or `None`; `CAUSES` lists them, the most severe first."""

import math
from collections.abc import Callable

from kmp.advice.finding import Finding
from kmp.advice.run_metrics import STUCK_AFTER, RunMetrics
from kmp.records import BATCH_WEIGHTS, BATCH_X, BATCH_Y, LOSS_FUNCTION
from kmp.utils import FLOAT16, FLOAT32, as_power

# Thresholds. A dynamic scale normally skips a few steps at the start and about one in 2000 later: that is no problem.
_EXPLODING_UPDATE = 0.5  # of the weights' norm, in one step; 1e-3 is typical
_LARGE_UPDATE = 0.05  # smaller updates cannot raise the loss a hundredfold
_EXPLODING_LOSS = 100.0  # times the first loss
_SMALL_LOSS = 0.01
_SKIPPED_BY_EXPLOSION = 0.1
_MANY_SUBNORMAL = 0.25
_MOST_SUBNORMAL = 0.5
_MANY_FLUSHED = 0.05
_SPARE_BITS = 6.0
_SKIPPED_BY_FIXED = 0.01
_SKIPPED_AT_ANY_SCALE = 0.05
_SKIPPED_BY_GROWTH = 0.02
_SMALL_GROWTH_INTERVAL = 200
_SKIPPED_AT_START = 10

_CHECKS = {
    BATCH_X: "assert np.isfinite(x).all() and np.abs(x).max() < 65504  # normalize larger values",
    BATCH_Y: "assert np.isfinite(y).all()",
    BATCH_WEIGHTS: "assert np.isfinite(sample_weight).all()",
}


def _exploding(metrics: RunMetrics) -> Finding | None:
    step, ratio = metrics.update_ratio
    limit = _EXPLODING_LOSS * max(abs(metrics.first_loss), _SMALL_LOSS)
    is_large_update, is_loss_rising = ratio > _EXPLODING_UPDATE, metrics.highest_loss > limit
    are_many_skipped = metrics.overflows > _SKIPPED_BY_EXPLOSION * metrics.steps
    # With small updates, a high loss at the end comes from a different batch, not from an explosion.
    stays_high = metrics.last_loss > limit and not 0.0 < ratio < _LARGE_UPDATE
    if not (is_large_update and (are_many_skipped or is_loss_rising)) and not (
        is_loss_rising and (metrics.ends_nonfinite or stays_high)
    ):
        return None
    optimizer = metrics.setting("optimizer", "")
    optimizer = optimizer if optimizer.isidentifier() else "keras.optimizers.Adam"  # the change is a line of code
    evidence = []
    if is_large_update:
        evidence.append(
            f"in step {step} the update was {ratio:.2g} times as large as the weights (L2 norms; 0.001 is typical)"
        )
    if is_loss_rising:
        evidence.append(f"the loss rose from {metrics.first_loss:.3g} to {metrics.highest_loss:.3g}")
    if metrics.ends_nonfinite:
        evidence.append(
            f"the loss was NaN or Inf in the last {metrics.consecutive_overflows} steps, after steps with a finite loss"
        )
    if metrics.overflows:
        evidence.append(f"{_of_steps(metrics, metrics.overflows)} were skipped")
    return Finding(
        "exploding",
        "Training diverges: the updates are too large in any number format.",
        "; ".join(evidence),
        f"{optimizer}(learning_rate=0.1 * learning_rate)  # or clipnorm=1.0",
    )


def _data(metrics: RunMetrics) -> Finding | None:
    tensor = metrics.nonfinite_tensor
    if not metrics.nonfinite_losses or tensor is None or not metrics.is_batch_nonfinite:
        return None
    return Finding(
        "data",
        "The data contain NaN, Inf or values too large for float16.",
        f"{_nonfinite_losses(metrics)}; in the last such step the first non-finite tensor was {tensor}",
        _CHECKS[tensor],
    )


def _layer(metrics: RunMetrics) -> Finding | None:
    tensor = metrics.nonfinite_tensor
    if not metrics.nonfinite_losses or tensor in (None, LOSS_FUNCTION) or metrics.is_batch_nonfinite:
        return None
    if _exploding(metrics):
        return None  # when training diverges, any layer can overflow first
    assert tensor is not None
    streak = (
        f"; the last {metrics.consecutive_overflows} steps all had such a loss: the weights may have grown too large"
    )
    change = f"layer = kmp.layers.Float32(layer)  # the layer {tensor.rpartition('/')[2]!r}"
    return Finding(
        "layer",
        f"The forward pass becomes non-finite at {tensor}.",
        f"{_nonfinite_losses(metrics)}; in the last such step the first non-finite tensor was the output of {tensor}, "
        "although the batch was finite: float16 overflows above 65504 and rounds an epsilon of 2^-25 or less to zero"
        + (streak if metrics.ends_nonfinite else ""),
        change + ("; or use a smaller learning rate" if metrics.ends_nonfinite else ""),
    )


def _backward(metrics: RunMetrics) -> Finding | None:
    """Reports overflows of the backward pass that a smaller loss scale does not avoid."""
    path, share = metrics.main_overflow_origin
    are_many = metrics.gradient_overflows > _SKIPPED_AT_ANY_SCALE * metrics.steps
    if metrics.is_fixed:
        fails_at_any_scale = are_many and metrics.headroom >= _SPARE_BITS
    else:
        lowest = metrics.setting("min_scale", FLOAT16.smallest_normal)
        is_stuck = metrics.consecutive_overflows >= STUCK_AFTER and not metrics.ends_nonfinite
        fails_at_any_scale = is_stuck or (are_many and metrics.scale <= lowest * 2.0**_SPARE_BITS)
    if not fails_at_any_scale or not path or metrics.nonfinite_losses >= metrics.gradient_overflows:
        return None
    return Finding(
        "layer",
        f"Gradients near {path} overflow at every loss scale.",
        f"{_of_steps(metrics, metrics.gradient_overflows)} were skipped with a finite loss, down to a loss scale of "
        f"{as_power(metrics.scale)}; {path} was the overflow origin in {share:.0%} of them",
        f"layer = kmp.layers.Float32(layer)  # layers between {path!r} and the loss; is an epsilon 2^-25 or less?",
    )


def _loss(metrics: RunMetrics) -> Finding | None:
    if not metrics.nonfinite_losses or _exploding(metrics):
        return None
    if metrics.nonfinite_tensor == LOSS_FUNCTION:
        return Finding(
            "loss",
            "The loss function returns NaN or Inf for finite outputs.",
            f"{_nonfinite_losses(metrics)}, although the outputs of all layers were finite",
            "keras.losses.SparseCategoricalCrossentropy(from_logits=True)  # or clip the argument of a log",
        )
    if metrics.nonfinite_tensor:
        return None
    if metrics.ends_nonfinite:
        streak = f"among them the last {metrics.consecutive_overflows}"
        pattern = f"{streak}, which suggests corrupt weights or corrupt data since then"
    elif metrics.nonfinite_losses < metrics.steps / 2:
        pattern = "most losses are finite, which suggests corrupt examples"
    else:
        pattern = "that is most steps, which suggests a layer that fails in float16"
    return Finding(
        "loss",
        "The loss is NaN or Inf before scaling, so no loss scale helps.",
        f"{_nonfinite_losses(metrics)}; {pattern}",
        "callbacks=[..., kmp.callbacks.ForwardProbe()]  # reports the first non-finite batch or layer",
    )


def _not_scaled(metrics: RunMetrics) -> Finding | None:
    if not metrics.is_unscaled or not metrics.is_float16:
        return None
    return Finding(
        "not_scaled",
        "The loss is not scaled: the training loop does not call `scale_loss`.",
        f"in {_of_steps(metrics, metrics.unscaled_steps)} the loss was not multiplied by the loss scale: gradients of "
        "magnitude 2^-25 or less underflow to zero",
        "scaled_loss = optimizer.scale_loss(loss)  # inside the tape; differentiate scaled_loss",
    )


def _scale_too_large(metrics: RunMetrics) -> Finding | None:
    if not metrics.is_fixed or metrics.gradient_overflows <= _SKIPPED_BY_FIXED * metrics.steps or _backward(metrics):
        return None
    path, share = metrics.main_overflow_origin
    origin = f"; {path} was the overflow origin in {share:.0%} of them" if path else ""
    recommended = metrics.curve.recommended if metrics.curve else None
    alternative = ""
    if recommended and 2.0 ** recommended[1] < metrics.scale:
        alternative = f"  # or loss_scale={_literal(recommended[1])}"
    return Finding(
        "scale_too_large",
        f"The fixed loss scale of {as_power(metrics.scale)} is too large.",
        f"{_of_steps(metrics, metrics.gradient_overflows)} overflowed in the backward pass with a finite loss{origin}",
        f"kmp.enable(loss_scale='dynamic'){alternative}",
    )


def _scale_too_small(metrics: RunMetrics) -> Finding | None:
    if not metrics.is_float16 or metrics.is_unscaled or not metrics.finite_samples:
        return None
    if metrics.gradient_overflows > _SKIPPED_BY_FIXED * metrics.steps:
        return None
    evidence = _underflow_evidence(metrics)
    if not evidence or metrics.headroom < _SPARE_BITS:
        return None
    curve = metrics.curve
    best = curve.recommended[1] if curve and curve.recommended else None
    argument = "loss_scale" if metrics.is_fixed else "initial_scale"
    change = "loss_scale='dynamic'" if best is None else f"{argument}={_literal(best)}"
    if best is not None and not metrics.is_fixed and metrics.setting("max_scale", math.inf) < 2.0**best:
        change += f", max_scale={_literal(FLOAT32.max_exponent)}"
    return Finding(
        "scale_too_small",
        f"The loss scale of {as_power(metrics.scale)} is too small: gradients are lost to underflow.",
        "; ".join(evidence),
        f"kmp.enable({change})" + ("  # or loss_scale='dynamic'" if metrics.is_fixed and best is not None else ""),
    )


def _underflow_evidence(metrics: RunMetrics) -> list[str]:
    """Returns the evidence that gradients underflow at the loss scale in use; empty without any."""
    evidence, all_zero = [], metrics.leading_all_zero_variables
    headroom = "" if math.isinf(metrics.headroom) else f", with {metrics.headroom:.0f} bits of headroom before overflow"
    if metrics.subnormal_share > _MANY_SUBNORMAL:
        evidence.append(
            f"{metrics.subnormal_share:.1%} of the nonzero sampled gradient elements are subnormal in float16 at the "
            f"loss scale in use{headroom}"
        )
    if all_zero and metrics.headroom >= 2 * _SPARE_BITS and metrics.zero_share >= 0.5:
        evidence.append(
            f"{metrics.zero_share:.1%} of the elements are exactly zero, including all elements of the "
            f"{len(all_zero)} variables nearest the input{headroom}"
        )
    if (metrics.excess_zeros or 0.0) > _MANY_FLUSHED:
        evidence.append(f"{metrics.excess_zeros:.1%} of all elements are zero in float16 but not in float32")
    if evidence and metrics.underflow_origins:
        path = max(metrics.underflow_origins, key=metrics.underflow_origins.__getitem__)
        samples = f"{metrics.underflow_origins[path]} of {len(metrics.finite_samples)} samples"
        evidence.append(f"the underflow origin is {path} in {samples}")
    return evidence


def _range(metrics: RunMetrics) -> Finding | None:
    curve = metrics.curve
    if not metrics.is_float16 or metrics.is_unscaled or curve is None or not math.isfinite(metrics.headroom):
        return None
    if metrics.subnormal_share > _MOST_SUBNORMAL and metrics.headroom < _SPARE_BITS:
        return _range_at_scale_in_use(metrics)
    if curve.recommended:
        return None
    lowest, highest = int(curve.log2_scales[0]), int(curve.log2_scales[-1])
    best = max(lowest, min(highest, math.floor(math.log2(metrics.scale) + metrics.headroom)))
    underflow = curve.at(best)["underflow"]
    if underflow <= _MANY_FLUSHED:
        return None
    largest, smallest = metrics.extremes
    return Finding(
        "range",
        "The gradients span too wide a range for float16 at any loss scale.",
        f"at {as_power(2.0**best)}, the largest scale at which no finite sample overflows, {underflow:.1%} of the "
        f"elements still underflow; {largest} has the largest gradients, and {smallest} underflows most",
        f"layer = kmp.layers.Float32(layer)  # around {largest!r}; or kmp.enable('mixed_bfloat16')",
    )


def _range_at_scale_in_use(metrics: RunMetrics) -> Finding:
    """Reports too wide a range that the curve does not show: elements already flushed to zero are missing from it."""
    largest, smallest = metrics.extremes
    return Finding(
        "range",
        f"The gradients of {largest} keep the loss scale too low for the others.",
        f"{metrics.subnormal_share:.1%} of the nonzero sampled gradient elements are subnormal in float16 at the loss "
        f"scale in use, {as_power(metrics.scale)}, with {max(metrics.headroom, 0.0):.0f} bits of headroom before "
        f"overflow; {largest} has the largest gradients, and {smallest} underflows most",
        f"layer = kmp.layers.Float32(layer)  # around {largest!r}; or kmp.enable('mixed_bfloat16')",
    )


def _growth_interval_too_small(metrics: RunMetrics) -> Finding | None:
    interval = metrics.setting("growth_interval", None)
    after_startup = metrics.gradient_overflows - metrics.startup_overflows[0]
    if metrics.is_fixed or interval is None or interval > _SMALL_GROWTH_INTERVAL:
        return None
    if after_startup <= _SKIPPED_BY_GROWTH * metrics.steps or metrics.consecutive_overflows >= STUCK_AFTER:
        return None
    return Finding(
        "growth_interval_too_small",
        "`growth_interval` is too small: the scale overflows again and again.",
        f"{_of_steps(metrics, after_startup)} overflowed after the scale had stabilized, with growth every {interval} "
        "steps",
        "kmp.enable(growth_interval=2000)",
    )


def _initial_scale(metrics: RunMetrics) -> Finding | None:
    count, first_clean, stable = metrics.startup_overflows
    initial, factor = metrics.setting("initial_scale", None), metrics.setting("backoff_factor", 0.5)
    if metrics.is_fixed or initial is None or count <= max(_SKIPPED_AT_START, _SKIPPED_BY_FIXED * metrics.steps):
        return None
    has_only_decreased = stable <= initial * factor**count * metrics.setting("growth_factor", 2.0)
    if not has_only_decreased or _backward(metrics):
        return None
    return Finding(
        "initial_scale",
        f"The initial loss scale of {as_power(initial)} is too large.",
        f"{count} of the first {first_clean} steps were skipped before the scale had dropped to {as_power(stable)}",
        f"kmp.enable(initial_scale={_literal(math.floor(math.log2(stable)))})",
    )


CAUSES: tuple[Callable[[RunMetrics], Finding | None], ...] = (
    _data,
    _exploding,
    _layer,
    _backward,
    _loss,
    _not_scaled,
    _scale_too_large,
    _scale_too_small,
    _range,
    _growth_interval_too_small,
    _initial_scale,
)


def _of_steps(metrics: RunMetrics, count: int) -> str:
    return f"{count} of {metrics.steps} steps ({count / max(1, metrics.steps):.1%})"


def _nonfinite_losses(metrics: RunMetrics) -> str:
    return f"in {_of_steps(metrics, metrics.nonfinite_losses)} the loss was NaN or Inf before scaling"


def _literal(exponent: int) -> str:
    return f"2.0**{exponent}"
