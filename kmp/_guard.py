"""Keeps a batch whose loss is not finite out of an epoch's metrics."""

import math
from types import MethodType
from typing import Any

import keras
from keras import ops

from kmp.optimizer import LossScaleOptimizer


def install(model: keras.Model) -> bool:
    """Makes `model.train_step` leave such batches out of the model's metrics; once, however often it is called.

    In stock Keras one such batch makes `loss` nan for the rest of the epoch. Here the step's own `logs` still show it,
    so that `TerminateOnNaN` sees it, and the metrics go on as they were before it. The wrapper lives on the model, not
    on its class, and does nothing while the model's optimizer is not kmp's.

    Returns:
        Whether it was new, so that a train function made before needs to be made again.
    """
    if getattr(vars(model).get("train_step"), "__func__", None) is _train_step:
        return False
    model.train_step = MethodType(_train_step, model)
    return True


def _train_step(model: keras.Model, data: Any) -> Any:
    optimizer = model.optimizer
    if not isinstance(optimizer, LossScaleOptimizer):
        return type(model).train_step(model, data)
    counters = optimizer.counters
    steps_before = ops.copy(counters.steps)
    before = {id(v): ops.copy(v) for v in _metric_variables(model)}
    logs = type(model).train_step(model, data)
    spoilt = counters.last_nonfinite_loss > steps_before
    for variable in _metric_variables(model):
        old = before.get(id(variable), ops.zeros_like(variable))
        variable.assign(ops.where(spoilt, old, variable))
    return _show(logs, counters, model.steps_per_execution)


def _show(logs: Any, counters: Any, steps_per_execution: int) -> Any:
    """Returns `logs` with a loss of nan if a step of this execution had one, not only its last."""
    if not isinstance(logs, dict) or "loss" not in logs:
        return logs
    age = counters.steps - counters.last_nonfinite_loss
    recent = ops.logical_and(counters.last_nonfinite_loss > 0, age < steps_per_execution)
    return logs | {"loss": ops.where(recent, math.nan, logs["loss"])}


def _metric_variables(model: keras.Model) -> list[keras.Variable]:
    return [variable for metric in model.metrics for variable in metric.variables]
