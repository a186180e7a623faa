"""Traces what a layer or operation of a float32 model would do in 16 bits, in a graph of its own.

The layers keep their policies: this thread reads another one while it traces.
"""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmp.backend.attributes import attributes_restored
from kmp.backend.inventory import Reason
from kmp.backend.keras_internals import defining_class, global_policy, sublayers
from kmp.backend.patching import patches
from kmp.backend.step_graph import StepGraph, recording
from kmp.backend.thread_overrides import Method, own_method
from kmp.utils import user_messages
from kmp.utils.context_values import context_value

PolicyOf = Callable[[keras.Layer], keras.DTypePolicy]

_policy_of: ContextVar[PolicyOf | None] = ContextVar("_policy_of", default=None)


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """What a layer or operation does, as TensorFlow's operations.

    Attributes:
        step: The graph, with the calls of layers and the exact values of constants.
        operation: The `id` of the layer or operation.
        inputs: Its placeholders, in the order of the arguments.
        outputs: The tensors that it returns.
    """

    step: StepGraph
    operation: int
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]


class _PolicyByThread:
    """Keras' attribute `_dtype_policy`, which a thread may read as another one."""

    def __get__(self, layer: keras.Layer | None, owner: type) -> Any:
        if layer is None:
            return self
        try:
            own = vars(layer)["_dtype_policy"]
        except KeyError:
            raise AttributeError("_dtype_policy") from None
        policy_of = _policy_of.get()
        if policy_of is None:
            return own
        with context_value(_policy_of, None):
            return policy_of(layer)

    def __set__(self, layer: keras.Layer, value: Any) -> None:
        vars(layer)["_dtype_policy"] = value

    def __delete__(self, layer: keras.Layer) -> None:
        del vars(layer)["_dtype_policy"]


def policy_attribute_patch(original: None) -> _PolicyByThread:
    """Patches the attribute that has the policy of a layer."""
    return _PolicyByThread()


@contextlib.contextmanager
def reading_policies(policy_of: PolicyOf, default: str) -> Iterator[None]:
    """Makes this thread read other policies of layers, also of those that are created meanwhile.

    Args:
        policy_of: Returns the policy of a layer.
        default: The global policy.
    """
    with (
        _random_state_restored(),
        patches.holding(Reason.REPLAY),
        context_value(user_messages.is_quiet, True),
        global_policy(default),
        context_value(_policy_of, policy_of),
    ):
        yield


@contextlib.contextmanager
def _random_state_restored() -> Iterator[None]:
    """Restores Python's random state, from which layers that code creates draw their seeds."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def traced(
    operation: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dtype: str,
    is_known: Callable[[keras.Layer], bool],
) -> LayerTrace:
    """Traces a call, within `reading_policies`. Nothing runs, and no state changes.

    Args:
        operation: The layer, or the function.
        args: Its arguments. A `KerasTensor` stands for any tensor of its shape.
        kwargs: Its keyword arguments.
        dtype: The dtype of float tensors among them.
        is_known: Whether only the shapes and dtypes that a layer in it returns are of interest. Its
            code is then not traced.
    """
    inputs: list[tf.Tensor] = []

    def tensor_for(value: Any) -> Any:
        if not isinstance(value, keras.KerasTensor):
            return value
        is_float = keras.backend.is_float_dtype(value.dtype)
        inputs.append(_placeholder(value, dtype if is_float else value.dtype))
        return inputs[-1]

    graph = tf.__internal__.FuncGraph("kmp_scratch_graph")
    layers = list(sublayers(operation)) if isinstance(operation, keras.Layer) else []
    unbuilt = [each.name for each in layers if not each.built and _creates_weights(each)]
    if unbuilt:
        raise ValueError(f"{unbuilt[0]!r} is not built, and a trace would create its weights.")
    with (
        attributes_restored(layers),
        contextlib.ExitStack() as calls_replaced,
        keras.StatelessScope(),
        graph.as_default(),
        np.errstate(over="ignore"),  # of a constant that the format does not have
    ):
        for layer in layers:
            if layer is not operation and is_known(layer):
                replace = functools.partial(_returning_placeholders, layer)
                calls_replaced.enter_context(own_method(layer, "call", replace))
        args, kwargs = keras.tree.map_structure(tensor_for, (tuple(args), dict(kwargs)))
        with recording(inputs) as step:
            assert step is not None
            outputs = keras.tree.flatten(operation(*args, **kwargs))
    return LayerTrace(step, id(operation), inputs, [each for each in outputs if step.has(each)])


def _placeholder(tensor: keras.KerasTensor, dtype: str) -> tf.Tensor:
    return tf.compat.v1.placeholder(dtype, tensor.shape)


def _returning_placeholders(layer: keras.Layer, call: Method) -> Method:
    """Returns a `call` of a layer that adds placeholders to this graph for what it returns."""
    graph = tf.compat.v1.get_default_graph()

    def call_for_shapes(*args: Any, **kwargs: Any) -> Any:
        # Calls in functions, such as the body of a loop, are not recorded in the trace.
        if tf.compat.v1.get_default_graph() is not graph:
            return call(*args, **kwargs)
        try:
            returned = layer.compute_output_spec(*args, **kwargs)
            return keras.tree.map_structure(lambda each: _placeholder(each, each.dtype), returned)
        except Exception:  # such as for a tensor of unknown rank
            return call(*args, **kwargs)

    return call_for_shapes


def _creates_weights(layer: keras.Layer) -> bool:
    """Whether a layer may create weights when it is called for the first time."""
    return defining_class(type(layer), "build") is not keras.Layer
