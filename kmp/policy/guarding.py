"""A skipped step leaves a model's layers unchanged, and a non-finite loss its metrics."""

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from kmp.backend import (
    Reason,
    call_if,
    distribution,
    keras_internals,
    patches,
    rnn_states,
    sublayers,
    xla,
)
from kmp.optimizer import COUNT_INDEX, LossScaleOptimizer
from kmp.policy.optimizers import optimizers_of
from kmp.utils import validation

# The guarded steps that run now: the replica and the graph of each, its weights, and what was
# assigned to these.
_Recording = tuple[
    int, tf.Graph | None, dict[int, keras.Variable], dict[int, tuple[keras.Variable, Any]]
]
_recordings: dict[int, _Recording] = {}


@contextlib.contextmanager
def guard(optimizer: LossScaleOptimizer, *layers: keras.Layer) -> Iterator[None]:
    """Restores the state of layers from before the forward pass if the optimizer skips the step.

    Use it in a custom training loop, around both the forward pass and `apply`; `fit` does this
    automatically. The optimizer alone cannot: BatchNormalization updates its moving statistics in
    the forward pass, before an overflow of the gradients can be detected.

    Restores, on each replica, the float weights created with `trainable=False`, the states of
    stateful RNNs, and trainable weights to which code other than the optimizer assigns a value, as
    `keras.layers.SpectralNormalization` and sharpness-aware minimization do; not those assigned in
    a branch or loop of the graph. Does not restore random seeds and integer variables.

    Args:
        optimizer: The `kmp.LossScaleOptimizer` whose `apply` is called in the context.
        *layers: The models or layers that the forward pass runs through.

    Raises:
        TypeError: If `optimizer` is not a `kmp.LossScaleOptimizer`, or one of `layers` is not a
            layer.
        ValueError: If `layers` is empty, or the call is not in a replica context.

    Example:
    >>> layer, optimizer = keras.layers.BatchNormalization(), LossScaleOptimizer("sgd")
    >>> with guard(optimizer, layer):
    ...     _ = layer(ops.array([[3.0], [5.0]]), training=True)
    ...     _ = optimizer.scale_loss(1.0)
    ...     optimizer.apply([ops.array([float("inf")]), None], layer.trainable_variables)
    >>> float(layer.moving_mean[0])
    0.0
    """
    expected = "a kmp.LossScaleOptimizer, as kmp.wrap returns under every policy"
    validation.instance("optimizer", optimizer, LossScaleOptimizer, expected)
    for layer in layers:
        validation.instance("layers", layer, keras.Layer, "models or layers")
    if not layers:
        raise ValueError(
            "`layers` must hold the models or layers that the forward pass runs through. Received:"
            " none"
        )
    if tf.distribute.in_cross_replica_context():
        raise ValueError("`guard` must be used in a replica context, as in `strategy.run(step)`.")
    guards = [guard_of(layer) for layer in layers if isinstance(layer, keras.Model)]
    with guarded(layers, [optimizer]), contextlib.ExitStack() as stack:
        for capture in [each.capture for each in guards if each and each.capture]:
            stack.enter_context(capture.watch_calls())
        yield


@contextlib.contextmanager
def guarded(
    layers: Sequence[keras.Layer], optimizers: Sequence[LossScaleOptimizer]
) -> Iterator[SimpleNamespace]:
    """Runs a training step in the context, and restores the layers if an optimizer skips it, on each replica.

    Yields two scalar bools that are set at the end: `any_skipped`, whether an optimizer skipped an
    update, and `has_nonfinite_loss`, whether a loss of this replica, or of a skipped step, was
    non-finite before scaling.
    """
    counts_before = [ops.copy(optimizer.counters.counts) for optimizer in optimizers]
    losses_before = [optimizer.step_monitor.losses() for optimizer in optimizers]
    states_before = {id(variable): (variable, ops.copy(variable)) for variable in _states(layers)}
    weights_before = {id(weight): weight for weight in _weights(layers)}
    outcome = SimpleNamespace()
    with (
        _initial_values_recorded() as initial_value,
        _assignments_recorded(weights_before) as assigned,
    ):
        yield outcome

    pairs = [
        (then, ops.copy(each.counters.counts))
        for then, each in zip(counts_before, optimizers, strict=True)
    ]
    increased = [now > then for then, now in pairs]
    outcome.any_skipped = _any(counts[COUNT_INDEX["skipped"]] for counts in increased)
    monitors = [optimizer.step_monitor for optimizer in optimizers]
    has_nonfinite = [
        each.nonfinite_loss_since(then) for each, then in zip(monitors, losses_before, strict=True)
    ]
    if tf.distribute.has_strategy():  # the losses of other replicas too
        has_nonfinite += [counts[COUNT_INDEX["nonfinite_loss_count"]] for counts in increased]
    outcome.has_nonfinite_loss = _any(has_nonfinite)

    created_states = [state for state in _states(layers) if id(state) not in states_before]
    created_weights = [weight for weight in _weights(layers) if id(weight) not in weights_before]
    states = [*states_before.values(), *map(initial_value, created_states)]
    weights = [*assigned.values(), *map(initial_value, created_weights)]

    def restore() -> None:
        _assign_where(outcome.any_skipped, states)
        # An optimizer that was not skipped may have updated the weights.
        steps, skipped = COUNT_INDEX["step"], COUNT_INDEX["skipped"]
        all_skipped = [(now - then)[steps] == (now - then)[skipped] for then, now in pairs]
        no_update = ops.logical_and(
            outcome.any_skipped, functools.reduce(ops.logical_and, all_skipped)
        )
        _assign_where(no_update, weights)

    if not states and not weights:
        return
    call_if(outcome.any_skipped, restore, compiles=_compiles_steps(optimizers))


@contextlib.contextmanager
def _initial_values_recorded() -> Iterator[Callable[[keras.Variable], tuple[keras.Variable, Any]]]:
    """Yields a function that returns a variable that was created in the context, with its initial value."""
    initial_values: dict[int, tf.Tensor] = {}

    def record(create: Callable[..., tf.Variable], **arguments: Any) -> tf.Variable:
        variable = create(**arguments)
        # In a graph, the variable has no value until the graph runs.
        value = variable if tf.executing_eagerly() else arguments["initial_value"]
        initial_values[id(variable)] = tf.identity(
            tf.cast(value() if callable(value) else value, variable.dtype)
        )
        return variable

    def initial_value(variable: keras.Variable) -> tuple[keras.Variable, Any]:
        if id(variable.value) in initial_values:
            return variable, initial_values[id(variable.value)]
        with (
            tf.init_scope()
        ):  # created outside the graph, which has not run yet: the current value is the initial one
            return variable, ops.copy(variable)

    with tf.variable_creator_scope(record):
        yield initial_value


@contextlib.contextmanager
def _assignments_recorded(
    weights: dict[int, keras.Variable],
) -> Iterator[dict[int, tuple[keras.Variable, Any]]]:
    """Yields a dict that gets each of these weights to which code in the context assigns, with its value before.

    An optimizer writes TensorFlow's variable inside of Keras', so only weights that other code or a
    constraint assigns cost a copy.
    """
    assigned: dict[int, tuple[keras.Variable, Any]] = {}
    with patches.holding(Reason.STEP):
        _recordings[id(assigned)] = distribution.replica_id(), _current_graph(), weights, assigned
        try:
            yield assigned
        finally:
            del _recordings[id(assigned)]


def assign_patch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patches `keras.Variable.assign` to record the values before."""

    @functools.wraps(original)
    def assign(self: keras.Variable, value: Any) -> Any:
        for replica, graph, weights, assigned in tuple(_recordings.values()):
            # The replicas of MirroredStrategy are traced in turns, and share the weight. A value
            # that is read in the graph of a branch or loop exists only there.
            is_new = id(self) in weights and id(self) not in assigned
            if is_new and graph is _current_graph() and replica == distribution.replica_id():
                assigned[id(self)] = self, keras_internals.uncast_value(self)
        return original(self, value)

    return assign


def _current_graph() -> tf.Graph | None:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _states(layers: Iterable[keras.Layer]) -> Iterable[keras.Variable]:
    # The public lists change with `trainable`, and some layers update their state even if they are
    # frozen.
    lists = [
        (*keras_internals.declared_not_trainable(s), *rnn_states(s))
        for layer in layers
        for s in sublayers(layer)
    ]
    return {
        id(v): v for states in lists for v in states if keras.backend.is_float_dtype(v.dtype)
    }.values()


def _weights(layers: Iterable[keras.Layer]) -> Iterable[keras.Variable]:
    lists = [
        keras_internals.declared_trainable(inner) for layer in layers for inner in sublayers(layer)
    ]
    return {id(v): v for weights in lists for v in weights}.values()


def _assign_where(condition: Any, values: Iterable[tuple[keras.Variable, Any]]) -> None:
    """Assigns values to variables where the scalar bool tensor `condition` is true."""
    select_by = xla.masks_of(condition)
    for variable, value in values:
        variable.assign(ops.where(select_by(variable.shape), value, variable))


def _compiles_steps(optimizers: Iterable[LossScaleOptimizer]) -> bool:
    """Whether the steps of all optimizers are compiled: what follows a step must then not wait for the host either."""
    return all(optimizer.compiles_step for optimizer in optimizers)


def _any(conditions: Iterable[Any]) -> Any:
    return functools.reduce(ops.logical_or, conditions)


def install(model: keras.Model) -> bool:
    """Wraps the `train_step` of a model in a guard; returns whether it is new. A train function is rebuilt then."""
    if guard_of(model):
        return False
    model.train_step = GuardedTrainStep(model).train_step
    return True


def guard_of(model: keras.Model) -> "GuardedTrainStep | None":
    """Returns the guard of a model's training step; `None` if there is none, or it was replaced."""
    step = getattr(model.train_step, "__self__", None)
    return step if isinstance(step, GuardedTrainStep) else None


def has_keras_step(model: keras.Model) -> bool:
    """Whether a model trains with the training step of Keras, not with one of its own."""
    step = guard_of(model)
    own_step = step.own_step if step else vars(model).get("train_step")
    module = getattr(type(model).train_step, "__module__", "")  # a `partial` has none
    return own_step is None and str(module).startswith("keras.")


def is_built(model: keras.Model) -> bool:
    """Whether a model and all its layers are built."""
    return all(layer.built for layer in sublayers(model))


class GuardedTrainStep:
    """Wraps a model's `train_step`, custom or not. Has no effect while the model has no `kmp.LossScaleOptimizer`.

    A skipped step leaves the state of the model's layers unchanged. A batch whose loss is not
    finite is excluded from the model's metrics: in stock Keras one such batch makes `loss` NaN for
    the rest of the epoch. The `logs` of that step still contain the NaN, for `TerminateOnNaN`. A
    `train_step` that does not scale its loss raises an error.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self.own_step = vars(model).get("train_step")
        self.capture: Any = (
            None  # a `kmp.replay.BatchCapture`, which a callback sets; used from the next trace on
        )
        self._prepared: Callable[[], Any] = lambda: (
            None
        )  # the iterator that the capture was prepared for, if it exists
        self.has_fallback = False  # whether a callback set layers of the model to float32
        with model.distribute_strategy.scope():
            # Flags, 1.0 or 0.0: float32 has kernels on every device, and can be summed over
            # replicas.
            self._nonfinite_in_execution = distribution.variable(
                "nonfinite_in_execution", "float32"
            )
            self._only_nonfinite_batches = distribution.variable(
                "only_nonfinite_batches", "float32"
            )

    def begin_execution(self, iterator: Any, is_first: bool) -> None:
        """Prepares the train function's call, the first of which traces it."""
        model, optimizer = self._model, self._model.optimizer
        if is_first:
            # TensorFlow traces a step twice if the first trace creates variables. What another step
            # than that of Keras trains is not known, nor what layers that are not built will
            # create.
            is_known = (
                isinstance(optimizer, LossScaleOptimizer)
                and has_keras_step(model)
                and is_built(model)
            )
            if is_known and model.trainable_weights:
                if not optimizer.built:
                    with model.distribute_strategy.scope():
                        optimizer.build(model.trainable_weights)
                if hasattr(iterator, "element_spec"):
                    keras_internals.build_metrics(model, iterator.element_spec)
        # A later `fit` may have batches of another structure, for which the function is traced
        # again.
        if self.capture and iterator is not self._prepared() and hasattr(iterator, "element_spec"):
            self._prepared = weakref.ref(iterator)
            self.capture.prepare(iterator.element_spec, model.jit_compile)
        if model.steps_per_execution > 1:
            self._nonfinite_in_execution.assign(0.0)

    def train_step(self, data: Any) -> Any:
        """Runs the model's training step; restores layers if it is skipped, and metrics if its loss is not finite."""
        model, optimizers = self._model, optimizers_of(self._model)
        if not optimizers:
            return self._run(data)
        batch = [
            part
            for part in tf.nest.flatten(data, expand_composites=True)
            if isinstance(part, tf.Tensor)
        ]
        with tf.control_dependencies(
            batch
        ):  # no reset by a step that gets no batch, at the end of the data
            self._reset_metrics_without_finite_batch(self._compiles_metrics(optimizers))
        # The loss of a batch without rows is a mean over nothing: NaN, or its gradients are. A
        # sparse tensor, and rows of width 0, may have no elements in any batch.
        dense = (
            part
            for part in tf.nest.flatten(data)
            if isinstance(part, tf.Tensor) and part.shape.rank
        )
        first = next(
            (part for part in dense if 0 not in part.shape[1:]), batch[0] if batch else None
        )
        may_be_empty = (
            first is not None and not first.shape.num_elements()
        )  # unknown, or 0 in eager mode
        is_empty = tf.equal(tf.size(first), 0) if may_be_empty else None
        for optimizer in optimizers:
            optimizer.step_monitor.begin_train_step(is_empty)
        before = {id(variable): ops.copy(variable) for variable in self._metric_variables()}
        with guarded([model], optimizers) as outcome:
            logs = self._run(data)
        nonfinite = outcome.has_nonfinite_loss

        def restore_metrics() -> None:
            # Not if they are still zero: a mean over no batch is NaN, not 0.
            nonzero = [ops.any(ops.not_equal(value, 0)) for value in before.values()]
            restores = ops.logical_and(nonfinite, _any(nonzero)) if nonzero else nonfinite
            _assign_where(
                restores,
                ((v, before.get(id(v), ops.zeros_like(v))) for v in self._metric_variables()),
            )
            is_first = ops.logical_and(nonfinite, ops.logical_not(restores))
            self._only_nonfinite_batches.assign(ops.cast(is_first, "float32"))

        call_if(nonfinite, restore_metrics, compiles=self._compiles_metrics(optimizers))
        if model.steps_per_execution == 1 or not isinstance(logs, dict) or "loss" not in logs:
            return logs
        # The logs have a NaN loss if any step of this execution had a non-finite loss, not only the
        # last.
        in_execution = ops.maximum(self._nonfinite_in_execution, ops.cast(nonfinite, "float32"))
        self._nonfinite_in_execution.assign(in_execution)
        return logs | {"loss": ops.where(in_execution > 0, math.nan, logs["loss"])}

    def _compiles_metrics(self, optimizers: Sequence[LossScaleOptimizer]) -> bool:
        on_host = any(variable.dtype == "int32" for variable in self._metric_variables())
        return _compiles_steps(optimizers) and not on_host

    def _reset_metrics_without_finite_batch(self, compiles: bool) -> None:
        should_reset = ops.copy(self._only_nonfinite_batches) > 0

        def reset() -> None:
            _assign_where(
                should_reset,
                ((variable, ops.zeros_like(variable)) for variable in self._metric_variables()),
            )
            self._only_nonfinite_batches.assign(0.0)

        call_if(should_reset, reset, compiles)

    def _run(self, data: Any) -> Any:
        with self.capture.watch(data) if self.capture else contextlib.nullcontext():
            return (
                self.own_step(data)
                if self.own_step
                else type(self._model).train_step(self._model, data)
            )

    def _metric_variables(self) -> list[keras.Variable]:
        return [variable for metric in self._model.metrics for variable in metric.variables]
