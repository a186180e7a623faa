"""Guards the training of a model: skipped steps leave its layers unchanged, and non-finite losses its metrics."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from kmp.backend import SavedState, call_if, distribution, sublayers
from kmp.optimizer import LossScaleOptimizer
from kmp.policy.layer_rollback import Outcome, layers_restored_if_skipped
from kmp.policy.model_optimizers import optimizers_of

_METHODS_OF_STEP = ("scale_loss", "apply_gradients", "apply")  # that Keras' own training step calls


class ForwardWatcher(Protocol):
    """Watches the forward passes of a training step, as the probe of `kmp.callbacks.ForwardProbe` does."""

    def prepare(self, batch_spec: Any, is_xla: bool) -> None:
        """Creates the variables for batches of this structure, before the training step is traced for the first time.

        TensorFlow traces a step twice if the first trace creates variables.
        """

    def watch(self, data: Any) -> contextlib.AbstractContextManager[None]:
        """Returns the context in which the training step on the batch `data` runs."""


def install(model: keras.Model) -> bool:
    """Guards the training of a model; does nothing if it is already guarded.

    A skipped step leaves the state of the model's layers unchanged. A batch whose loss is not finite is excluded from
    the model's metrics: in stock Keras one such batch makes `loss` NaN for the rest of the epoch. The `logs` of that
    step still contain the NaN, for `TerminateOnNaN`.

    The guard is set on the instance, not on its class. It wraps the model's current `train_step`, custom or not, and
    has no effect while the model has no `kmp.LossScaleOptimizer`.

    Returns:
        Whether the guard is new. If so, an existing train function has to be rebuilt.
    """
    if _is_guarded(model):
        return False
    guarded = _GuardedTrainStep(model)
    model.train_step, model.make_train_function = guarded.train_step, guarded.make_train_function
    return True


def probes_of(model: keras.Model) -> list[ForwardWatcher]:
    """Returns the watchers of a guarded model's forward passes; changes to this list apply from the next trace."""
    return model.train_step.__self__.probes


def has_keras_step(model: keras.Model) -> bool:
    """Whether a model trains with the training step of Keras, not with one of its own."""
    if _is_guarded(model):
        return bool(model.train_step.__self__.has_keras_step)
    return "train_step" not in vars(model) and _is_of_keras(type(model))


def fix_epoch_loss(model: keras.Model, logs: dict[str, Any]) -> None:
    """Replaces a non-finite `loss` in an epoch's `logs` with the result of the model's loss metric, in place.

    If `train_step` returns keys that are not metrics, the epoch's logs in Keras are those of its last step.
    """
    if not _is_guarded(model) or math.isfinite(logs.get("loss", math.nan)):
        return
    if distribution.has_several_workers(model.distribute_strategy):
        return  # reading a metric needs all workers, but this callback may run on only one
    for metric in model.metrics:
        if metric.name == "loss" and any(np.any(variable.numpy()) for variable in metric.variables):
            logs["loss"] = float(metric.result())


def _ignore_empty_batch(data: Any, optimizers: Sequence[LossScaleOptimizer]) -> None:
    """Makes the loss monitors ignore a step on a replica without samples, whose loss is a mean over nothing: NaN.

    A replica gets no samples if the last batch of an epoch is too small.
    """
    tensors = [tensor for tensor in keras.tree.flatten(data) if isinstance(tensor, tf.Tensor) and tensor.shape.rank]
    if tensors and tf.distribute.get_strategy().num_replicas_in_sync > 1:
        for optimizer in optimizers:
            optimizer.loss_monitor.ignore_where(tf.shape(tensors[0])[0] == 0)


def _is_of_keras(model_class: type[keras.Model]) -> bool:
    return str(getattr(model_class.train_step, "__module__", "")).startswith("keras.")  # a `partial` has none


def _is_guarded(model: keras.Model) -> bool:
    return isinstance(getattr(model.train_step, "__self__", None), _GuardedTrainStep)


class _GuardedTrainStep:
    """Wraps a model's `train_step` and `make_train_function`.

    Args:
        model: The model to guard.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._instance_train_step = vars(model).get("train_step")
        self.probes: list[ForwardWatcher] = []
        with model.distribute_strategy.scope():
            # Flags, 1.0 or 0.0: float32 has kernels on every device, and can be summed over replicas.
            self._nonfinite_in_execution = distribution.variable("nonfinite_in_execution", "float32")
            self._only_nonfinite_batches = distribution.variable("nothing_counted", "float32")

    def make_train_function(self, force: bool = False) -> None:
        """Creates the train function.

        Each call of it resets the flag for non-finite losses of an execution, and the first one builds the optimizer.
        """
        previous_function = self._model.train_function
        type(self._model).make_train_function(self._model, force)
        if self._model.train_function is not previous_function:
            self._model.train_function = self._prepared(self._model.train_function)

    def _prepared(self, train_function: Callable[..., Any]) -> Callable[..., Any]:
        is_traced = False

        def run(iterator: Any) -> Any:
            nonlocal is_traced
            self._build_optimizer()
            if not is_traced and hasattr(iterator, "element_spec"):
                for probe in self.probes:
                    probe.prepare(iterator.element_spec, self._model.jit_compile)
            is_traced = True
            if self._model.steps_per_execution > 1:
                self._nonfinite_in_execution.assign(0.0)
            return train_function(iterator)

        return run

    def _build_optimizer(self) -> None:
        """Builds the optimizer before the first step, if it is known which variables that step trains.

        TensorFlow traces a step twice if the first trace creates variables. The step has to be Keras' own, and all
        layers built; otherwise the step builds the optimizer.
        """
        model, optimizer = self._model, self._model.optimizer
        if not isinstance(optimizer, LossScaleOptimizer) or optimizer.built:
            return
        if self.has_keras_step and model.trainable_weights and all(layer.built for layer in sublayers(model)):
            with model.distribute_strategy.scope():
                optimizer.build(model.trainable_weights)

    @property
    def has_keras_step(self) -> bool:
        """Whether the model trains with the training step of Keras, not with one of its own."""
        has_own = self._instance_train_step is None and self._model.train_step == self.train_step
        return has_own and _is_of_keras(type(self._model))

    def train_step(self, data: Any) -> Any:
        """Runs the model's training step; restores layers if it is skipped, and metrics if its loss is not finite."""
        optimizers = optimizers_of(self._model)
        if not optimizers:
            return self._watched_step(data)
        batch = [part for part in tf.nest.flatten(data, expand_composites=True) if isinstance(part, tf.Tensor)]
        with tf.control_dependencies(batch):  # no reset by a step that gets no batch, at the end of the data
            self._reset_metrics_without_finite_batch()
        _ignore_empty_batch(data, optimizers)
        metrics = SavedState(self._metric_variables)
        outcome = Outcome(optimizers, self._updates_once(optimizers))
        with layers_restored_if_skipped([self._model], outcome):
            logs = self._watched_step(data)
        call_if(outcome.may_have_nonfinite_loss, lambda: self._restore_metrics(outcome.has_nonfinite_loss, metrics))
        return self._report_nonfinite_loss(logs, outcome)

    def _updates_once(self, optimizers: Sequence[LossScaleOptimizer]) -> bool:
        """Whether the step is known to scale one loss and to call kmp's `apply` once."""
        is_models = len(optimizers) == 1 and optimizers[0] is self._model.optimizer
        methods = {name: getattr(optimizers[0], name) for name in _METHODS_OF_STEP}
        are_own = all(getattr(m, "__func__", None) is getattr(LossScaleOptimizer, name) for name, m in methods.items())
        return self.has_keras_step and is_models and are_own and bool(self._model.trainable_weights)

    def _reset_metrics_without_finite_batch(self) -> None:
        should_reset = ops.copy(self._only_nonfinite_batches) > 0

        def reset() -> None:
            for variable in self._metric_variables():
                variable.assign(ops.where(should_reset, ops.zeros_like(variable), variable))
            self._only_nonfinite_batches.assign(0.0)

        call_if(should_reset, reset)

    def _restore_metrics(self, nonfinite: Any, metrics: SavedState) -> None:
        """Restores the metrics if `nonfinite`, unless they are still zero: a mean over no batch is NaN, not 0."""
        nonzero = [ops.any(ops.not_equal(value, 0)) for value in metrics.values]
        was_empty = ops.logical_not(ops.any(ops.stack(nonzero))) if nonzero else ops.convert_to_tensor(False)
        metrics.restore(ops.logical_and(nonfinite, ops.logical_not(was_empty)))
        self._only_nonfinite_batches.assign(ops.cast(ops.logical_and(nonfinite, was_empty), "float32"))

    def _report_nonfinite_loss(self, logs: Any, outcome: Outcome) -> Any:
        """Returns `logs` with a NaN loss if any step of this execution had a non-finite loss, not only the last."""
        if self._model.steps_per_execution == 1 or not isinstance(logs, dict) or "loss" not in logs:
            return logs
        nonfinite = ops.cast(outcome.has_nonfinite_loss, "float32")
        self._nonfinite_in_execution.assign(ops.maximum(self._nonfinite_in_execution, nonfinite))
        return logs | {"loss": ops.where(self._nonfinite_in_execution > 0, math.nan, logs["loss"])}

    def _watched_step(self, data: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for probe in self.probes:
                stack.enter_context(probe.watch(data))
            return self._original_step(data)

    def _original_step(self, data: Any) -> Any:
        if self._instance_train_step:
            return self._instance_train_step(data)
        return type(self._model).train_step(self._model, data)

    def _metric_variables(self) -> list[keras.Variable]:
        return [variable for metric in self._model.metrics for variable in metric.variables]
