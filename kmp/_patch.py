"""Putting something in an attribute's place, and the original back."""

from collections.abc import Callable
from typing import Any


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


def definer(cls: type, name: str) -> type:
    """Returns the class in `cls`'s line that defines `name`: a replacement there looks to Keras like Keras' own."""
    return next(base for base in cls.__mro__ if name in vars(base))
