"""`tf.custom_gradient` for graphs that are freed.

TensorFlow 2.21 registers the gradient of each call in a graph for the whole process. The gradient
holds tensors, and these hold the graph: that of a training step is never freed. See
https://github.com/tensorflow/tensorflow/issues/97697.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kmp.backend.private_names import find

_OWNED = "_gradients_of_kmp"  # the attribute of a graph


def custom_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what `tf.custom_gradient` does, with gradients that live as long as their graph.

    Args:
        function: Returns one or more tensors, and a function of their gradients. That function
            finds tensors for second derivatives among the arguments of `function` only: others may
            be of a graph around the one that is traced.
    """
    differentiable = tf.custom_gradient(function)

    @functools.wraps(function)
    def call(*tensors: tf.Tensor) -> Any:
        # TensorFlow would not capture the arguments that are tensors of a graph around this one.
        if not tf.executing_eagerly():
            graph = tf.compat.v1.get_default_graph()
            is_own = [getattr(each, "graph", graph) is graph for each in tensors]
            pairs = zip(tensors, is_own, strict=True)
            tensors = tuple(each if own else tf.identity(each) for each, own in pairs)
        outputs = differentiable(*tensors)
        first = tf.nest.flatten(outputs)[0]
        if tf.is_symbolic_tensor(first):
            _let_graph_own_gradient(first.op)
        return outputs

    return call


def _let_graph_own_gradient(operation: tf.Operation) -> None:
    """Replaces the gradient in TensorFlow's registry by a reference to it, which the graph owns."""
    entries = find("tensorflow.python.framework.ops:gradient_registry._registry")
    name = operation.node_def.attr["_gradient_op_type"].s.decode()
    if entries is None or name not in entries:
        return
    gradient, graph = entries[name]["type"], operation.graph
    reference = weakref.ref(gradient)

    def gradient_of_graph(*args: Any) -> Any:
        found = reference()
        if found is None:
            raise LookupError(f"The graph with the gradient {name} has been freed.")
        return found(*args)

    entries[name]["type"] = gradient_of_graph
    if not hasattr(graph, _OWNED):
        setattr(graph, _OWNED, [])
    getattr(graph, _OWNED).append(gradient)
    weakref.finalize(graph, entries.pop, name, None)
