"""Warnings that point at the line in the user's code, and error messages shortened to one line."""

import contextlib
import sys
import textwrap
import warnings
from collections.abc import Iterator
from types import FrameType

_LIBRARIES = ("kmp", "kmp_cli", "keras", "tensorflow", "contextlib")


def warn(message: str) -> None:
    """Issues a `UserWarning` at the innermost stack frame outside kmp, Keras and TensorFlow."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and _is_library_frame(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level if frame else 2)


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, or its class name if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def one_line(error: Exception) -> str:
    """Returns an error's message on one line of at most 200 characters, or its class name if the message is empty."""
    return textwrap.shorten(str(error) or type(error).__name__, 200, placeholder=" ...")


@contextlib.contextmanager
def naming_argument(argument: str, subject: str) -> Iterator[None]:
    """Converts any error raised in the context into a `ValueError` that names the argument.

    Args:
        argument: The argument's name.
        subject: What the argument does not fit, such as a model.

    Raises:
        ValueError: In place of any error raised in the context.
    """
    try:
        yield
    except Exception as error:  # Keras and TensorFlow raise many classes, with long messages
        raise ValueError(f"`{argument}` does not fit {subject}: {first_line(error)}") from error


def _is_library_frame(frame: FrameType) -> bool:
    is_traced = "__autograph_generated_file" in frame.f_code.co_filename
    return is_traced or frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES
