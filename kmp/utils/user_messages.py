"""Warnings that point at the user's own line, however deep in Keras and TensorFlow they arise; errors in a line."""

import contextlib
import sys
import textwrap
import warnings
from collections.abc import Iterator
from types import FrameType

_LIBRARIES = ("kmp", "keras", "tensorflow", "contextlib")


def warn(message: str) -> None:
    """Warns at the innermost line that is not kmp's, Keras' or TensorFlow's."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and _is_a_librarys(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level if frame else 2)


def first_line(error: Exception) -> str:
    """Returns the first line of what an error says, or its type if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def in_short(error: Exception) -> str:
    """Returns what an error says on one line of at most 200 characters, or its type if it says nothing."""
    return textwrap.shorten(str(error) or type(error).__name__, 200, placeholder=" ...")


@contextlib.contextmanager
def naming_argument(argument: str, subject: str) -> Iterator[None]:
    """Replaces any error raised inside by a `ValueError` that names the argument.

    Args:
        argument: The argument's name.
        subject: What it does not fit, such as a model.

    Raises:
        ValueError: In place of any other error.
    """
    try:
        yield
    except Exception as error:  # Keras and TensorFlow raise many classes, with long texts of their own
        raise ValueError(f"`{argument}` does not fit {subject}: {first_line(error)}") from error


def _is_a_librarys(frame: FrameType) -> bool:
    is_traced = "__autograph_generated_file" in frame.f_code.co_filename
    return is_traced or frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES
