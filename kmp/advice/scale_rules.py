"""Rules about the settings of the loss scale."""

import math

from kmp.advice.edits import SetArguments
from kmp.advice.finding import ERROR, INFO, WARNING, Finding
from kmp.advice.nonfinite_rules import backward
from kmp.advice.run_metrics import STUCK_AFTER, RunMetrics
from kmp.advice.wording import of_steps, power
from kmp.utils import as_power

_SKIPPED_BY_FIXED = 0.01
_SKIPPED_BY_GROWTH = 0.02
_SMALL_GROWTH_INTERVAL = 200
_SKIPPED_AT_START = 6
_MANY_SKIPPED = 0.1


def scale_too_large(metrics: RunMetrics) -> Finding | None:
    """Reports a fixed loss scale that overflows."""
    if not metrics.is_fixed or metrics.gradient_overflows <= _SKIPPED_BY_FIXED * metrics.steps or backward(metrics):
        return None
    path, share = metrics.main_overflow_origin
    origin = f"; {path} was the overflow origin in {share:.0%} of them" if path else ""
    recommended = metrics.curve.recommended if metrics.curve else None
    alternative = ""
    if recommended and 2.0 ** recommended[1] < metrics.scale:
        alternative = f"or loss_scale={power(recommended[1])}"
    return Finding(
        "scale_too_large",
        ERROR,
        f"The fixed loss scale of {as_power(metrics.scale)} is too large.",
        f"{of_steps(metrics, metrics.gradient_overflows)} overflowed in the backward pass with a finite loss{origin}",
        (SetArguments("kmp.enable", {"loss_scale": "'dynamic'"}),),
        alternative,
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
        (SetArguments("kmp.enable", {"growth_interval": "2000"}),),
    )


def initial_scale(metrics: RunMetrics) -> Finding | None:
    """Reports an initial scale that skipped the first steps."""
    count, first_clean, stable = metrics.startup_overflows
    initial, factor = metrics.setting("initial_scale", None), metrics.setting("backoff_factor", 0.5)
    if metrics.is_fixed or initial is None or count <= _SKIPPED_AT_START:
        return None
    has_only_decreased = stable <= initial * factor**count * metrics.setting("growth_factor", 2.0)
    if not has_only_decreased or backward(metrics):
        return None
    return Finding(
        "initial_scale",
        WARNING if count > max(10, _MANY_SKIPPED * metrics.steps) else INFO,
        f"The initial loss scale of {as_power(initial)} is too large.",
        f"{count} of the first {first_clean} steps were skipped before the scale had dropped to {as_power(stable)}",
        (SetArguments("kmp.enable", {"initial_scale": power(math.floor(math.log2(stable)))}),),
    )
