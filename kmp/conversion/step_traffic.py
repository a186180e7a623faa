"""Which share of the bytes of a training step is float32, and which classes of layers move them."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from kmp.backend import keras_internals
from kmp.backend.graph_traffic import Traffic, traffic_of
from kmp.backend.keras_internals import direct_sublayers, is_passthrough
from kmp.backend.state_rollback import state_restored

_BATCH_SIZE = 32  # of a model that takes any
_OUTSIDE = "operations outside layers"
_MOST_CLASSES = 5
_CALL_NUMBER = re.compile(r"_\d+$")


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
        name or _OUTSIDE: cost.float32_bytes / traffic.bytes
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
        specs = keras.tree.map_structure(spec, structure)
        graph = tf.function(step, autograph=False).get_concrete_function(specs).graph
    return traffic_of(graph, _class_of_layer(model))


def _class_of_layer(model: keras.Model) -> Callable[[str], str]:
    """Returns a function from the name of an operation to the class of its innermost layer."""

    @functools.cache
    def children(layer: keras.Layer) -> dict[str, keras.Layer]:
        return {child.name: child for child in direct_sublayers(layer)}

    def class_of(name: str) -> str:
        layer = model
        for scope in name.split("/")[:-1]:
            # TensorFlow numbers scopes of one name. Keras opens two in each call, and runs the
            # layer in the second, which therefore always has a number.
            for layer_name in (_CALL_NUMBER.sub("", scope), scope):
                if layer_name in children(layer):
                    layer = children(layer)[layer_name]
                    break
        return "" if is_passthrough(layer) else type(layer).__name__

    return class_of
