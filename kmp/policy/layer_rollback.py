"""Restores the state of layers after a skipped step."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import ops

from kmp.backend import call_if, saved_layer_state
from kmp.optimizer import CounterValues, LossScaleOptimizer


@contextlib.contextmanager
def guard(optimizer: LossScaleOptimizer, *layers: keras.Layer) -> Iterator[None]:
    """Restores the state of layers from before the forward pass if the optimizer skips the step.

    Use it in a custom training loop, around both the forward pass and `apply`; `fit` does this automatically. The
    optimizer alone cannot: BatchNormalization updates its moving statistics in the forward pass, before an overflow of
    the gradients can be detected.

    Restores, on each replica, the float weights created with `trainable=False`, the states of stateful RNNs, and the
    kernels that `keras.layers.SpectralNormalization` normalizes in place. Does not restore random seeds, integer
    variables, or trainable weights that a custom layer assigns in its forward pass.

    Args:
        optimizer: The `kmp.LossScaleOptimizer` whose `apply` is called in the context.
        *layers: The models or layers that the forward pass runs through.

    Raises:
        TypeError: If `optimizer` is not a `kmp.LossScaleOptimizer`, or one of `layers` is not a layer.
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
    if not isinstance(optimizer, LossScaleOptimizer):
        raise TypeError(f"`optimizer` must be a kmp.LossScaleOptimizer. Received: optimizer={optimizer!r}")
    non_layers = [layer for layer in layers if not isinstance(layer, keras.Layer)]
    if non_layers:
        raise TypeError(f"`layers` must be models or layers. Received: {non_layers[0]!r}")
    if not layers:
        raise ValueError("`layers` must hold the models or layers that the forward pass runs through. Received: none")
    if tf.distribute.in_cross_replica_context():
        raise ValueError("`guard` must be used in a replica context, as in `strategy.run(step)`.")
    with layers_restored_if_skipped(layers, Outcome([optimizer])):
        yield


@contextlib.contextmanager
def layers_restored_if_skipped(layers: Sequence[keras.Layer], outcome: "Outcome") -> Iterator[None]:
    """Restores the state that layers had before the context if a step in it is skipped, and ends `outcome`."""
    with saved_layer_state(layers) as (states, kernels):
        yield
    outcome.end()

    def restore() -> None:
        states.restore(outcome.any_skipped)
        kernels.restore(ops.logical_and(outcome.any_skipped, ops.logical_not(outcome.any_applied)))

    call_if(outcome.any_skipped, restore)


class _Counts(NamedTuple):
    """What an optimizer has counted.

    Attributes:
        counters: The counters of all replicas, which change with the update.
        nonfinite_losses: Scalar float32, the non-finite losses that this replica has scaled.
    """

    counters: CounterValues
    nonfinite_losses: Any


class Outcome:
    """What optimizers do in a training step, from the creation of this object until `end`.

    Args:
        optimizers: The optimizers.
        updates_once: Whether it is known that the step scales exactly one loss and calls kmp's `apply` exactly once.
            Then fewer operations are enough.

    Attributes:
        any_skipped: Scalar bool, whether an optimizer skipped an update. Set by `end`.
        may_have_nonfinite_loss: Scalar bool, true if `has_nonfinite_loss` is. Set by `end`.
    """

    def __init__(self, optimizers: Sequence[LossScaleOptimizer], updates_once: bool = False) -> None:
        self._optimizers, self._updates_once = optimizers, updates_once
        self._before = self._read()

    def end(self) -> None:
        """Reads what the optimizers have done."""
        self._after = self._read()
        if self._updates_once:
            self.any_skipped = _any([counts.counters.overflows_in_a_row > 0 for counts in self._after])
            self.may_have_nonfinite_loss = self.any_skipped
        else:
            self.any_skipped = self._any_increased(lambda counts: counts.counters.overflows)
            self.may_have_nonfinite_loss = ops.logical_or(self.any_skipped, self._any_recorded)

    @property
    def any_applied(self) -> Any:
        """Scalar bool, whether an optimizer updated its variables."""
        return self._any_increased(lambda counts: counts.counters.steps - counts.counters.overflows)

    @property
    def has_nonfinite_loss(self) -> Any:
        """Scalar bool, whether a loss of this replica, or of a skipped step, was non-finite before scaling."""
        counted = self._any_increased(lambda counts: counts.counters.nonfinite_losses)
        return counted if self._updates_once else ops.logical_or(counted, self._any_recorded)

    @property
    def _any_recorded(self) -> Any:
        return self._any_increased(lambda counts: counts.nonfinite_losses)

    def _any_increased(self, count: Callable[[_Counts], Any]) -> Any:
        return _any([count(now) > count(then) for now, then in zip(self._after, self._before, strict=True)])

    def _read(self) -> list[_Counts]:
        return [_Counts(o.counters.values(), o.loss_monitor.nonfinite_losses()) for o in self._optimizers]


def _any(conditions: Sequence[Any]) -> Any:
    return functools.reduce(ops.logical_or, conditions)
