"""Serialization of functions by reference, to rebuild a model in the process that holds it."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from kmp.backend.patching import Replacement

Function = Callable[..., Any]

_PREFIX = "kmp_function"


@contextlib.contextmanager
def functions_by_reference() -> Iterator[dict[str, Function]]:
    """Makes Keras serialize functions as references in the context, not as code or names.

    Keras serializes a lambda as code, which only unsafe mode deserializes, without the lambda's globals; and another
    function as its name, which is found only if the function is registered. No public API changes either. Functions
    of Keras and registered functions keep their names.

    Yields:
        A dict that maps each reference to its function, to be passed as `custom_objects`. A config must pass through
        `with_named_lambda` first.
    """
    functions: dict[str, Function] = {}

    def reference(function: Function) -> str:
        known_names = (name for name, known in functions.items() if known is function)
        name = next(known_names, f"{_PREFIX}_{len(functions)}")
        functions[name] = function
        return name

    def dumping_reference(original: Function) -> Function:
        return lambda function: (reference(function), None, None)

    def naming_by_reference(original: Function) -> Function:
        def get_registered_name(value: Any) -> str:
            name = original(value)
            is_unregistered = isinstance(value, FunctionType) and name == value.__name__
            return reference(value) if is_unregistered and not (value.__module__ or "").startswith("keras.") else name

        return get_registered_name

    replacements = [  # both are private; a test fails if Keras moves them
        Replacement(importlib.import_module("keras.src.utils.python_utils"), "func_dump", dumping_reference),
        Replacement(
            importlib.import_module("keras.src.saving.object_registration"), "get_registered_name", naming_by_reference
        ),
    ]
    try:
        yield functions
    finally:
        for replacement in replacements:
            replacement.remove()


def with_named_lambda(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config of a lambda that was serialized by reference as that of a named function, others unchanged."""
    code = config["config"].get("value") if config.get("class_name") == "__lambda__" else None
    name = code[0] if isinstance(code, list | tuple) else None
    if not isinstance(name, str) or not name.startswith(_PREFIX):
        return config
    return {"class_name": "function", "config": name, "registered_name": name, "module": None}
