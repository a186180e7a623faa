"""The order of a model's variables from its input to its loss, as the graph of the step has it."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kmp import statistics


def network_order(gradients: Sequence[Any]) -> list[int]:
    """Returns the places of the gradients in the order of their variables, from the input to the loss.

    The nearer a variable is to the loss, the shorter is the longest path that leads to its gradient through forward
    pass, loss and backward pass. A variable that is used twice is where its use farthest from the loss is.

    Args:
        gradients: Tensors, `tf.IndexedSlices` or `None`. Where paths are equally long, or there are none, because the
            gradients were made eagerly or outside this graph, the order is that of the list.
    """
    lengths = [0] * len(gradients)
    found = {i: statistics.values_of(gradient) for i, gradient in enumerate(gradients) if gradient is not None}
    symbolic = {i: tensor for i, tensor in found.items() if tf.is_symbolic_tensor(tensor)}
    if symbolic:
        paths = _longest_paths(next(iter(symbolic.values())).graph)
        for i, tensor in symbolic.items():
            lengths[i] = paths.get(tensor.op, 0)
    return sorted(range(len(gradients)), key=lambda i: (-lengths[i], i))


def _longest_paths(graph: tf.Graph) -> dict[tf.Operation, int]:
    lengths: dict[tf.Operation, int] = {}
    for op in graph.get_operations():  # in the order they were made, so after their inputs
        lengths[op] = 1 + max((lengths.get(tensor.op, 0) for tensor in op.inputs), default=0)
    return lengths
