"""Validation of the optimizer that loss scaling wraps."""

from typing import Any

import keras

from kmp.utils import validation


def resolve_optimizer(name: str, value: Any) -> keras.optimizers.Optimizer:
    """Returns the optimizer that loss scaling will wrap.

    Args:
        name: The argument's name, for the message.
        value: A `keras.optimizers.Optimizer`, or the name of one.

    Raises:
        TypeError: If `value` is not an optimizer, or already scales the loss.
        ValueError: If `value` is not the name of an optimizer.
    """
    optimizer = _optimizer_named(name, value) if isinstance(value, str) else value
    expected = "a keras.optimizers.Optimizer or the name of one, such as 'adam'"
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        reason = "this one already scales the loss, which would be scaled twice"
        raise TypeError(validation.message(name, value, f"{expected}; {reason}"))
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(validation.message(name, value, expected))
    return optimizer


def _optimizer_named(name: str, value: str) -> keras.optimizers.Optimizer:
    try:
        return keras.optimizers.get(value)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(validation.message(name, value, "the name of an optimizer, such as 'adam'")) from error
