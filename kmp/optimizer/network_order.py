"""The order of the variables of a network, from the input to the loss."""

from typing import Any

import tensorflow as tf

from kmp.gradients.tensor_groups import Gradients, values_of


def network_order(gradients: Gradients) -> list[int]:
    """Returns the indices of the gradients, ordered from the input to the loss.

    The nearer a variable is to the loss, the shorter is the longest path to its gradient through
    forward pass, loss and backward pass. A variable that is used more than once has the position of
    its use farthest from the loss. Gradients with paths of equal length, and gradients without a
    path (`None`, computed eagerly or outside this graph), keep the order of the list.
    """
    operations: list[tf.Operation | None] = []
    for gradient in gradients:
        values: Any = None if gradient is None else values_of(gradient)
        operations.append(values.op if tf.is_symbolic_tensor(values) else None)
    graph = next((op.graph for op in operations if op is not None), None)
    # The length of the longest path to each operation.
    longest: dict[tf.Operation | None, int] = {None: 0}
    # In the order of creation: each comes after its inputs.
    for operation in graph.get_operations() if graph else ():
        to_inputs = (longest.get(tensor.op, 0) for tensor in operation.inputs)
        longest[operation] = 1 + max(to_inputs, default=0)
    lengths = [longest.get(operation, 0) for operation in operations]
    return sorted(range(len(gradients)), key=lambda index: -lengths[index])
