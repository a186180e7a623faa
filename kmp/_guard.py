"""Keeps a batch whose loss is not finite out of an epoch's metrics."""

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from kmp import _replicas
from kmp.optimizer import LossScaleOptimizer


def install(model: keras.Model) -> bool:
    """Makes training leave such batches out of the model's metrics; once, however often it is called.

    In stock Keras one such batch makes `loss` nan for the rest of the epoch. Here the step's own `logs` still show it,
    so that `TerminateOnNaN` sees it, and the metrics go on as they were before it. The guard lives on the model, not on
    its class, around whatever `train_step` the model has, and does nothing while its optimizer is not kmp's.

    Returns:
        Whether it was new, so that a train function made before has to be made again.
    """
    if _is_guarded(model):
        return False
    guard = _Guard(model)
    model.train_step, model.make_train_function = guard.train_step, guard.make_train_function
    return True


def mend_epoch(model: keras.Model, logs: dict[str, Any]) -> None:
    """Puts the metrics' own loss into an epoch's `logs` that show the last step's.

    Keras takes the last step's logs where a `train_step` returns keys that are not metrics.
    """
    if not _is_guarded(model) or math.isfinite(logs.get("loss", math.nan)):
        return
    for metric in model.metrics:
        if metric.name == "loss" and any(np.any(variable.numpy()) for variable in metric.variables):
            logs["loss"] = float(metric.result())


def _is_guarded(model: keras.Model) -> bool:
    return isinstance(getattr(model.train_step, "__self__", None), _Guard)


class _Guard:
    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._own_step = vars(model).get("train_step")
        # 1.0 or 0.0: float32 has kernels on every device, and adds up over replicas.
        self._nonfinite_in_execution = _replicas.variable("nonfinite_in_execution", "float32")
        self._nothing_counted = _replicas.variable("nothing_counted", "float32")

    def make_train_function(self, force: bool = False) -> None:
        """Makes the train function, and has it forget at each call what the last one saw."""
        before = self._model.train_function
        type(self._model).make_train_function(self._model, force)
        made = self._model.train_function
        if made is not before and self._model.steps_per_execution > 1:
            self._model.train_function = self._forgetting(made)

    def train_step(self, data: Any) -> Any:
        """The model's own training step; its metrics are put back if the loss was not finite."""
        optimizer = self._model.optimizer
        if not isinstance(optimizer, LossScaleOptimizer):
            return self._step(data)
        calls = optimizer.loss_watch.nonfinite_calls
        self._forget_batch_that_did_not_count()
        calls_before, metrics_before = ops.copy(calls), {id(v): ops.copy(v) for v in self._variables()}
        logs = self._step(data)
        nonfinite = calls.value > calls_before
        self._restore(nonfinite, metrics_before)
        return self._show(logs, nonfinite)

    def _forget_batch_that_did_not_count(self) -> None:
        was_nothing = ops.copy(self._nothing_counted) > 0
        for variable in self._variables():
            variable.assign(ops.where(was_nothing, ops.zeros_like(variable), variable))

    def _restore(self, nonfinite: Any, before: dict[int, Any]) -> None:
        """Puts the metrics back, unless nothing was counted yet: a mean over nothing is nan, not 0."""
        counted = [ops.any(ops.not_equal(value, 0)) for value in before.values()]
        nothing_before = ops.logical_not(ops.any(ops.stack(counted))) if counted else ops.convert_to_tensor(False)
        put_back = ops.logical_and(nonfinite, ops.logical_not(nothing_before))
        for variable in self._variables():
            old = before.get(id(variable), ops.zeros_like(variable))
            variable.assign(ops.where(put_back, old, variable))
        self._nothing_counted.assign(ops.cast(ops.logical_and(nonfinite, nothing_before), "float32"))

    def _show(self, logs: Any, nonfinite: Any) -> Any:
        """Returns `logs` with a loss of nan if a step of this execution had one, not only its last."""
        if self._model.steps_per_execution == 1 or not isinstance(logs, dict) or "loss" not in logs:
            return logs
        self._nonfinite_in_execution.assign(ops.maximum(self._nonfinite_in_execution, ops.cast(nonfinite, "float32")))
        return logs | {"loss": ops.where(self._nonfinite_in_execution > 0, math.nan, logs["loss"])}

    def _forgetting(self, train_function: Callable[..., Any]) -> Callable[..., Any]:
        def run(iterator: Any) -> Any:
            self._nonfinite_in_execution.assign(0.0)
            return train_function(iterator)

        return run

    def _step(self, data: Any) -> Any:
        return self._own_step(data) if self._own_step else type(self._model).train_step(self._model, data)

    def _variables(self) -> list[keras.Variable]:
        return [variable for metric in self._model.metrics for variable in metric.variables]
