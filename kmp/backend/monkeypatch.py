"""Replacing attributes and settings of Keras and TensorFlow temporarily, and restoring them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf


class Replacement:
    """Replaces a function or property of Keras on the class or module that defines it.

    Args:
        owner: The class or module.
        name: The name of the function or property.
        make: Takes the original and returns its replacement.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._owner, self._name = owner, name
        self._original = vars(owner)[name]
        self._replacement = make(self._original)
        setattr(owner, name, self._replacement)

    def remove(self) -> None:
        """Restores the original function, unless another library has replaced or wrapped the replacement since."""
        if vars(self._owner)[self._name] is self._replacement:
            setattr(self._owner, self._name, self._original)


@contextlib.contextmanager
def instance_attribute(instance: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an instance attribute in the context, bypassing the class' `__setattr__`.

    Args:
        instance: The object.
        name: The attribute's name.
        value: The attribute's value in the context; `None` removes it, so that the class attribute is used.
    """
    previous = vars(instance).pop(name, None)
    if value is not None:
        vars(instance)[name] = value
    try:
        yield
    finally:
        vars(instance).pop(name, None)
        if previous is not None:
            vars(instance)[name] = previous


@contextlib.contextmanager
def global_policy(policy: str) -> Iterator[None]:
    """Sets Keras' global dtype policy in the context."""
    previous = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(previous)


@contextlib.contextmanager
def tensor_float_32(is_allowed: bool) -> Iterator[None]:
    """Allows or disables TF32, a GPU's default for float32, which rounds the operands of products to 11 bits."""
    was_allowed = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(is_allowed)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(was_allowed)


def is_keras_class(cls: type) -> bool:
    """Whether a class is defined in Keras."""
    return cls.__module__.startswith("keras.")


def defining_class(cls: type, name: str) -> type:
    """Returns the class in the MRO of `cls` that defines `name`: Keras treats a replacement there as its own method."""
    return next(base for base in cls.__mro__ if name in vars(base))
