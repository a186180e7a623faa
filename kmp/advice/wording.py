"""Phrases and edits that several rules share."""

import math
from collections.abc import Iterable, Sequence

from kmp.advice import thresholds
from kmp.advice.finding import ComputeInFloat32, Edit, SetArguments
from kmp.advice.run_metrics import RunMetrics, name_of
from kmp.records import Replay
from kmp.utils import FLOAT32


def skipped(metrics: RunMetrics) -> str:
    """Returns the number of skipped steps in words, since training began."""
    count = metrics.skipped_steps
    if count is None:
        return "skipped steps were not counted"
    return f"{count} of {metrics.last_step} steps {'was' if count == 1 else 'were'} skipped"


def of_steps(metrics: RunMetrics, count: int) -> str:
    """Returns a number of steps with its share of all steps."""
    return f"{count} of {metrics.steps} steps ({count / max(1, metrics.steps):.1%})"


def skipped_with_finite_loss(metrics: RunMetrics) -> str:
    """Returns the number of steps that were skipped because of their gradients."""
    return f"{of_steps(metrics, metrics.gradient_overflows)} were skipped with a finite loss"


def failed_steps(metrics: RunMetrics) -> str:
    """Returns the number of steps with a non-finite loss, or of those that were skipped if there is none."""
    if metrics.nonfinite_losses:
        return (
            f"in {of_steps(metrics, metrics.nonfinite_losses)} the loss was NaN or Inf before"
            " scaling"
        )
    if metrics.run.last("overflow_count") == 0:
        return "no step was skipped"
    return skipped_with_finite_loss(metrics)


def power(exponent: float) -> str:
    """Returns the Python source of a power of two."""
    return f"2.0**{math.floor(exponent)}"


def in_float32(metrics: RunMetrics, layers: Iterable[str]) -> Sequence[Edit]:
    """Returns the edits after which the layers with these paths, or the model, compute in float32."""
    created = dict.fromkeys(map(metrics.created_layer, layers))
    if metrics.settings.get("model") in created.keys() - metrics.layers.keys():
        return [SetArguments("kmp.enable", {"policy": "'float32'"})]
    return [ComputeInFloat32(name_of(path), metrics.layers.get(path, "")) for path in created]


def larger_scale(metrics: RunMetrics, exponent: float) -> SetArguments:
    """Returns the change to a dynamic scale that starts with a power of two."""
    arguments = ({"loss_scale": "'dynamic'"} if metrics.is_fixed else {}) | {
        "initial_scale": power(exponent)
    }
    if not metrics.is_fixed and metrics.settings.get("max_scale", math.inf) < 2.0**exponent:
        arguments["max_scale"] = power(FLOAT32.max_exponent)
    return SetArguments(metrics.settings_call, arguments)


def replayed_change(metrics: RunMetrics, replay: Replay, result: str) -> tuple[Sequence[Edit], str]:
    """Returns the change with which a replayed batch had this result, and a note."""
    if replay.float32_layers:
        return in_float32(metrics, replay.float32_layers), f"with these layers in float32 {result}"
    # Gradients that underflow need a larger scale. A smaller one is the matter of the rules about
    # overflows.
    if replay.float32_layers == [] and (replay.usable_scale or 0.0) > replay.loss_scale:
        assert replay.usable_scale is not None
        return [
            larger_scale(metrics, math.log2(replay.usable_scale))
        ], f"at this loss scale {result}"
    return [
        SetArguments("kmp.enable", {"policy": "'float32'"})
    ], f"no few layers were found with which {result}"


def optimizer_call(metrics: RunMetrics) -> str:
    """Returns the class of the inner optimizer as source code, `keras.optimizers.Adam` if its name is none."""
    optimizer = metrics.settings.get("optimizer", "")
    if not optimizer.isidentifier():  # a log may hold anything
        return "keras.optimizers.Adam"
    return (
        f"keras.optimizers.{optimizer}"
        if metrics.settings.get("is_keras_optimizer", True)
        else optimizer
    )


def learning_rate(metrics: RunMetrics) -> float | None:
    """Returns the highest learning rate that is known, of the first epoch and the ends of all; `None` without one."""
    _, rates = metrics.run.metrics.get("learning_rate", ((), ()))
    known = [
        rate for rate in (*rates, metrics.settings.get("learning_rate", 0.0)) if math.isfinite(rate)
    ]
    return max(known, default=0.0) or None


def smaller_learning_rate(metrics: RunMetrics) -> list[SetArguments]:
    """Returns a learning rate that is smaller by the measured ratio of update to weights, and at most a tenth."""
    ratio = metrics.update_ratio[1]
    factor = (
        min(0.1, thresholds.TYPICAL_UPDATE / ratio) if ratio > 0 and math.isfinite(ratio) else 0.1
    )
    rate = learning_rate(metrics)
    value = f"{factor:.1g} * learning_rate" if rate is None else f"{rate * factor:.1g}"
    return [SetArguments(optimizer_call(metrics), {"learning_rate": value})]
