"""The optimizer that loss scaling wraps: which are accepted, and how its steps are changed."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kmp.backend.keras_internals import instance_attribute
from kmp.backend.private_names import required
from kmp.gradients.tensor_groups import Gradients
from kmp.utils import validation

_CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")


def resolve_optimizer(name: str, value: Any) -> keras.optimizers.Optimizer:
    """Returns the optimizer that loss scaling will wrap, from an argument that is or names one."""
    optimizer = value
    if isinstance(value, str):
        try:
            optimizer = keras.optimizers.get(value)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                validation.message(name, value, "the name of an optimizer, such as 'adam'")
            ) from error
    expected = "a keras.optimizers.Optimizer or the name of one, such as 'adam'"
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        reason = "this one already scales the loss, which would be scaled twice"
        raise TypeError(validation.message(name, value, f"{expected}; {reason}"))
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(validation.message(name, value, expected))
    return optimizer


def clip(optimizer: keras.optimizers.Optimizer, gradients: Gradients) -> list[Any]:
    """Returns gradients as Keras clips them before the update."""
    if not any(getattr(optimizer, name, None) for name in _CLIPPING):
        return list(gradients)
    return required(optimizer, "keras:optimizers.Optimizer._clip_gradients")(gradients)


@contextlib.contextmanager
def without_clipping(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Makes an optimizer take gradients that are clipped already."""
    before = {name: vars(optimizer)[name] for name in _CLIPPING}
    vars(optimizer).update(dict.fromkeys(_CLIPPING))
    try:
        yield
    finally:
        vars(optimizer).update(before)


@contextlib.contextmanager
def without_strategy(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Makes an optimizer update variables as if it had been created without a strategy."""
    with instance_attribute(optimizer, "_distribution_strategy", tf.distribute.get_strategy()):
        yield
