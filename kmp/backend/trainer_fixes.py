"""Fixes of Keras' trainer.

Under `MultiWorkerMirroredStrategy`, `fit` fails in Keras 3.15.1 for any model, for two reasons: to build the model it
reduces a whole batch, a tuple of values, over the workers as if it were one tensor; and it takes the mean of logs along
an axis 0, which scalars do not have and vectors should keep. The fixed functions behave as Keras' own in every other
case. They are applied only where TF_CONFIG is set, or a model is compiled to run on several workers.

`fit` also fails on losses that layers add in 16 bits, because it adds them to a float32 loss.
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

from kmp.backend import distribution
from kmp.backend.monkeypatch import Replacement, defining_class

logger = logging.getLogger("kmp")

# Private to Keras, so another version may lack it: nothing public decides how added losses are summed.
ADD_LOSSES = "_aggregate_additional_loss"

_replacements: list[Replacement] = []


def adding_losses_in_float32(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a replacement of `ADD_LOSSES` that casts a loss of `add_loss` or of an activity regularizer to float32."""

    @functools.wraps(original)
    def _aggregate_additional_loss(self: keras.Model, loss: Any) -> Any:
        return original(self, keras.ops.cast(loss, keras.config.floatx()))

    return _aggregate_additional_loss


def fix_if_needed(model: keras.Model | None = None) -> None:
    """Makes `fit`, `evaluate` and `predict` work on several workers, where there are several.

    Args:
        model: The model that will run, or `None` before there is one: then TF_CONFIG tells.
    """
    is_needed = (
        "TF_CONFIG" in os.environ if model is None else distribution.has_several_workers(model.distribute_strategy)
    )
    if _replacements or not is_needed:
        return
    try:  # neither has a public name; tests fail when they move
        trainer = importlib.import_module("keras.src.backend.tensorflow.trainer")
        builder = defining_class(keras.Model, "_maybe_symbolic_build")
        _replacements.append(Replacement(builder, "_maybe_symbolic_build", _building_from_local_batch))
        _replacements.append(Replacement(trainer, "reduce_per_replica", _reducing_logs))
    except (ImportError, KeyError, StopIteration):
        remove_fixes()
        logger.warning("Keras %s is not the one whose `fit` kmp fixes on several workers.", keras.__version__)


def remove_fixes() -> None:
    """Restores Keras' own functions."""
    while _replacements:
        _replacements.pop().remove()


def _building_from_local_batch(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _maybe_symbolic_build(self: keras.Model, iterator: Any = None, data_batch: Any = None) -> None:
        strategy = self.distribute_strategy
        if iterator is not None and distribution.has_several_workers(strategy):
            # Given a batch in place of the iterator, Keras builds from the batch. Its shape and dtype are all it needs.
            data_batch, iterator = _first_local_batch(strategy, iterator), None
        original(self, iterator, data_batch)

    return _maybe_symbolic_build


def _reducing_logs(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce_per_replica(values: Any, strategy: tf.distribute.Strategy, reduction: str = "auto") -> Any:
        if reduction not in {"auto", "mean"} or not distribution.has_several_workers(strategy):
            return original(values, strategy, reduction)

        def mean(value: Any) -> Any:
            is_tensor = isinstance(value, tf.Tensor | tf.distribute.DistributedValues)
            return strategy.reduce("MEAN", value, axis=None) if is_tensor else value

        return tree.map_structure(mean, values)

    return reduce_per_replica


def _first_local_batch(strategy: tf.distribute.Strategy, iterator: Any) -> Any:
    batches: Iterator[Any] = next(iter(iterator))[-1]
    return tree.map_structure(lambda value: strategy.experimental_local_results(value)[0], next(batches))
