"""Phrases and changes that several rules share."""

import math
from collections.abc import Iterable

from kmp.advice.edits import ComputeInFloat32, SetArguments
from kmp.advice.run_metrics import RunMetrics
from kmp.records import LOSS_FUNCTION

_TYPICAL_UPDATE = 1e-2  # of the weights' norm, in one step


def of_steps(metrics: RunMetrics, count: int) -> str:
    """Returns a number of steps with its share of all steps."""
    return f"{count} of {metrics.steps} steps ({count / max(1, metrics.steps):.1%})"


def nonfinite_losses(metrics: RunMetrics) -> str:
    """Returns the number of steps with a non-finite loss."""
    return f"in {of_steps(metrics, metrics.nonfinite_losses)} the loss was NaN or Inf before scaling"


def power(exponent: int) -> str:
    """Returns the Python source of a power of two."""
    return f"2.0**{exponent}"


def name_of(path: str) -> str:
    """Returns the name of a layer, the last component of its path."""
    return path.rpartition("/")[2]


def described(metrics: RunMetrics, layer: str) -> str:
    """Returns what a finding calls a layer: by its name, or by its path if several have this name."""
    if layer == LOSS_FUNCTION:
        return layer
    if layer == metrics.setting("model", None):
        return f"model {layer!r} outside its layers"
    names = [name_of(path) for path in metrics.setting("layers", {})]
    return f"layer {layer if names.count(name_of(layer)) > 1 else name_of(layer)!r}"


def in_float32(metrics: RunMetrics, layers: Iterable[str]) -> tuple[ComputeInFloat32, ...]:
    """Returns the edits after which the layers with these paths compute in float32."""
    return tuple(ComputeInFloat32(name_of(path), metrics.class_of(path)) for path in layers)


def exploding_edits(metrics: RunMetrics, ratio: float) -> tuple[SetArguments, ...]:
    """Returns a smaller learning rate: by the measured ratio of update to weights, and at most a tenth."""
    optimizer = metrics.setting("optimizer", "")
    if not optimizer.isidentifier():  # the change is a line of code
        optimizer = "keras.optimizers.Adam"
    elif metrics.setting("is_keras_optimizer", True):
        optimizer = f"keras.optimizers.{optimizer}"
    factor = min(0.1, _TYPICAL_UPDATE / ratio) if ratio > 0 and math.isfinite(ratio) else 0.1
    rate = metrics.learning_rate
    value = f"{factor:.1g} * learning_rate" if rate is None else f"{rate * factor:.1g}"
    return (SetArguments(optimizer, {"learning_rate": value}),)
