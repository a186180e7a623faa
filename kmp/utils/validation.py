"""Validation of public arguments. Each error names the argument, what was received and what is expected."""

import math
import numbers
import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

MODEL_SUFFIXES = (".keras", ".weights.h5")

_INT64_MAX = 2**63 - 1


def python_scalar(value: Any) -> Any:
    """Returns the element of a NumPy scalar, 0-d array or eager tensor as Python's type, and other values unchanged."""
    has_one_element = isinstance(value, np.generic) or getattr(value, "shape", None) == ()
    if not has_one_element:
        return value
    try:
        return np.asarray(value.numpy() if hasattr(value, "numpy") else value).item()
    except Exception:  # a symbolic tensor has no value; Keras and TensorFlow raise different classes
        return value


def integer(name: str, value: Any, expected: str = "an integer") -> int:
    """Returns `value` as an `int`.

    Args:
        name: The argument's name, for the message.
        value: The received value: an integer or a float without a fraction, also as a NumPy scalar, 0-d array or eager
            tensor.
        expected: The accepted values in words, for the message.

    Raises:
        TypeError: If `value` is not an integer. A `bool` is not accepted.
    """
    scalar = python_scalar(value)
    if isinstance(scalar, float) and scalar.is_integer():
        scalar = int(scalar)
    if isinstance(scalar, bool) or not isinstance(scalar, numbers.Integral):
        raise TypeError(message(name, value, expected))
    return operator.index(scalar)


def positive_integer(name: str, value: Any) -> int:
    """Returns `value` as an `int` from 1 to 2^63 - 1, the largest int64.

    Raises:
        TypeError: If `value` is not an integer. A `bool` is not accepted.
        ValueError: If `value` is outside that range.
    """
    expected = "an integer from 1 to 2^63 - 1"
    result = integer(name, value, expected)
    if not 1 <= result <= _INT64_MAX:
        raise ValueError(message(name, value, expected))
    return result


def number(name: str, value: Any, expected: str, accepts: Callable[[float], bool]) -> float:
    """Returns `value` as a finite `float`.

    Args:
        name: The argument's name, for the message.
        value: The received value: a real number, also as a NumPy scalar, 0-d array or eager tensor.
        expected: The accepted range in words, for the message.
        accepts: Returns whether a finite float lies in that range.

    Raises:
        TypeError: If `value` is not a real number. A `bool` is not accepted.
        ValueError: If `value` is not finite, or outside that range.
    """
    scalar = python_scalar(value)
    if isinstance(scalar, bool) or not isinstance(scalar, numbers.Real):
        raise TypeError(message(name, value, expected))
    try:
        result = float(scalar)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result) or not accepts(result):
        raise ValueError(message(name, value, expected))
    return result


def boolean(name: str, value: Any) -> bool:
    """Returns `value` as a `bool`; it may be a NumPy scalar, 0-d array or eager tensor.

    Raises:
        TypeError: If `value` is not a `bool`.
    """
    scalar = python_scalar(value)
    if not isinstance(scalar, bool):
        raise TypeError(message(name, value, "True or False"))
    return scalar


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Returns `value`, or its `name` if it is a dtype policy or a dtype, if that is one of the `allowed` strings.

    Raises:
        TypeError: If `value` is neither a string nor has a name.
        ValueError: If the string is not in `allowed`.
    """
    expected = "one of " + ", ".join(repr(item) for item in allowed)
    chosen = value if isinstance(value, str) else getattr(value, "name", None)
    if not isinstance(chosen, str):
        raise TypeError(message(name, value, expected))
    if chosen not in allowed:
        raise ValueError(message(name, value, expected))
    return chosen


def instance(name: str, value: Any, classes: type | tuple[type, ...], expected: str) -> None:
    """Checks that `value` is an instance of a class.

    Args:
        name: The argument's name, for the message.
        value: The received value.
        classes: One class, or a tuple of classes.
        expected: The classes in words, for the message.

    Raises:
        TypeError: If `value` is not an instance of one of the classes.
    """
    if not isinstance(value, classes):
        raise TypeError(message(name, value, expected))


def patterns(name: str, value: Any) -> tuple[str, ...] | None:
    """Returns a string, or a list or tuple of strings, as a tuple; `None` stays `None`.

    Raises:
        TypeError: If `value` is neither a string nor a list or tuple of strings.
        ValueError: If the list or tuple is empty.
    """
    if value is None:
        return None
    expected = "a string or a list of strings"
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(item, str) for item in strings):
        raise TypeError(message(name, value, expected))
    if not strings:
        raise ValueError(message(name, value, f"{expected}, at least one"))
    return tuple(strings)


def local_path(name: str, value: Any) -> Path:
    """Returns `value` as a path on this machine, with `~` expanded.

    Raises:
        TypeError: If `value` is not a string or path.
        ValueError: If `value` is empty, a URL, or not a text path.
    """
    expected = "the path of a local folder or file"
    if not isinstance(value, str | os.PathLike):
        raise TypeError(message(name, value, expected))
    text = os.fspath(value)
    if not isinstance(text, str) or not text or "\0" in text or "://" in text:
        raise ValueError(message(name, value, expected))
    return Path(text).expanduser()


def model_path(name: str, value: Any) -> Path:
    """Returns `value` as a path to which Keras saves a model or its weights.

    Raises:
        TypeError: If `value` is not a string or path.
        ValueError: If `value` does not end in `.keras` or `.weights.h5`, or is not a local path.
    """
    path = local_path(name, value)
    if not path.name.endswith(MODEL_SUFFIXES):
        raise ValueError(message(name, value, f"a path that ends in {' or '.join(MODEL_SUFFIXES)}"))
    return path


def message(name: str, value: Any, expected: str) -> str:
    """Returns the error message for an argument of the wrong type or value."""
    return f"`{name}` must be {expected}. Received: {name}={value!r} (of type {type(value).__name__})"
