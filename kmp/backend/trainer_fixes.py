"""Fixes for bugs in Keras' trainer, until a test fails because Keras has fixed them.

Under `MultiWorkerMirroredStrategy`, `fit` of Keras 3.15.1 fails for any model, for two reasons. To
build the model, it reduces a batch, which is a tuple of tensors, over the workers as if it were one
tensor. It also averages logs along axis 0, which scalars do not have and vectors must keep. In all
other cases the fixed functions behave like Keras'.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from kmp.backend import distribution


def symbolic_build_patch(original: Callable[..., None]) -> Callable[..., None]:
    """Patches the trainer to build the model from the batch of one replica."""

    @functools.wraps(original)
    def _maybe_symbolic_build(
        self: keras.Model, iterator: Any = None, data_batch: Any = None
    ) -> None:
        strategy = self.distribute_strategy
        if iterator is not None and distribution.has_several_workers(strategy):
            # Keras builds the model from a batch if it gets one. It uses only shapes and dtypes.
            batch = next(next(iter(iterator))[-1])
            data_batch = tree.map_structure(
                lambda value: strategy.experimental_local_results(value)[0], batch
            )
            iterator = None
        original(self, iterator, data_batch)

    return _maybe_symbolic_build


def reduce_per_replica_patch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patches the trainer to average logs over workers as they are."""

    @functools.wraps(original)
    def reduce_per_replica(
        values: Any, strategy: tf.distribute.Strategy, reduction: str = "auto"
    ) -> Any:
        if reduction not in {"auto", "mean"} or not distribution.has_several_workers(strategy):
            return original(values, strategy, reduction)

        def mean(value: Any) -> Any:
            is_tensor = isinstance(value, tf.Tensor | tf.distribute.DistributedValues)
            return strategy.reduce("MEAN", value, axis=None) if is_tensor else value

        return tree.map_structure(mean, values)

    return reduce_per_replica
