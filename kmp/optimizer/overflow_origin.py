"""Where an overflow originated: the flagged variable nearest to the loss, in the order of the step's graph."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras import ops

from kmp.gradients import tensor_statistics


def nearest_to_loss(flags: Any, order: Sequence[int]) -> Any:
    """Returns the flags with all but one cleared, the one to blame: an overflow spreads to every variable before it."""
    ranks = np.zeros(len(order), np.int64)
    ranks[list(order)] = np.arange(1, len(order) + 1)
    ranked = flags * ranks
    return flags * ops.cast(ops.equal(ranked, ops.max(ranked)), "int64")


def network_order(gradients: Sequence[Any]) -> list[int]:
    """Returns the places of the gradients in the order of their variables, from the input to the loss.

    The nearer a variable is to the loss, the shorter is the longest path that leads to its gradient through forward
    pass, loss and backward pass. A variable that is used twice is where its use farthest from the loss is.

    Args:
        gradients: Tensors, `tf.IndexedSlices` or `None`. Where paths are equally long, or there are none, because the
            gradients were made eagerly or outside this graph, the order is that of the list.
    """
    lengths = [0] * len(gradients)
    found = {i: tensor_statistics.values_of(gradient) for i, gradient in enumerate(gradients) if gradient is not None}
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
