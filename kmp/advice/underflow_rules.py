"""Rules about what float16 flushes to zero or rounds away."""

import math
from collections.abc import Sequence

from kmp.advice import thresholds
from kmp.advice.finding import ERROR, INFO, WARNING, Finding, SetArguments
from kmp.advice.loss_scale_sweep import usable_scale
from kmp.advice.run_metrics import RunMetrics, name_of
from kmp.advice.wording import larger_scale
from kmp.records import layer_of
from kmp.utils import as_power

_NO_HEADROOM = "a larger loss scale would overflow, and no change was replayed: try"


def branch(metrics: RunMetrics) -> Finding | None:
    """Reports a part of the model whose gradients are all flushed, while those of the rest are not."""
    replay, layers = metrics.clean_replay, metrics.flushed_layers
    if not metrics.is_float16 or replay is None or not layers or metrics.needs_float32_layers:
        return None
    names = list(metrics.flushed)
    flushed = [name for name in names if metrics.layer_of(name) in layers]
    alive = [name for name, share in metrics.flushed.items() if share <= thresholds.MANY_FLUSHED]
    if not alive or len(flushed) + len(alive) < len(names) / 2:
        return None
    if names.index(alive[0]) > names.index(flushed[-1]):
        return None  # the layers nearest the input: gradients underflow on their way there
    shown = ", ".join(repr(name_of(layer)) for layer in layers[:5])
    has_headroom = metrics.headroom >= thresholds.SPARE_BITS
    return Finding(
        "branch_underflow",
        ERROR,
        f"The gradients of {shown} are mostly zero in float16, while those of other layers are"
        " not.",
        f"replayed at the loss scale {as_power(replay.loss_scale)}, {len(flushed)} variables have"
        f" gradients of which float16 flushes more than half to zero and float32 none; {len(alive)}"
        " variables lose less than 5 %",
        _larger_scale(metrics) if has_headroom else (),
        f"{'or' if has_headroom else _NO_HEADROOM} a larger loss weight, if these layers belong to"
        " one of several outputs",
        layers[0],
    )


def scale_too_small(metrics: RunMetrics) -> Finding | None:
    """Reports a loss scale at which gradients underflow, although a larger one would not overflow."""
    if (
        not metrics.is_float16
        or not metrics.finite_samples
        or metrics.headroom < thresholds.SPARE_BITS
    ):
        return None
    if (
        metrics.gradient_overflows > thresholds.FEW_SKIPPED * metrics.steps
        or metrics.needs_float32_layers
    ):
        return None
    newest, evidence = metrics.finite_samples[-1], []
    headroom = f", with {metrics.headroom:.0f} bits of headroom before overflow" * math.isfinite(
        metrics.headroom
    )
    if metrics.subnormal_share > thresholds.MANY_SUBNORMAL:
        evidence.append(f"{_subnormal(metrics)}{headroom}")
    flushed = sum(metrics.flushed.values()) / max(
        1, len(newest.names)
    )  # the mean over the variables
    if flushed > thresholds.MANY_FLUSHED:
        evidence.append(
            f"replayed, {flushed:.1%} of the elements of a gradient are zero in float16 but not in"
            " float32"
        )
    if not evidence:
        return None
    if metrics.underflow_origins:
        path, count = max(metrics.underflow_origins.items(), key=lambda item: item[1])
        evidence.append(
            f"the underflow origin is {path} in {count} of {len(metrics.finite_samples)} samples"
        )
    severity, effect = ERROR, "is too small: gradients are lost to underflow"
    is_much_lost = (
        flushed > thresholds.MANY_FLUSHED or metrics.subnormal_share > thresholds.MOSTLY_SUBNORMAL
    )
    if metrics.agrees_late and not is_much_lost:
        severity, effect = INFO, "is low: a larger one would keep more bits of small gradients"
        error = metrics.largest_gradient_error
        evidence.append(
            f"compared with float32, the gradients of a layer differ by at most {error:.1%}"
        )
    return Finding(
        "scale_too_small",
        severity,
        f"The loss scale of {as_power(metrics.scale)} {effect}.",
        "; ".join(evidence),
        _larger_scale(metrics),
        location="loss_scale" if metrics.is_fixed else "initial_scale",
    )


def _larger_scale(metrics: RunMetrics) -> list[SetArguments]:
    """Returns the largest scale that the samples or a replay allow, or a dynamic one."""
    curve, highest = metrics.curve, usable_scale(metrics.run)
    best = thresholds.LOG2_DEFAULT_SCALE
    if curve and curve.recommended:
        best = curve.recommended[1]
    elif 0.0 < highest < math.inf:  # all samples are zero, so only a replay shows the gradients
        best = math.floor(math.log2(highest))
    elif metrics.is_fixed:
        return [SetArguments(metrics.settings_call, {"loss_scale": "'dynamic'"})]
    if 2.0**best <= metrics.scale:
        return []  # it is in use already
    return [larger_scale(metrics, best)]


def wide_range(metrics: RunMetrics) -> Finding | None:
    """Reports a variable whose large gradients keep the loss scale too low for those of the others."""
    if (
        not metrics.is_float16
        or not metrics.finite_samples
        or metrics.headroom >= thresholds.SPARE_BITS
    ):
        return None
    if metrics.subnormal_share <= thresholds.MOSTLY_SUBNORMAL or metrics.needs_float32_layers:
        return None
    newest = metrics.finite_samples[-1]
    largest, smallest = (
        newest.names[int(values.argmax())] for values in (newest.amax, newest.small_shares)
    )
    compared = {each.layer for _, replay in metrics.comparisons for each in replay.gradient_errors}
    if (
        metrics.agrees_late and layer_of(smallest) in compared
    ):  # gradients that nearly vanish are not
        return None
    return Finding(
        "range",
        WARNING,
        f"The gradients of {largest} keep the loss scale too low for the others.",
        f"{_subnormal(metrics)}, {as_power(metrics.scale)}, with {max(metrics.headroom, 0.0):.0f}"
        f" bits of headroom before overflow; {largest} has the largest gradients, and {smallest}"
        " underflows most",
        note=(
            f"{_NO_HEADROOM} a smaller loss weight for that part, or float32 for"
            f" {metrics.layer_of(largest)}"
        ),
        location=largest,
    )


def _subnormal(metrics: RunMetrics) -> str:
    share = f"{metrics.subnormal_share:.1%} of the nonzero sampled gradient elements"
    return f"{share} are subnormal in float16 at the loss scale in use"


def dead(metrics: RunMetrics) -> Finding | None:
    """Reports variables whose gradient is zero in float32 too."""
    replay = metrics.clean_replay
    if replay is None:
        return None
    zero = [name for name in replay.zero if name in metrics.all_zero_variables]
    if not zero:
        return None
    count = len(zero)
    variables = (
        "1 variable has a gradient that is"
        if count == 1
        else f"{count} variables have gradients that are"
    )
    return Finding(
        "dead",
        INFO,
        f"The gradient of {_listed(zero)} is zero, in float32 too.",
        f"{variables} all zero in {len(metrics.usable_samples)} samples, and for {replay.examples}"
        " examples in float32",
        note=(
            "not underflow: units that are never active, or weights whose effect on the loss"
            " cancels out"
        ),
        location=zero[0],
    )


def unused(metrics: RunMetrics) -> Finding | None:
    """Reports variables without a gradient."""
    if not metrics.finite_samples:
        return None
    used = {name for sample in metrics.finite_samples for name in sample.named(sample.totals > 0)}
    names = [name for name in metrics.finite_samples[-1].names if name not in used]
    if not names:
        return None
    return Finding(
        "unused",
        INFO,
        f"The loss does not depend on {_listed(names)}.",
        f"no sample has a gradient of {'this variable' if len(names) == 1 else 'these variables'}",
        note="not underflow: layers that are not used, or an output without a loss",
        location=names[0],
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
