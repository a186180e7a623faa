"""Finds the optimizers of a model."""

from collections.abc import Iterable, Iterator
from typing import Any

import keras

from kmp.optimizer import LossScaleOptimizer


def optimizers_of(model: keras.Model) -> list[LossScaleOptimizer]:
    """Returns the `LossScaleOptimizer`s among `all_optimizers_of(model)`."""
    return [optimizer for optimizer in all_optimizers_of(model) if isinstance(optimizer, LossScaleOptimizer)]


def all_optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizer a model is compiled with and the optimizers in its attributes, without duplicates."""
    optimizers = _optimizers_in([model.optimizer, *vars(model).values()])
    return list({id(optimizer): optimizer for optimizer in optimizers}.values())


def _optimizers_in(values: Iterable[Any]) -> Iterator[keras.optimizers.Optimizer]:
    for value in values:
        if isinstance(value, keras.optimizers.Optimizer):
            yield value
        elif isinstance(value, dict | list | tuple):
            yield from _optimizers_in(value.values() if isinstance(value, dict) else value)
