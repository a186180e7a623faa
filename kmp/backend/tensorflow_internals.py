"""TensorFlow's private functions that kmp uses, each with the reason why the public API is not enough."""

from typing import Any

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


def operations_of_called_functions(operation: tf.Operation) -> list[tf.Operation]:
    """Returns the operations of the functions that an operation calls, such as a `tf.function` in another one.

    No public function returns the graph of a function by its name.
    """
    names = [value.func.name for value in operation.node_def.attr.values() if value.WhichOneof("value") == "func"]
    graphs = [operation.graph._get_function(name).graph for name in names]
    return [inner for graph in graphs for inner in graph.get_operations()]
