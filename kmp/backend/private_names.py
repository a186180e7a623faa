"""Finds private names of Keras and TensorFlow; a missing one costs its promise, with one warning."""

import importlib
from typing import Any

import keras
import tensorflow as tf

from kmp.utils import user_messages

_warned: set[str] = set()


def resolve(dotted: str) -> Any:
    """Returns what `"module"` or `"module:name.name"` stands for.

    Raises:
        ImportError: If there is no such module.
        AttributeError: If it has no such name.
    """
    module, _, names = dotted.partition(":")
    found = importlib.import_module(module)
    for name in filter(None, names.split(".")):
        found = getattr(found, name)
    return found


def warn_of_missing(name: str, promise: str) -> None:
    """Warns once in the process that the installed versions lack a name, and what that costs."""
    if name in _warned:
        return
    _warned.add(name)
    user_messages.warn(
        f"Keras {keras.__version__} with TensorFlow {tf.__version__} has no {name}, which this"
        f" version of kmp uses. Without it, this does not hold: {promise}. Update kmp."
    )
