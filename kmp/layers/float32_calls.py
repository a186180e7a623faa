"""What the call of a float32 layer creates computes in float32, as in a run in float32.

Code in `call` may create layers, such as `keras.layers.multiply([x, x])`, and models. Keras gives
them the global policy, which is one of 16 bits while kmp is enabled.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import keras

from kmp.backend.keras_internals import global_policy, is_passthrough
from kmp.utils.float_formats import DTYPES_16_BIT, FLOAT32

# The global policy outside of the float32 layers whose calls this thread is in.
_policy_outside: ContextVar[keras.DTypePolicy | None] = ContextVar("_policy_outside", default=None)


@contextlib.contextmanager
def creating_float32() -> Iterator[None]:
    """Makes float32 the global policy of this thread, if that computes in 16 bits."""
    policy = keras.config.dtype_policy()
    if policy.compute_dtype not in DTYPES_16_BIT:
        yield
        return
    outside = _policy_outside.set(policy)
    try:
        with global_policy(FLOAT32.name):
            yield
    finally:
        _policy_outside.reset(outside)


@contextlib.contextmanager
def _creating_16_bits(policy: keras.DTypePolicy) -> Iterator[None]:
    """Makes a policy the global one again, inside of the call of a float32 layer."""
    outside = _policy_outside.set(None)
    try:
        with global_policy(policy):
            yield
    finally:
        _policy_outside.reset(outside)


def layer_call_patch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patches the call of layers: the global policy is float32 inside of one that is float32."""

    @functools.wraps(original)
    def __call__(self: keras.Layer, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        dtype, outside = self.compute_dtype, _policy_outside.get()
        if dtype == FLOAT32.name and outside is None and not is_passthrough(self):
            context = creating_float32()
        elif outside is not None and dtype in DTYPES_16_BIT and not is_passthrough(self):
            context = _creating_16_bits(outside)
        else:
            return original(self, *args, **kwargs)
        with context:
            return original(self, *args, **kwargs)

    return __call__
