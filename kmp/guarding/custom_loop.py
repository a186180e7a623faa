"""`guard`, for the step of a custom training loop."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from kmp.backend.step_graph import StepGraph, inputs_of, recorded_graph, recording
from kmp.guarding.guarded_state import GuardedState
from kmp.guarding.guarded_step import GuardedTrainStep, guarded_step_of
from kmp.layers.layer_calls import outermost_calls
from kmp.optimizer import LossScaleOptimizer
from kmp.utils import validation

if TYPE_CHECKING:
    pass


@contextlib.contextmanager
def guard(optimizer: LossScaleOptimizer, *layers: keras.Layer) -> Iterator[None]:
    """Restores the state of layers from before the forward pass if the optimizer skips the step.

    Use it in a custom training loop, around both the forward pass and `apply`; `fit` does this
    automatically. The optimizer alone cannot: BatchNormalization updates its moving statistics in
    the forward pass, before an overflow of the gradients can be detected.

    Restores, on each replica, the float weights created with `trainable=False`, the states of
    stateful RNNs, each float `tf.Variable` in an attribute of a layer, and trainable weights to
    which code other than the optimizer assigns a value, as `keras.layers.SpectralNormalization` and
    sharpness-aware minimization do. Does not restore random seeds and integer variables.

    Args:
        optimizer: The `kmp.LossScaleOptimizer` whose `apply` is called in the context.
        *layers: The models or layers that the forward pass runs through.

    Raises:
        TypeError: If `optimizer` is not a `kmp.LossScaleOptimizer`, or one of `layers` is not a
            layer.
        ValueError: If `layers` is empty, or the call is not in a replica context.

    Example:
    >>> import keras, kmp
    >>> layer, optimizer = keras.layers.BatchNormalization(), kmp.wrap("sgd")
    >>> with kmp.guard(optimizer, layer):
    ...     _ = layer(keras.ops.array([[3.0], [5.0]]), training=True)
    ...     _ = optimizer.scale_loss(1.0)
    ...     gradients = [keras.ops.array([float("inf")]), None]
    ...     optimizer.apply(gradients, layer.trainable_variables)
    >>> float(layer.moving_mean[0])
    0.0
    """
    _check_arguments(optimizer, layers)
    state = GuardedState(layers, [optimizer])
    # The models for which callbacks keep batches and graphs.
    models = [layer for layer in layers if isinstance(layer, keras.Model)]
    watched = [step for step in map(guarded_step_of, models) if step]
    with (
        state.changes_recorded(),
        _recorded(watched, optimizer) as step,
        outermost_calls() as called,
        contextlib.ExitStack() as stack,
    ):
        if step:
            found = [each.capture_of(optimizer) for each in watched]
            for capture in filter(None, found):
                stack.enter_context(capture.watch(step.data, is_loop=True))
        yield
    for each in watched:
        each.note_layers(called)
    state.restore_if_skipped()


def _check_arguments(optimizer: Any, layers: Sequence[Any]) -> None:
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


@contextlib.contextmanager
def _recorded(
    watched: Sequence[GuardedTrainStep], optimizer: LossScaleOptimizer
) -> Iterator[StepGraph | None]:
    """Records the graph of the step that is traced in the context, for callbacks.

    The batch is what the function gets, or takes from an iterator.
    """
    if not watched or tf.executing_eagerly():
        yield None
        return
    outer = recorded_graph()  # of `fit`, or of a guard around this one
    data = inputs_of(tf.compat.v1.get_default_graph())
    with contextlib.nullcontext(outer) if outer else recording(data) as step:
        yield step
    for each in watched:
        if step:
            each.keep_graph(step, loop_of=optimizer)
