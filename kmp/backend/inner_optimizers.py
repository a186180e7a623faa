"""Optimizers that a loss scale can be wrapped around, from a name or as they are."""

from typing import Any

import keras

from kmp.utils import validation


def inner_optimizer(name: str, value: Any) -> keras.optimizers.Optimizer:
    """Returns an optimizer that loss scaling can be put around, from itself or from its name.

    Raises:
        TypeError: If it is no optimizer, or scales the loss already.
        ValueError: If it is not the name of one.
    """
    found = _optimizer_named(name, value) if isinstance(value, str) else value
    expected = "a keras.optimizers.Optimizer or the name of one, such as 'adam'"
    if isinstance(found, keras.optimizers.LossScaleOptimizer):
        raise TypeError(
            validation.message(
                name, value, f"{expected}; this one scales the loss already, which would be scaled twice"
            )
        )
    if not isinstance(found, keras.optimizers.Optimizer):
        raise TypeError(validation.message(name, value, expected))
    return found


def _optimizer_named(name: str, value: str) -> keras.optimizers.Optimizer:
    try:
        return keras.optimizers.get(value)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(validation.message(name, value, "the name of an optimizer, such as 'adam'")) from error
