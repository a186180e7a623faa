"""Finds the optimizers that train a model."""

from collections.abc import Iterable, Iterator
from typing import Any

import keras

from kmp.backend.keras_internals import sublayers
from kmp.optimizer import LossScaleOptimizer


def optimizers_of(model: keras.Model) -> list[LossScaleOptimizer]:
    """Returns the `LossScaleOptimizer`s of a model and of the compiled models in it.

    They are those of `all_optimizers_of(model)`, and those that models inside of it were compiled
    with.
    """
    models = [layer for layer in sublayers(model) if isinstance(layer, keras.Model)]
    compiled_with = [getattr(each, "optimizer", None) for each in models]
    found = _without_duplicates([*all_optimizers_of(model), *compiled_with])
    return [each for each in found if isinstance(each, LossScaleOptimizer)]


def all_optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizer a model is compiled with and those in its attributes."""
    return _without_duplicates(_optimizers_in([model.optimizer, *vars(model).values()]))


def _optimizers_in(values: Iterable[Any]) -> Iterator[keras.optimizers.Optimizer]:
    for value in values:
        if isinstance(value, keras.optimizers.Optimizer):
            yield value
        elif isinstance(value, dict):
            yield from _optimizers_in(value.values())
        elif isinstance(value, list | tuple):
            yield from _optimizers_in(value)


def _without_duplicates(objects: Iterable[Any]) -> list[Any]:
    return list({id(each): each for each in objects}.values())
