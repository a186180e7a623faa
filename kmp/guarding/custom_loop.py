"""`guard`, for the step of a custom training loop."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from kmp.guarding.guarded_state import GuardedState
from kmp.guarding.guarded_step import guarded_step_of
from kmp.optimizer import LossScaleOptimizer
from kmp.replay import BatchCapture
from kmp.utils import validation


@contextlib.contextmanager
def guard(optimizer: LossScaleOptimizer, *layers: keras.Layer) -> Iterator[None]:
    """Restores the state of layers from before the forward pass if the optimizer skips the step.

    Use it in a custom training loop, around both the forward pass and `apply`; `fit` does this
    automatically. The optimizer alone cannot: BatchNormalization updates its moving statistics in
    the forward pass, before an overflow of the gradients can be detected.

    Restores, on each replica, the float weights created with `trainable=False`, the states of
    stateful RNNs, each float `tf.Variable` in an attribute of a layer, and trainable weights to
    which code other than the optimizer assigns a value, as `keras.layers.SpectralNormalization` and
    sharpness-aware minimization do; not those assigned in a branch or loop of the graph. Does not
    restore random seeds and integer variables.

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
    ...     _ = layer(keras.ops.array([[3.0], [5.0]]), training=True)
    ...     _ = optimizer.scale_loss(1.0)
    ...     gradients = [keras.ops.array([float("inf")]), None]
    ...     optimizer.apply(gradients, layer.trainable_variables)
    >>> float(layer.moving_mean[0])
    0.0
    """
    _check_arguments(optimizer, layers)
    state = GuardedState(layers, [optimizer])
    with state.changes_recorded(), contextlib.ExitStack() as stack:
        for capture in _captures_of(layers, optimizer):
            stack.enter_context(capture.watch_calls())
        yield
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


def _captures_of(
    layers: Sequence[keras.Layer], optimizer: LossScaleOptimizer
) -> Iterator[BatchCapture]:
    """Yields the captures of batches of models that this optimizer trains under callbacks."""
    for layer in layers:
        step = guarded_step_of(layer) if isinstance(layer, keras.Model) else None
        capture = step.capture_of(optimizer) if step else None
        if capture:
            yield capture
