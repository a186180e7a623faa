"""Replaces functions of Keras, and restores them."""

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import keras


class Replacement:
    """Replaces a function or property of Keras on its class or module, by what `make` returns for the original."""

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._owner, self._name = owner, name
        self._original = vars(owner)[name]
        self._replacement = make(self._original)
        setattr(owner, name, self._replacement)

    def remove(self) -> None:
        """Restores the original function, unless another library has replaced or wrapped the replacement since."""
        if vars(self._owner)[self._name] is self._replacement:
            setattr(self._owner, self._name, self._original)


def replace_policy_state(current: Callable[[], Any]) -> Iterator[Replacement]:
    """Makes a policy the global one for all threads, except those that set another policy later; yields the patches.

    Keras 3.15 stores its global policy by thread, and `keras.backend.clear_session` deletes it:
    layers are float32 again. No public name reaches that state. `current` returns the settings in
    force, or `None`: their `dtype_policy`, and as `state_name` the name under which Keras' state of
    a thread stores a policy that is set there in the meantime.
    """

    def reading(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def get_global_attribute(name: str, *args: Any, **kwargs: Any) -> Any:
            settings = current() if name == "dtype_policy" else None
            if settings is None:
                return original(name, *args, **kwargs)
            return original(settings.state_name) or settings.dtype_policy

        return get_global_attribute

    def writing(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def set_global_attribute(name: str, value: Any) -> None:
            settings = current() if name == "dtype_policy" else None
            original(name if settings is None else settings.state_name, value)

        return set_global_attribute

    try:
        state = importlib.import_module("keras.src.backend.common.global_state")
        yield Replacement(state, "get_global_attribute", reading)
        yield Replacement(state, "set_global_attribute", writing)
    except (ImportError, KeyError) as error:
        raise RuntimeError(
            f"This version of kmp does not support Keras {keras.__version__}: update kmp."
        ) from error
