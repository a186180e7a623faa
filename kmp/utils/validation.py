"""Checks of public arguments: each names the argument, what was received and what would work."""

import math
import numbers
import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODEL_SUFFIXES = (".keras", ".weights.h5")

_LARGEST = 2**63 - 1


def integer(name: str, value: Any, expected: str = "an integer") -> int:
    """Returns `value` as an `int`.

    Raises:
        TypeError: If `value` is not an integer (a `bool` is not one).
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(message(name, value, expected))
    return operator.index(value)


def positive_integer(name: str, value: Any) -> int:
    """Returns `value` as an `int` that is at least 1 and fits into int64.

    Raises:
        TypeError: If `value` is not an integer (a `bool` is not one).
        ValueError: If it is outside that range.
    """
    expected = "an integer from 1 to 2^63 - 1"
    result = integer(name, value, expected)
    if not 1 <= result <= _LARGEST:
        raise ValueError(message(name, value, expected))
    return result


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
        raise TypeError(message(name, value, expected))
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result) or not accepts(result):
        raise ValueError(message(name, value, expected))
    return result


def boolean(name: str, value: Any) -> bool:
    """Returns `value` if it is a `bool`.

    Raises:
        TypeError: If it is not.
    """
    if not isinstance(value, bool):
        raise TypeError(message(name, value, "True or False"))
    return value


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Returns `value` if it is one of the strings `allowed`.

    Raises:
        TypeError: If `value` is not a string.
        ValueError: If it is another string.
    """
    expected = "one of " + ", ".join(repr(item) for item in allowed)
    if not isinstance(value, str):
        raise TypeError(message(name, value, expected))
    if value not in allowed:
        raise ValueError(message(name, value, expected))
    return value


def instance(name: str, value: Any, kind: type | tuple[type, ...], expected: str) -> None:
    """Makes sure that `value` is of a class.

    Args:
        name: The argument's name, for the message.
        value: What the caller passed.
        kind: The class, or several.
        expected: What it is in words, for the message.

    Raises:
        TypeError: If it is not.
    """
    if not isinstance(value, kind):
        raise TypeError(message(name, value, expected))


def patterns(name: str, value: Any) -> tuple[str, ...] | None:
    """Returns one string, or several, as a tuple; `None` as it is.

    Raises:
        TypeError: If `value` is neither a string nor a sequence of them.
        ValueError: If there is none in it.
    """
    if value is None:
        return None
    expected = "a string or a list of strings"
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not all(isinstance(item, str) for item in found):
        raise TypeError(message(name, value, expected))
    if not found:
        raise ValueError(message(name, value, f"{expected}, at least one"))
    return tuple(found)


def batch(name: str, value: Any) -> tuple[Any, ...]:
    """Returns `(x, y)` or `(x, y, sample_weight)` as a tuple.

    Raises:
        TypeError: If `value` is not a tuple or list of two or three.
    """
    if not isinstance(value, tuple | list) or len(value) not in (2, 3):
        kind = f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__
        raise TypeError(f"`{name}` must be a batch (x, y) or (x, y, sample_weight). Received: a {kind}")
    return tuple(value)


def local_path(name: str, value: Any) -> Path:
    """Returns `value` as a path on this machine, with `~` expanded.

    Raises:
        TypeError: If `value` is not a string or path.
        ValueError: If it is empty, or an address of another kind.
    """
    expected = "the path of a local folder"
    if not isinstance(value, str | os.PathLike):
        raise TypeError(message(name, value, expected))
    text = os.fspath(value)
    if not isinstance(text, str) or not text or "\0" in text or "://" in text:
        raise ValueError(message(name, value, expected))
    return Path(text).expanduser()


def model_path(name: str, value: Any) -> Path:
    """Returns `value` as a path that Keras saves a whole model or its weights to.

    Raises:
        TypeError: If `value` is not a string or path.
        ValueError: If its name does not end in `.keras` or `.weights.h5`, or it is no local path.
    """
    path = local_path(name, value)
    if not path.name.endswith(MODEL_SUFFIXES):
        raise ValueError(message(name, value, f"a path that ends in {' or '.join(MODEL_SUFFIXES)}"))
    return path


def message(name: str, value: Any, expected: str) -> str:
    """Returns the error message for an argument of the wrong type or value."""
    return f"`{name}` must be {expected}. Received: {name}={value!r} (of type {type(value).__name__})"
