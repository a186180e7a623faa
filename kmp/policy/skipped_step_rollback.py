"""Sees to it that a skipped step leaves no trace: not in the model's layers, not in an epoch's metrics."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from kmp.backend import SavedState, distribution, saved_layer_state
from kmp.optimizer import LossScaleOptimizer
from kmp.policy.model_optimizers import optimizers_of


class ForwardWatcher(Protocol):
    """What watches the forward passes of a training step, such as the probe of `kmp.callbacks.ForwardProbe`."""

    def watching(self, data: Any) -> contextlib.AbstractContextManager[None]:
        """Returns the context in which the step runs; `data` is its batch."""


@contextlib.contextmanager
def guard(optimizer: LossScaleOptimizer, *layers: keras.Layer) -> Iterator[None]:
    """Leaves layers as they were before the forward pass if the optimizer skips the step.

    For the step of a custom loop, around both the forward pass and `apply`; `fit` does it by itself. An optimizer
    alone cannot: a step that overflows has updated BatchNormalization's moving statistics before its gradients exist.

    Restored are the float weights that are made not to be trained, the states of stateful RNNs, and the kernels that
    `keras.layers.SpectralNormalization` normalizes in place; of every replica, its own. Not restored: random seeds,
    integers, and trained weights that a layer of your own assigns in its forward pass.

    Args:
        optimizer: The `kmp.LossScaleOptimizer` whose `apply` is called inside.
        *layers: The models or layers that the forward pass runs through.

    Raises:
        TypeError: If `optimizer` is not kmp's, or one of `layers` is no layer.
        ValueError: If there are no layers, or outside a replica context.

    Example:
    >>> layer, optimizer = keras.layers.BatchNormalization(), LossScaleOptimizer("sgd")
    >>> with guard(optimizer, layer):
    ...     _ = layer(ops.array([[3.0], [5.0]]), training=True)
    ...     _ = optimizer.scale_loss(1.0)
    ...     optimizer.apply([ops.array([float("inf")]), None], layer.trainable_variables)
    >>> float(layer.moving_mean[0])
    0.0
    """
    if not isinstance(optimizer, LossScaleOptimizer):
        raise TypeError(f"`optimizer` must be a kmp.LossScaleOptimizer. Received: optimizer={optimizer!r}")
    strangers = [layer for layer in layers if not isinstance(layer, keras.Layer)]
    if strangers:
        raise TypeError(f"`layers` must be models or layers. Received: {strangers[0]!r}")
    if not layers:
        raise ValueError("`layers` must hold the models or layers that the forward pass runs through. Received: none")
    if tf.distribute.in_cross_replica_context():
        raise ValueError("`guard` must be used in a replica context, as in `strategy.run(step)`.")
    with _restored_if_skipped(layers, [optimizer]):
        yield


@contextlib.contextmanager
def _restored_if_skipped(layers: Sequence[keras.Layer], optimizers: Sequence[LossScaleOptimizer]) -> Iterator[None]:
    counters = [optimizer.counters for optimizer in optimizers]
    before = [(ops.copy(counter.steps), ops.copy(counter.overflows)) for counter in counters]
    with saved_layer_state(layers) as (states, kernels):
        yield
    taken = [counter.steps - steps for counter, (steps, _) in zip(counters, before, strict=True)]
    skipped = [counter.overflows - overflows for counter, (_, overflows) in zip(counters, before, strict=True)]
    any_skipped, any_applied = ops.sum(ops.stack(skipped)) > 0, ops.sum(ops.stack(taken) - ops.stack(skipped)) > 0
    states.restore(any_skipped)
    kernels.restore(ops.logical_and(any_skipped, ops.logical_not(any_applied)))


def install(model: keras.Model) -> bool:
    """Guards the training of a model; once, however often it is called.

    A skipped step leaves its layers as they were. And a batch whose loss is not finite stays out of its metrics: in
    stock Keras one such batch makes `loss` nan for the rest of the epoch. Here the step's own `logs` still show it, so
    that `TerminateOnNaN` sees it, and the metrics go on as they were before it. The guard lives on the model, not on
    its class, around whatever `train_step` the model has, and does nothing while it has no optimizer of kmp's.

    Returns:
        Whether it was new, so that a train function made before has to be made again.
    """
    if _is_guarded(model):
        return False
    guarded = _GuardedTraining(model)
    model.train_step, model.make_train_function = guarded.train_step, guarded.make_train_function
    return True


def probes_of(model: keras.Model) -> list[ForwardWatcher]:
    """Returns the list of what watches a guarded model's forward passes, each a `Probe`, from the next trace on."""
    return model.train_step.__self__.probes


def fix_epoch_loss(model: keras.Model, logs: dict[str, Any]) -> None:
    """Puts the metrics' own loss into an epoch's `logs` that show the last step's.

    Keras takes the last step's logs where a `train_step` returns keys that are not metrics.
    """
    if not _is_guarded(model) or math.isfinite(logs.get("loss", math.nan)):
        return
    if distribution.has_several_workers(model.distribute_strategy):
        return  # reading a metric takes all of them, and this callback may be on one alone
    for metric in model.metrics:
        if metric.name == "loss" and any(np.any(variable.numpy()) for variable in metric.variables):
            logs["loss"] = float(metric.result())


def _ignore_empty_batch(data: Any, optimizers: Sequence[LossScaleOptimizer]) -> None:
    """Tells the optimizers of a replica that got no row of a last, smaller batch: its means over nothing are nan."""
    tensors = [tensor for tensor in keras.tree.flatten(data) if isinstance(tensor, tf.Tensor) and tensor.shape.rank]
    if tensors and tf.distribute.get_strategy().num_replicas_in_sync > 1:
        for optimizer in optimizers:
            optimizer.loss_monitor.ignore_where(tf.shape(tensors[0])[0] == 0)


def _is_guarded(model: keras.Model) -> bool:
    return isinstance(getattr(model.train_step, "__self__", None), _GuardedTraining)


class _GuardedTraining:
    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._own_step = vars(model).get("train_step")
        self.probes: list[ForwardWatcher] = []
        with model.distribute_strategy.scope():
            # 1.0 or 0.0: float32 has kernels on every device, and adds up over replicas.
            self._nonfinite_in_execution = distribution.variable("nonfinite_in_execution", "float32")
            self._nothing_counted = distribution.variable("nothing_counted", "float32")

    def make_train_function(self, force: bool = False) -> None:
        """Makes the train function, and has it forget at each call what the last one saw."""
        before = self._model.train_function
        type(self._model).make_train_function(self._model, force)
        made = self._model.train_function
        if made is not before and self._model.steps_per_execution > 1:
            self._model.train_function = self._forgetting(made)

    def train_step(self, data: Any) -> Any:
        """The model's own training step; without a trace if it is skipped."""
        optimizers = optimizers_of(self._model)
        if not optimizers:
            return self._step(data)
        batch = [part for part in tf.nest.flatten(data, expand_composites=True) if isinstance(part, tf.Tensor)]
        with tf.control_dependencies(batch):  # a step that gets none forgets nothing: see `Step._finish`
            self._forget_batch_that_did_not_count()
        _ignore_empty_batch(data, optimizers)
        metrics = SavedState(self._metrics_variables)
        # Each replica knows at once what it saw; what another one saw, the counters tell once the step is applied.
        counts = [count for o in optimizers for count in (o.loss_monitor.nonfinite_calls, o.counters.nonfinite_losses)]
        before = [ops.copy(count) for count in counts]
        with _restored_if_skipped([self._model], optimizers):
            logs = self._step(data)
        nonfinite = ops.any(ops.stack([now.value > then for now, then in zip(counts, before, strict=True)]))
        self._restore(nonfinite, metrics)
        return self._show(logs, nonfinite)

    def _forget_batch_that_did_not_count(self) -> None:
        was_nothing = ops.copy(self._nothing_counted) > 0
        for variable in self._metrics_variables():
            variable.assign(ops.where(was_nothing, ops.zeros_like(variable), variable))

    def _restore(self, nonfinite: Any, metrics: SavedState) -> None:
        """Puts the metrics back, unless nothing was counted yet: a mean over nothing is nan, not 0."""
        counted = [ops.any(ops.not_equal(value, 0)) for value in metrics.values]
        nothing_before = ops.logical_not(ops.any(ops.stack(counted))) if counted else ops.convert_to_tensor(False)
        metrics.restore(ops.logical_and(nonfinite, ops.logical_not(nothing_before)))
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
        with contextlib.ExitStack() as stack:
            for probe in self.probes:
                stack.enter_context(probe.watching(data))
            return self._take_step(data)

    def _take_step(self, data: Any) -> Any:
        return self._own_step(data) if self._own_step else type(self._model).train_step(self._model, data)

    def _metrics_variables(self) -> list[keras.Variable]:
        return [variable for metric in self._model.metrics for variable in metric.variables]
