"""What kmp does around each call of a layer.

What the call of a float32 layer creates computes in float32, as in a run in float32: code in `call`
may create layers, such as `keras.layers.multiply([x, x])`, and models, which get Keras' global
policy. The call of a layer that was created under `enable` promotes operands after `disable` too. A
training step also records which layers beside its model it calls, such as a network in the loss.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import keras

from kmp.backend.inventory import Reason
from kmp.backend.keras_internals import (
    defining_class,
    global_policy,
    is_keras_class,
    is_passthrough,
)
from kmp.backend.marked_policy import is_marked
from kmp.backend.patching import patches
from kmp.backend.promotion import promoting
from kmp.backend.step_graph import recorded_graph
from kmp.utils.context_values import context_value
from kmp.utils.float_formats import DTYPES_16_BIT, FLOAT32

# The global policy outside of the float32 layers whose calls this thread is in.
_policy_outside: ContextVar[keras.DTypePolicy | None] = ContextVar("_policy_outside", default=None)
# The layers that this thread calls are added to it, but not those that a layer calls.
_outermost: ContextVar[dict[int, keras.Layer] | None] = ContextVar("_outermost", default=None)


@contextlib.contextmanager
def creating_float32() -> Iterator[None]:
    """Makes float32 the global policy of this thread, if that computes in 16 bits."""
    policy = keras.config.dtype_policy()
    if policy.compute_dtype not in DTYPES_16_BIT:
        yield
        return
    with context_value(_policy_outside, policy), global_policy(FLOAT32.name):
        yield


@contextlib.contextmanager
def outermost_calls() -> Iterator[dict[int, keras.Layer]]:
    """Yields the layers that this thread calls in the context, by `id`, not those in a layer."""
    called: dict[int, keras.Layer] = {}
    with context_value(_outermost, called):
        yield called


def layer_call_patch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patches the call of layers."""

    @functools.wraps(original)
    def __call__(self: keras.Layer, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        contexts, step = list(_contexts_of(self)), recorded_graph()
        if not contexts and not step:
            return original(self, *args, **kwargs)
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            begin = step.graph.version if step else 0
            outputs = original(self, *args, **kwargs)
            if step:
                step.add_call(self, begin, outputs)
            return outputs

    return __call__


def build_in_own_dtype(layer: keras.Layer) -> None:
    """Makes `build` of a layer create float32 where the layer is float32, whoever calls it.

    Only a `build` of the user's own is replaced, and on this layer only, as Keras does.
    """
    if is_keras_class(defining_class(type(layer), "build")):
        return
    build = layer.build

    @functools.wraps(build)
    def own_build(*args: Any, **kwargs: Any) -> Any:
        is_float32 = layer.compute_dtype == FLOAT32.name
        with creating_float32() if is_float32 else contextlib.nullcontext():
            return build(*args, **kwargs)

    vars(layer)["build"] = own_build  # not tracked by Keras' `__setattr__`


def _contexts_of(layer: keras.Layer) -> Iterator[contextlib.AbstractContextManager[Any]]:
    """Yields what the call of a layer needs around it."""
    called = _outermost.get()
    if called is not None:
        called[id(layer)] = layer
        yield context_value(_outermost, None)
    if not patches.is_held(Reason.ENABLED) and is_marked(layer):
        yield promoting()
    dtype, outside = layer.compute_dtype, _policy_outside.get()
    if outside is None:
        is_16_bit = keras.config.dtype_policy().compute_dtype in DTYPES_16_BIT
        if dtype == FLOAT32.name and is_16_bit and not is_passthrough(layer):
            yield creating_float32()
    elif dtype in DTYPES_16_BIT and not is_passthrough(layer):
        yield context_value(_policy_outside, None)
        yield global_policy(outside)
