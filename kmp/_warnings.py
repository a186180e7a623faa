"""Warnings that point at the user's own line, however deep in Keras and TensorFlow they arise; errors in a line."""

import sys
import warnings
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


def _is_a_librarys(frame: FrameType) -> bool:
    is_traced = "__autograph_generated_file" in frame.f_code.co_filename
    return is_traced or frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES
