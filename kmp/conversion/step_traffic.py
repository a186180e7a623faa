"""Which share of the bytes of a training step is float32, and which classes of layers move them."""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from kmp.backend import keras_internals
from kmp.backend.graph_traffic import Traffic, traffic_of
from kmp.backend.keras_internals import is_passthrough, sublayers
from kmp.backend.state_rollback import state_restored
from kmp.backend.thread_overrides import own_method

_BATCH_SIZE = 32  # of a model that takes any
OUTSIDE = "operations outside layers"
_MOST_CLASSES = 5
_SCOPE = "kmp_layer_"
_NUMBER = re.compile(rf"(?:^|/){_SCOPE}(\d+)(?=$|[/_])")  # TensorFlow adds `_1` to one of a name


@dataclass(frozen=True)
class StepTraffic:
    """The float32 part of the bytes of a forward and backward pass in graph mode.

    Counted in TensorFlow's graph: each operation reads its inputs and writes its outputs once.

    Args:
        float32_share: The share of the bytes that is float32, from 0 to 1.
        by_class: The share of each class of layers, the largest first; their sum is
            `float32_share`.
        batch_size: The size of the batch that was assumed.
    """

    float32_share: float
    by_class: dict[str, float]
    batch_size: int

    def __str__(self) -> str:
        largest = list(self.by_class.items())[:_MOST_CLASSES]
        listed = ", ".join(f"{name} {share:.0%}" for name, share in largest if share >= 0.005)
        return (
            f"{self.float32_share:.0%} of the bytes of a forward and backward pass "
            f"(batch size {self.batch_size}) are float32{': ' if listed else ''}{listed}."
        )


def step_traffic(model: keras.Model) -> StepTraffic | None:
    """Returns the float32 part of the bytes that the forward and backward pass of a model move.

    Traces both in a graph that is not run, so no variable changes.

    Returns:
        `None` if the model is no graph of layers with inputs of known shapes, has nothing to train,
        or cannot be traced.
    """
    inputs = keras_internals.graph_tensors(model, "inputs")
    has_unknown_shape = any(None in tensor.shape[1:] for tensor in inputs)
    if not inputs or has_unknown_shape or not model.trainable_variables:
        return None
    batch_size = inputs[0].shape[0] or _BATCH_SIZE
    try:
        traffic = _traced(model, batch_size)
    except Exception:  # the code of layers may raise anything, and the audit is complete without
        return None
    if not traffic.bytes:
        return None
    shares = {
        name or OUTSIDE: cost.float32_bytes / traffic.bytes
        for name, cost in traffic.by_owner.items()
        if cost.float32_bytes
    }
    largest_first = sorted(shares.items(), key=lambda item: -item[1])
    return StepTraffic(traffic.float32_bytes / traffic.bytes, dict(largest_first), batch_size)


def _traced(model: keras.Model, batch_size: int) -> Traffic:
    # A Sequential model has no `input` before it was called.
    structure = model.inputs[0] if isinstance(model, keras.Sequential) else model.input

    def spec(tensor: keras.KerasTensor) -> tf.TensorSpec:
        return tf.TensorSpec((tensor.shape[0] or batch_size, *tensor.shape[1:]), tensor.dtype)

    def step(inputs: Any) -> Any:
        variables = [variable.value for variable in model.trainable_variables]
        with tf.GradientTape() as tape:
            outputs = keras.tree.flatten(model(inputs, training=True))
        outputs = [output for output in outputs if output.dtype.is_floating]
        # The gradients of the loss, which is not counted.
        upstream = [tf.compat.v1.placeholder(output.dtype, output.shape) for output in outputs]
        gradients = tape.gradient(outputs, variables, upstream)
        return outputs, [gradient for gradient in gradients if gradient is not None]

    with state_restored(model):
        return traffic_by_class(model, step, keras.tree.map_structure(spec, structure))


def traffic_by_class(
    model: keras.Model, function: Callable[..., Any], *specs: Any, on_replicas: bool = False
) -> Traffic:
    """Traces a function that calls a model, and returns what its operations cost.

    Args:
        model: The model.
        function: Such as its forward pass, or its training step. It is not run.
        specs: The specs of its arguments.
        on_replicas: Whether each replica of the model's strategy calls it. Its outputs then count
            as not needed.

    Returns:
        The cost, by the classes of the model's layers: `""` for what is in no layer.
    """
    scopes = _LayerScopes(model)

    def call(*args: Any) -> Any:
        with scopes.opened():  # in the thread of a replica
            return function(*args)

    def call_on_replicas(*args: Any) -> None:
        model.distribute_strategy.run(call, args=args)

    traced = call_on_replicas if on_replicas else call
    graph = tf.function(traced, autograph=False).get_concrete_function(*specs).graph
    return traffic_of(graph, scopes.class_of)


class _LayerScopes:
    """Gives the operations of each layer of a model a name scope with the number of the layer.

    Keras' own scopes have the names of layers, which TensorFlow numbers: `a_1` may be layer `a`.
    """

    def __init__(self, model: keras.Model) -> None:
        self._layers = list(sublayers(model))

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Opens the scope of each layer that is called in the context."""
        with contextlib.ExitStack() as stack:
            for number, layer in enumerate(self._layers):
                in_scope = functools.partial(_in_scope, f"{_SCOPE}{number}")
                stack.enter_context(own_method(layer, "call", in_scope))
            yield

    def class_of(self, name: str) -> str:
        """Returns the class of the innermost layer of an operation, given its name."""
        numbers = _NUMBER.findall(name.rpartition("/")[0])
        layer = self._layers[int(numbers[-1])] if numbers else None
        return "" if layer is None or is_passthrough(layer) else type(layer).__name__


def _in_scope(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def scoped_call(*args: Any, **kwargs: Any) -> Any:
        with tf.name_scope(name):
            return call(*args, **kwargs)

    return scoped_call
