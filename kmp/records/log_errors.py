"""Messages about lines of a log that do not conform to its schema: they name the key and what was received."""

import contextlib
import re
import reprlib
import textwrap
from typing import Any

import msgspec

_NEAR = 1000  # bytes before an error in which its key is searched
_MANY_BRACKETS = re.compile(rb"[\[{]{100}")
_KEY = re.compile(rb'"([^"\\]{1,100})"\s*:')
_MISSING = object()


class InvalidValueError(ValueError):
    """A value of a log is not valid. The message names its key."""


def explanation(error: Exception, line: bytes) -> str:
    """Returns what is wrong with a line, on one line.

    Args:
        error: The error that decoding the line raised.
        line: The line.
    """
    if isinstance(error, InvalidValueError):
        return str(error)
    if isinstance(error, msgspec.ValidationError):
        return _of_invalid_value(str(error), line)
    if isinstance(error, RecursionError):
        nested = _MANY_BRACKETS.search(line)
        return f"nested too deeply{_after_key(line, nested.start() if nested else len(line))}"
    position = re.search(r"byte (\d+)", str(error))
    return f"not a line of JSON ({error}){_after_key(line, int(position[1]) if position else len(line))}"


def _of_invalid_value(message: str, line: bytes) -> str:
    """Rewrites a message of msgspec, such as "Expected `int`, got `str` - at `$.step`"."""
    problem, _, path = message.partition(" - at ")
    if path.startswith("`key` in "):
        return f"a name in {path.removeprefix('`key` in ').replace('$.', '')}: {problem}"
    key = path.replace("$.", "").strip("`").replace("$", "")
    expected, _, found = problem.removeprefix("Expected ").partition(", got ")
    received = _received(path, line)
    found = _short(received) if received is not _MISSING else found
    found = f" Received: {found}" if found else ""
    if not problem.startswith("Expected "):
        return f"{f'`{key}`: ' * bool(key)}{problem}.{found}"
    return f"{f'`{key}`' if key else 'a record'} must be {expected}.{found}"


def _short(value: Any) -> str:
    return textwrap.shorten(reprlib.repr(value), 120, placeholder=" ...")


def _received(path: str, line: bytes) -> Any:
    """Returns the value at a path of msgspec's, such as `$.settings.compute_dtypes[0]`, if it names one value."""
    if not path.startswith("`$.") or "[...]" in path:
        return _MISSING
    with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError, LookupError, TypeError):
        value = msgspec.json.decode(line)
        for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
            value = value[key] if key else value[int(index)]
        return value
    return _MISSING


def _after_key(line: bytes, position: int) -> str:
    """Returns where a position is, by the last key before it."""
    keys = _KEY.findall(line[max(0, position - _NEAR) : position])
    return f", after the key `{keys[-1].decode(errors='replace')}`" if keys else ""
