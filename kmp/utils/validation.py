"""Validation of public arguments.

Each function raises a `TypeError` or `ValueError` that names the argument, what was received and
what is expected. Numbers may be Python's, NumPy scalars, 0-d arrays and eager tensors; a `bool` is
no number.
"""

import math
import numbers
import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_INT64_MAX = 2**63 - 1


def message(name: str, value: Any, expected: str) -> str:
    """Returns the error message for an argument of the wrong type or value."""
    return (
        f"`{name}` must be {expected}. Received: {name}={value!r} (of type {type(value).__name__})"
    )


def python_scalar(value: Any) -> Any:
    """Returns the element of a NumPy scalar, 0-d array or eager tensor as Python's type.

    Other values are returned unchanged.
    """
    if not isinstance(value, np.generic) and getattr(value, "shape", None) != ():
        return value
    try:
        return np.asarray(value.numpy() if hasattr(value, "numpy") else value).item()
    except Exception:
        # A symbolic tensor has no value; Keras and TensorFlow raise different classes.
        return value


def integer(name: str, value: Any, expected: str = "an integer") -> int:
    """Returns an integer, or a float without a fraction, as an `int`."""
    scalar = python_scalar(value)
    if isinstance(scalar, float) and scalar.is_integer():
        scalar = int(scalar)
    if isinstance(scalar, bool) or not isinstance(scalar, numbers.Integral):
        raise TypeError(message(name, value, expected))
    return operator.index(scalar)


def positive_integer(name: str, value: Any) -> int:
    """Returns an integer from 1 to 2^63 - 1, the largest int64, as an `int`."""
    expected = "an integer from 1 to 2^63 - 1"
    result = integer(name, value, expected)
    if not 1 <= result <= _INT64_MAX:
        raise ValueError(message(name, value, expected))
    return result


def number(name: str, value: Any, expected: str, accepts: Callable[[float], bool]) -> float:
    """Returns a finite real number that `accepts` accepts, as a `float`.

    `expected` describes the range in words.
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
    """Returns `True` or `False` as a `bool`."""
    scalar = python_scalar(value)
    if not isinstance(scalar, bool):
        raise TypeError(message(name, value, "True or False"))
    return scalar


def boolean_or_auto(name: str, value: Any) -> bool | str:
    """Returns `True`, `False` or `"auto"`."""
    if isinstance(value, str) and value == "auto":
        return value
    scalar = python_scalar(value)
    if not isinstance(scalar, bool):
        raise TypeError(message(name, value, "True, False or 'auto'"))
    return scalar


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Returns one of the allowed strings; of a dtype policy or dtype, its name."""
    expected = "one of " + ", ".join(repr(item) for item in allowed)
    chosen = value if isinstance(value, str) else getattr(value, "name", None)
    if not isinstance(chosen, str):
        raise TypeError(message(name, value, expected))
    if chosen not in allowed:
        raise ValueError(message(name, value, expected))
    return chosen


def instance(name: str, value: Any, classes: type | tuple[type, ...], expected: str) -> None:
    """Checks that a value is an instance of one of the classes, which `expected` names in words."""
    if not isinstance(value, classes):
        raise TypeError(message(name, value, expected))


def patterns(name: str, value: Any) -> tuple[str, ...] | None:
    """Returns a string, or a list or tuple of strings, as a tuple; `None` stays `None`."""
    if value is None:
        return None
    expected = "a string or a list of strings"
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(item, str) for item in strings):
        raise TypeError(message(name, value, expected))
    if not strings:
        raise ValueError(message(name, value, f"{expected}, at least one"))
    return tuple(strings)


def local_path(name: str, value: Any, suffixes: tuple[str, ...] = ()) -> Path:
    """Returns a path on this machine, with `~` expanded.

    If suffixes are given, it is the path of a file whose name ends in one of them.
    """
    expected = "the path of a local folder or file"
    if suffixes:
        expected = f"the path of a local file that ends in {' or '.join(suffixes)}"
    if not isinstance(value, str | os.PathLike):
        raise TypeError(message(name, value, expected))
    text = os.fspath(value)
    if not isinstance(text, str) or not text or "\0" in text or "://" in text:
        raise ValueError(message(name, value, expected))
    path = Path(text).expanduser()
    if suffixes and (not path.name.endswith(suffixes) or path.name in suffixes):
        raise ValueError(message(name, value, expected))
    return path
