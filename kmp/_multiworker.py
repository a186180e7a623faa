"""Mends `fit` under `MultiWorkerMirroredStrategy`, which fails in Keras 3.15.1 for any model.

Two places in Keras' trainer are at fault: to build the model it reduces a whole batch, a tuple of values, over the
workers as if it were one tensor; and it takes the mean of logs along an axis 0, which scalars do not have and vectors
should keep. What is put in their place does as Keras does in every other case. Nothing is touched where there is no
TF_CONFIG, before a model is compiled to run on several workers.
"""

import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from kmp import _replicas
from kmp._patch import Replacement, definer

logger = logging.getLogger("kmp")

_replacements: list[Replacement] = []


def mend_if_needed(model: keras.Model | None = None) -> None:
    """Makes `fit`, `evaluate` and `predict` work on several workers, where there are several.

    Args:
        model: The model that will run, or `None` before there is one: then TF_CONFIG tells.
    """
    is_needed = "TF_CONFIG" in os.environ if model is None else _replicas.has_several_workers(model.distribute_strategy)
    if _replacements or not is_needed:
        return
    try:  # neither has a public name; tests fail when they move
        trainer = importlib.import_module("keras.src.backend.tensorflow.trainer")
        builder = definer(keras.Model, "_maybe_symbolic_build")
        _replacements.append(Replacement(builder, "_maybe_symbolic_build", _building_from_local_batch))
        _replacements.append(Replacement(trainer, "reduce_per_replica", _reducing_logs))
    except (ImportError, KeyError, StopIteration):
        unmend()
        logger.warning("Keras %s is not the one whose `fit` kmp mends on several workers.", keras.__version__)


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


def _reducing_logs(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce_per_replica(values: Any, strategy: tf.distribute.Strategy, reduction: str = "auto") -> Any:
        if reduction not in {"auto", "mean"} or not _replicas.has_several_workers(strategy):
            return original(values, strategy, reduction)

        def mean(value: Any) -> Any:
            is_tensor = isinstance(value, tf.Tensor | tf.distribute.DistributedValues)
            return strategy.reduce("MEAN", value, axis=None) if is_tensor else value

        return tree.map_structure(mean, values)

    return reduce_per_replica


def _first_local_batch(strategy: tf.distribute.Strategy, iterator: Any) -> Any:
    batches: Iterator[Any] = next(iter(iterator))[-1]
    return tree.map_structure(lambda value: strategy.experimental_local_results(value)[0], next(batches))
