"""Mends `fit` under `MultiWorkerMirroredStrategy`, which fails in Keras 3.15.1 for any model.

Two places in Keras' trainer are at fault: to build the model it reduces a whole batch, a tuple of values, over the
workers as if it were one tensor; and it takes the mean of scalar logs along an axis 0 that they do not have. What is
put in their place does as Keras does in every other case. Nothing is touched before a model is compiled under such a
strategy.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras import tree
from keras.src.backend.tensorflow import trainer as keras_trainer  # no public name; tests fail when what it holds moves

from kmp import _replicas
from kmp._patch import Replacement, definer

_replacements: list[Replacement] = []


def mend_if_needed(model: keras.Model) -> None:
    """Makes `fit`, `evaluate` and `predict` work on several workers, if the model is to run on them."""
    if _replacements or not _replicas.has_several_workers(model.distribute_strategy):
        return
    trainer = definer(keras.Model, "_maybe_symbolic_build")
    _replacements.append(Replacement(trainer, "_maybe_symbolic_build", _building_from_local_batch))
    _replacements.append(Replacement(keras_trainer, "reduce_per_replica", _reducing_scalars))


def unmend() -> None:
    """Gives Keras its own functions back."""
    while _replacements:
        _replacements.pop().remove()


def _building_from_local_batch(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _maybe_symbolic_build(self: keras.Model, iterator: Any = None, data_batch: Any = None) -> None:
        strategy = self.distribute_strategy
        if iterator is not None and _replicas.has_several_workers(strategy):
            # Given a batch in place of the iterator, Keras builds from the batch. Its shape and dtype are all it needs.
            data_batch, iterator = _first_local_batch(strategy, iterator), None
        original(self, iterator, data_batch)

    return _maybe_symbolic_build


def _reducing_scalars(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce_per_replica(values: Any, strategy: tf.distribute.Strategy, reduction: str = "auto") -> Any:
        if reduction not in {"auto", "mean"} or not _replicas.has_several_workers(strategy):
            return original(values, strategy, reduction)

        def mean(value: Any) -> Any:
            is_scalar = strategy.experimental_local_results(value)[0].shape.rank == 0
            return strategy.reduce("MEAN", value, axis=None) if is_scalar else original(value, strategy, reduction)

        return tree.map_structure(mean, values)

    return reduce_per_replica


def _first_local_batch(strategy: tf.distribute.Strategy, iterator: Any) -> Any:
    batches: Iterator[Any] = next(iter(iterator))[-1]
    return tree.map_structure(lambda value: strategy.experimental_local_results(value)[0], next(batches))
