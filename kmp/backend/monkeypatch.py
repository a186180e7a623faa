"""Putting something of Keras' into another state for a while, and back."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras


class Replacement:
    """A function in place of one that Keras has, on the class or module that defines it.

    Args:
        owner: The class or module.
        name: The attribute's name.
        make: Takes the original, returns what stands in its place.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._owner, self._name = owner, name
        self._original = vars(owner)[name]
        self._ours = make(self._original)
        setattr(owner, name, self._ours)

    def remove(self) -> None:
        """Puts the original back, unless another library has put something around ours by now."""
        if vars(self._owner)[self._name] is self._ours:
            setattr(self._owner, self._name, self._original)


@contextlib.contextmanager
def instance_attribute(thing: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an object an attribute of its own while this is open, past what its class does on setting one.

    Args:
        thing: The object.
        name: The attribute's name.
        value: What it is meanwhile; `None` for what the class has.
    """
    before = vars(thing).pop(name, None)
    if value is not None:
        vars(thing)[name] = value
    try:
        yield
    finally:
        vars(thing).pop(name, None)
        if before is not None:
            vars(thing)[name] = before


@contextlib.contextmanager
def global_policy(policy: str) -> Iterator[None]:
    """Sets the global dtype policy while this is open."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def is_keras_class(kind: type) -> bool:
    """Whether a class is one of Keras' own."""
    return kind.__module__.startswith("keras.")


def defining_class(cls: type, name: str) -> type:
    """Returns the class in `cls`'s line that defines `name`: a replacement there looks to Keras like Keras' own."""
    return next(base for base in cls.__mro__ if name in vars(base))
