"""Checks of public arguments: each names the argument, what was received and what would work."""

import math
import numbers
import operator
from collections.abc import Callable
from typing import Any


def integer(name: str, value: Any, minimum: int) -> int:
    """Returns `value` as an `int` of at least `minimum`.

    Raises:
        TypeError: If `value` is not an integer (a `bool` is not one).
        ValueError: If it is below `minimum`.
    """
    expected = f"an integer of at least {minimum}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(_message(name, value, expected))
    if value < minimum:
        raise ValueError(_message(name, value, expected))
    return operator.index(value)


def number(name: str, value: Any, expected: str, accepts: Callable[[float], bool]) -> float:
    """Returns `value` as a finite `float`.

    Args:
        name: The argument's name, for the message.
        value: What the caller passed.
        expected: The accepted range in words, for the message.
        accepts: Tells whether a finite float lies in that range.

    Raises:
        TypeError: If `value` is not a real number (a `bool` is not one).
        ValueError: If it is not finite or not accepted.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(_message(name, value, expected))
    result = float(value)
    if not math.isfinite(result) or not accepts(result):
        raise ValueError(_message(name, value, expected))
    return result


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Returns `value` if it is one of the strings `allowed`.

    Raises:
        TypeError: If `value` is not a string.
        ValueError: If it is another string.
    """
    expected = "one of " + ", ".join(repr(item) for item in allowed)
    if not isinstance(value, str):
        raise TypeError(_message(name, value, expected))
    if value not in allowed:
        raise ValueError(_message(name, value, expected))
    return value


def _message(name: str, value: Any, expected: str) -> str:
    return f"`{name}` must be {expected}. Received: {name}={value!r} (of type {type(value).__name__})"
