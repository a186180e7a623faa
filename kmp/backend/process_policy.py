"""A global dtype policy for all threads, which `keras.backend.clear_session` does not reset.

Keras stores its global policy by thread, and `clear_session` deletes it: layers are float32 again. The replacements
here read and write it elsewhere while a policy is in force for the process. No public API of Keras reaches that state.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, Protocol

import keras

from kmp.backend.monkeypatch import Replacement

_POLICY = "dtype_policy"  # the name of the attribute in Keras' state


class ProcessPolicy(Protocol):
    """A policy in force for the process.

    Attributes:
        dtype_policy: The policy of threads that have not set another.
        state_name: The name under which Keras' state of a thread stores a policy that is set there in the meantime.
    """

    dtype_policy: keras.DTypePolicy
    state_name: str


def replace_policy_state(current: Callable[[], ProcessPolicy | None]) -> list[Replacement]:
    """Makes `current()` the global policy while it is not `None`, except in threads that set another policy later.

    Returns:
        The replacements, to remove them. Each thread then has the policy from before.

    Raises:
        RuntimeError: If this version of Keras stores the policy in another way.
    """

    def reading(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def get_global_attribute(name: str, *args: Any, **kwargs: Any) -> Any:
            policy = current() if name == _POLICY else None
            if policy is None:
                return original(name, *args, **kwargs)
            return original(policy.state_name) or policy.dtype_policy

        return get_global_attribute

    def writing(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def set_global_attribute(name: str, value: Any) -> None:
            policy = current() if name == _POLICY else None
            original(name if policy is None else policy.state_name, value)

        return set_global_attribute

    try:
        state = importlib.import_module("keras.src.backend.common.global_state")
        replacements = [
            Replacement(state, "get_global_attribute", reading),
            Replacement(state, "set_global_attribute", writing),
        ]
    except (ImportError, KeyError) as error:
        raise RuntimeError(f"This version of kmp does not support Keras {keras.__version__}: update kmp.") from error
    return replacements
