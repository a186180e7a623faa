"""Warnings that point at the line in the user's code, and error messages shortened to one line."""

import re
import sys
import textwrap
import warnings
from contextvars import ContextVar
from types import FrameType

# Whether this thread runs code of the user once more, which has warned before.
is_quiet: ContextVar[bool] = ContextVar("is_quiet", default=False)

_LIBRARIES = ("kmp", "kmp_cli", "keras", "tensorflow", "contextlib")


def warn(message: str) -> None:
    """Issues a `UserWarning` at the innermost stack frame outside kmp, Keras and TensorFlow."""
    if is_quiet.get():
        return

    def is_of_library(frame: FrameType) -> bool:
        is_traced = "__autograph_generated_file" in frame.f_code.co_filename
        return is_traced or frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES

    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and is_of_library(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level if frame else 2)


def one_line(error: Exception) -> str:
    """Returns an error's message on one line of at most 200 characters.

    If it is empty, returns the name of the class.
    """
    # TensorFlow's name of the operation comes first, and Keras prints in bold.
    text = re.sub(r"\{\{function_node \S*\}\} ?|\x1b\[\d*m", "", str(error))
    return textwrap.shorten(text or type(error).__name__, 200, placeholder=" ...")
