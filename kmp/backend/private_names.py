"""Finds private names of Keras and TensorFlow; a missing one costs its promise, and warns once."""

import importlib
from typing import Any

import keras
import tensorflow as tf

from kmp.backend.inventory import PRIVATE_NAMES
from kmp.utils import user_messages

_LISTED = {each.where: each for each in PRIVATE_NAMES}
_MISSING = object()
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


def find(where: str) -> Any:
    """Returns a function or class of the inventory, or `None` after a warning if it is missing."""
    listed = _LISTED[where]
    try:
        return resolve(where)
    except (ImportError, AttributeError):
        warn_of_missing(where, listed.promise)
        return None


def attribute(instance: Any, where: str, default: Any = None) -> Any:
    """Returns an attribute of an object, or the default after a warning if it is missing.

    Args:
        instance: The object.
        where: The class and the name of the attribute, as in the inventory.
        default: What to return if the object has no such attribute.
    """
    listed = _LISTED[where]
    found = getattr(instance, where.rpartition(".")[2], _MISSING)
    if found is _MISSING:
        warn_of_missing(where, listed.promise)
        return default
    return found


def required(instance: Any, where: str) -> Any:
    """Returns an attribute of an object for which there is no other way.

    Raises:
        RuntimeError: If the object has no such attribute.
    """
    found = attribute(instance, where, _MISSING)
    if found is _MISSING:
        raise RuntimeError(
            f"Keras {keras.__version__} has no {where}, and kmp knows no other way to do this:"
            f" {_LISTED[where].promise}. Update kmp."
        )
    return found


def warn_of_missing(where: str, promise: str) -> None:
    """Warns once in the process that the installed versions lack a name, and what that costs."""
    if where in _warned:
        return
    _warned.add(where)
    user_messages.warn(
        f"Keras {keras.__version__} with TensorFlow {tf.__version__} has no {where}, which this"
        f" version of kmp uses. Without it, this is not certain: {promise}. Update kmp."
    )
