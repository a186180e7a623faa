"""Rules about what float16 flushes to zero or rounds away."""

import math

from kmp.advice.edits import SetArguments
from kmp.advice.finding import ERROR, INFO, WARNING, Finding
from kmp.advice.run_metrics import RunMetrics
from kmp.advice.wording import in_float32, name_of, power
from kmp.utils import FLOAT32, as_power

_MANY_SUBNORMAL = 0.25
_MOST_SUBNORMAL = 0.5
_MANY_FLUSHED = 0.05
_MANY_IN_REFERENCE = 0.3
_SPARE_BITS = 6.0
_DEFAULT_EXPONENT = 15  # of the initial scale of `kmp.enable`
_SKIPPED_BY_FIXED = 0.01


def branch(metrics: RunMetrics) -> Finding | None:
    """Reports a part of the model whose gradients are all flushed, while those of the rest are not."""
    gradients = metrics.gradients
    replay, layers = metrics.clean_replay, metrics.flushed_layers
    if not metrics.is_float16 or replay is None or not layers:
        return None
    names = [name for name in gradients.finite_samples[-1].names if name not in replay.zero]
    flushed = [name for name in names if metrics.layer_of(name) in layers]
    alive = [name for name in names if metrics.flushed.get(name, 0.0) <= _MANY_FLUSHED]
    if not alive or len(flushed) + len(alive) < len(names) / 2:
        return None
    if names.index(alive[0]) > max(map(names.index, flushed)):
        return None  # the layers nearest the input: gradients underflow on their way there
    shown = ", ".join(repr(name_of(layer)) for layer in layers[:5])
    weight = "a larger loss weight, if these layers belong to one of several outputs"
    is_scale_too_small = gradients.headroom >= _SPARE_BITS
    return Finding(
        "branch_underflow",
        ERROR,
        f"The gradients of {shown} are mostly zero in float16, while those of other layers are not.",
        f"replayed at the loss scale {as_power(replay.loss_scale)}, {len(flushed)} variables have gradients of which "
        f"float16 flushes more than half to zero and float32 none; {len(alive)} variables lose less than 5 %",
        _larger_scale(metrics) if is_scale_too_small else in_float32(metrics, layers),
        f"or {weight}" if is_scale_too_small else f"the others keep the loss scale low; or {weight}",
        layers[0],
    )


def scale_too_small(metrics: RunMetrics) -> Finding | None:
    """Reports a loss scale at which gradients underflow, although a larger one would not overflow."""
    gradients = metrics.gradients
    if not metrics.is_float16 or not gradients.finite_samples:
        return None
    if metrics.gradient_overflows > _SKIPPED_BY_FIXED * metrics.steps:
        return None
    evidence = _underflow_evidence(metrics)
    if not evidence or gradients.headroom < _SPARE_BITS:
        return None
    return Finding(
        "scale_too_small",
        ERROR,
        f"The loss scale of {as_power(metrics.scale)} is too small: gradients are lost to underflow.",
        "; ".join(evidence),
        _larger_scale(metrics),
        location="loss_scale" if metrics.is_fixed else "initial_scale",
    )


def wide_range(metrics: RunMetrics) -> Finding | None:
    """Reports gradients that span more than float16's range."""
    gradients = metrics.gradients
    curve = gradients.curve
    if not metrics.is_float16 or curve is None or not math.isfinite(gradients.headroom):
        return None
    largest, smallest = gradients.extremes
    edits = in_float32(metrics, [metrics.layer_of(largest)])
    note = "or kmp.enable(policy='mixed_bfloat16')"
    if gradients.subnormal_share > _MOST_SUBNORMAL and gradients.headroom < _SPARE_BITS:
        evidence = (
            f"{gradients.subnormal_share:.1%} of the nonzero sampled gradient elements are subnormal in float16 at the "
            f"loss scale in use, {as_power(metrics.scale)}, with {max(gradients.headroom, 0.0):.0f} bits of headroom "
            f"before overflow; {largest} has the largest gradients, and {smallest} underflows most"
        )
        title = f"The gradients of {largest} keep the loss scale too low for the others."
        return Finding("range", WARNING, title, evidence, edits, note, largest)
    if curve.recommended:
        return None
    lowest, highest = int(curve.log2_scales[0]), int(curve.log2_scales[-1])
    best = max(lowest, min(highest, math.floor(math.log2(metrics.scale) + gradients.headroom)))
    underflow = curve.at(best)["underflow"]
    # A reference also has the elements that float16 flushes at any scale. Most of them are too small to matter.
    if underflow <= (_MANY_IN_REFERENCE if curve.is_measured else _MANY_FLUSHED):
        return None
    return Finding(
        "range",
        WARNING,
        "The gradients span too wide a range for float16 at any loss scale.",
        f"at {as_power(2.0**best)}, the largest scale at which no finite sample overflows, {underflow:.1%} of the "
        f"elements still underflow; {largest} has the largest gradients, and {smallest} underflows most",
        edits,
        note,
        largest,
    )


def dead(metrics: RunMetrics) -> Finding | None:
    """Reports variables whose gradient is zero in float32 too."""
    gradients = metrics.gradients
    replay = metrics.clean_replay
    zero = [name for name in (replay.zero if replay else ()) if name in gradients.all_zero_variables]
    if not zero or replay is None:
        return None
    variables = (
        "1 variable has a gradient that is" if len(zero) == 1 else f"{len(zero)} variables have gradients that are"
    )
    return Finding(
        "dead",
        INFO,
        f"The gradient of {_listed(zero)} is zero, in float32 too.",
        f"{variables} all zero in {len(gradients.usable_samples)} samples, and for {replay.examples} examples in "
        "float32",
        (),
        "not underflow: units that are never active, or weights whose effect on the loss cancels out",
        zero[0],
    )


def unused(metrics: RunMetrics) -> Finding | None:
    """Reports variables without a gradient."""
    names = metrics.gradients.variables_without_gradient
    if not names:
        return None
    return Finding(
        "unused",
        INFO,
        f"The loss does not depend on {_listed(names)}.",
        f"no sample has a gradient of {'this variable' if len(names) == 1 else 'these variables'}",
        (),
        "not underflow: layers that are not used, or an output without a loss",
        names[0],
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _larger_scale(metrics: RunMetrics) -> tuple[SetArguments, ...]:
    """Returns the scale that the samples and the float32 reference recommend, or a dynamic one."""
    curve = metrics.gradients.curve
    recommended = curve.recommended if curve else None
    if metrics.is_fixed and not recommended:
        return (SetArguments(metrics.settings_call, {"loss_scale": "'dynamic'"}),)
    best = recommended[1] if recommended else _DEFAULT_EXPONENT
    arguments = {"loss_scale": "'dynamic'"} if metrics.is_fixed else {}
    arguments["initial_scale"] = power(best)
    if not metrics.is_fixed and metrics.setting("max_scale", math.inf) < 2.0**best:
        arguments["max_scale"] = power(FLOAT32.max_exponent)
    return (SetArguments(metrics.settings_call, arguments),)


def _underflow_evidence(metrics: RunMetrics) -> list[str]:
    """Returns the evidence that gradients underflow at the loss scale in use; empty without any."""
    gradients = metrics.gradients
    evidence, all_zero = [], gradients.leading_all_zero_variables
    headroom = (
        "" if math.isinf(gradients.headroom) else f", with {gradients.headroom:.0f} bits of headroom before overflow"
    )
    if gradients.subnormal_share > _MANY_SUBNORMAL:
        evidence.append(
            f"{gradients.subnormal_share:.1%} of the nonzero sampled gradient elements are subnormal in float16 at the "
            f"loss scale in use{headroom}"
        )
    if (
        not set(all_zero).isdisjoint(metrics.unexplained_zero_variables)
        and gradients.headroom >= 2 * _SPARE_BITS
        and gradients.zero_share >= 0.5
    ):
        evidence.append(
            f"{gradients.zero_share:.1%} of the elements are exactly zero, including all elements of the "
            f"{len(all_zero)} variables nearest the input{headroom}"
        )
    flushed = _mean_flushed(metrics)
    if flushed > _MANY_FLUSHED:
        evidence.append(f"replayed, {flushed:.1%} of the elements of a gradient are zero in float16 but not in float32")
    elif not metrics.replays and (gradients.excess_zeros or 0.0) > _MANY_FLUSHED:
        evidence.append(f"{gradients.excess_zeros:.1%} of all elements are zero in float16 but not in float32")
    if evidence and gradients.underflow_origins:
        path = max(gradients.underflow_origins, key=gradients.underflow_origins.__getitem__)
        samples = f"{gradients.underflow_origins[path]} of {len(gradients.finite_samples)} samples"
        evidence.append(f"the underflow origin is {path} in {samples}")
    return evidence


def _mean_flushed(metrics: RunMetrics) -> float:
    """Returns the share of flushed elements, the mean over the variables."""
    names = metrics.gradients.finite_samples[-1].names if metrics.gradients.finite_samples else ()
    return sum(metrics.flushed.get(name, 0.0) for name in names) / max(1, len(names))
