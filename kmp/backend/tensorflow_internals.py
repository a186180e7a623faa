"""TensorFlow's private functions that kmp uses, each with the reason why the public API is not enough."""

from typing import Any, NamedTuple

import tensorflow as tf


def is_deterministic() -> bool:
    """Whether `tf.config.experimental.enable_op_determinism` was called. No public function returns it."""
    from tensorflow.python.framework import config

    return config.is_op_determinism_enabled()


def memory_limit_of_gpu() -> int:
    """Returns the number of bytes that TensorFlow may use on the first GPU. No public function returns it."""
    from tensorflow.python.client import device_lib

    return next(device.memory_limit for device in device_lib.list_local_devices() if device.device_type == "GPU")


def is_onednn_enabled() -> bool:
    """Whether TensorFlow computes with oneDNN on the CPU. No public function returns it."""
    from tensorflow.python.util import _pywrap_util_port

    return bool(_pywrap_util_port.IsMklEnabled())


def captured_tensors(graph: tf.Graph) -> dict[int, Any]:
    """Returns the outer tensors that the graph of a function captured, by the `id` of its own tensor for each.

    `captures` is an attribute of `FuncGraph`, which has no public name.
    """
    return {id(inner): outer for outer, inner in getattr(graph, "captures", ())}


class CalledFunction(NamedTuple):
    """A function that an operation of a graph calls.

    Attributes:
        parameters: The function's own tensors for its arguments.
        arguments: For each of them, the tensors whose values it gets.
        outputs: The function's own tensors for the outputs of the operation.
    """

    parameters: list[tf.Tensor]
    arguments: list[list[tf.Tensor]]
    outputs: list[tf.Tensor]


def called_functions(operation: tf.Operation) -> list[CalledFunction] | None:
    """Returns the functions whose results an operation returns; `None` if they are not known, [] if there are none.

    No public function returns the graph of a function by its name.
    """
    attributes = [] if operation.type == "Const" else operation.node_def.attr.items()  # a constant may be large
    names = [(key, name) for key, value in attributes for name in _function_names(value)]
    is_loop = operation.type in ("While", "StatelessWhile")
    if not names:
        return []
    if not is_loop and operation.type not in _CALLS | _BRANCHES:
        return None
    functions = [operation.graph._get_function(name) for key, name in names if not (is_loop and key == "cond")]
    graphs: list[Any] = [getattr(function, "graph", None) for function in functions]
    if None in graphs:
        return None
    inputs = [[tensor] for tensor in operation.inputs[operation.type in _BRANCHES :]]
    if is_loop:  # a loop without iterations returns its arguments
        passed = CalledFunction([], [], list(operation.inputs))
        looped = [[*values, output] for values, output in zip(inputs, graphs[0].outputs, strict=True)]
        return [passed, CalledFunction(graphs[0].inputs, looped, graphs[0].outputs)]
    return [CalledFunction(graph.inputs, inputs, graph.outputs) for graph in graphs]


_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
_BRANCHES = {"If", "StatelessIf", "Case", "StatelessCase"}  # the first input selects the branch


def _function_names(value: Any) -> list[str]:
    kind = value.WhichOneof("value")
    return [value.func.name] if kind == "func" else [function.name for function in value.list.func]


def shapes_held_by(tensor: Any) -> list[tf.TensorShape]:
    """Returns the shape of a float tensor, or those of the floats that a resource holds; none for other tensors.

    No public attribute of a handle has the shape of its variable.
    """
    if tensor.dtype.is_floating:
        return [tensor.shape]
    held = getattr(tensor, "_handle_data", None) if tensor.dtype == tf.resource else None
    pairs = held.shape_and_type if held else ()
    return [tf.TensorShape(pair.shape) for pair in pairs if tf.as_dtype(pair.dtype).is_floating]
