"""The optimizers that a model trains with."""

from collections.abc import Iterable, Iterator
from typing import Any

import keras

from kmp.optimizer import LossScaleOptimizer


def optimizers_of(model: keras.Model) -> list[LossScaleOptimizer]:
    """Returns kmp's among `all_optimizers_of` a model."""
    return [optimizer for optimizer in all_optimizers_of(model) if isinstance(optimizer, LossScaleOptimizer)]


def all_optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns what a model may train with: the optimizer it is compiled with, and those it holds; each once."""
    found = _optimizers_in([model.optimizer, *vars(model).values()])
    return list({id(optimizer): optimizer for optimizer in found}.values())


def _optimizers_in(values: Iterable[Any]) -> Iterator[keras.optimizers.Optimizer]:
    for value in values:
        if isinstance(value, keras.optimizers.Optimizer):
            yield value
        elif isinstance(value, dict | list | tuple):
            yield from _optimizers_in(value.values() if isinstance(value, dict) else value)
