"""Finds where an overflow originated: at the flagged variable that is nearest to the loss in the step's graph."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras import ops

from kmp.gradients import values_of


def origin_flags(flags: Any, order: Sequence[int], loss_was_finite: Any) -> Any:
    """Returns the flags with only the overflow origin set; none is set after a non-finite loss, which flags all.

    The backward pass spreads an overflow to every variable before its origin, so the origin is the flagged variable
    nearest to the loss.

    Args:
        flags: Bool tensor of shape `(variables,)`, whether each variable's gradient is non-finite.
        order: The indices of the variables, from the input to the loss.
        loss_was_finite: Scalar bool.

    Returns:
        int64 tensor of shape `(variables,)`: 1 for the origin, else 0.
    """
    flags = ops.cast(ops.logical_and(flags, loss_was_finite), "int64")
    ranks = np.zeros(len(order), np.int64)
    ranks[list(order)] = np.arange(1, len(order) + 1)
    flagged_ranks = flags * ranks
    return flags * ops.cast(ops.equal(flagged_ranks, ops.max(flagged_ranks)), "int64")


def network_order(gradients: Sequence[Any]) -> list[int]:
    """Returns the indices of the gradients in the order of their variables, from the input to the loss.

    The nearer a variable is to the loss, the shorter is the longest path to its gradient through forward pass, loss and
    backward pass. A variable that is used more than once has the position of its use farthest from the loss.

    Args:
        gradients: Tensors, `tf.IndexedSlices` or `None`. Gradients with paths of equal length, and gradients without a
            path (computed eagerly or outside this graph), keep the order of the list.
    """
    lengths = [0] * len(gradients)
    values = {i: values_of(gradient) for i, gradient in enumerate(gradients) if gradient is not None}
    symbolic = {i: tensor for i, tensor in values.items() if tf.is_symbolic_tensor(tensor)}
    if symbolic:
        length_of = _longest_paths(next(iter(symbolic.values())).graph)
        for i, tensor in symbolic.items():
            lengths[i] = length_of.get(tensor.op, 0)
    return sorted(range(len(gradients)), key=lambda i: (-lengths[i], i))


def _longest_paths(graph: tf.Graph) -> dict[tf.Operation, int]:
    """Returns the length of the longest path to each operation."""
    lengths: dict[tf.Operation, int] = {}
    for op in graph.get_operations():  # in the order of creation, so every operation comes after its inputs
        lengths[op] = 1 + max((lengths.get(tensor.op, 0) for tensor in op.inputs), default=0)
    return lengths
