"""A traced step in compiled parts: before, between and after its updates.

A `train_step` may use what an update writes: it logs the loss scale, averages weights, or trains
the generator of a GAN with the discriminator of this step. These operations are a part of their
own, which runs after the update.
"""

from collections.abc import Sequence
from graphlib import TopologicalSorter
from typing import Any

import tensorflow as tf

from kmp.backend.graph_formats import with_operations
from kmp.optimizer.deferred_updates import DeferredUpdate


def parts_of(graph: Any, updates: Sequence[DeferredUpdate]) -> dict[str, int]:
    """Returns the number of the part of each operation: how many updates it has to follow.

    An operation follows an update if it uses what the update writes and was added after the call of
    `apply`, or if it writes what the update only reads, as the learning rate; and if it needs the
    result of one that does, or comes after it because both use a variable.
    """
    written = [{id(each.value.handle) for each in update.written} for update in updates]
    read = [{id(each.value.handle) for each in update.read} for update in updates]
    outer_of = {inner.name: id(outer) for outer, inner in graph.captures}
    operations = {op.name: op for op in graph.get_operations()}
    positions = {name: position for position, name in enumerate(operations)}
    before = {name: {each.op.name for each in op.inputs} for name, op in operations.items()}
    # TensorFlow returns a result after all that writes.
    for name in operations.keys() - {tensor.op.name for tensor in graph.outputs}:
        before[name] |= {each.name for each in operations[name].control_inputs}
    parts: dict[str, int] = {}
    for name in TopologicalSorter(before).static_order():
        operation = operations[name]
        part = max((parts[each] for each in before[name]), default=0)
        handles = {outer_of.get(tensor.name) for tensor in operation.inputs}
        for index, update in enumerate(updates):
            is_read = operation.type == "ReadVariableOp"
            used = written[index] if is_read else written[index] | read[index]
            if positions[name] >= update.position and handles & used:
                part = max(part, index + 1)
        parts[name] = part
    return parts


def run_parts(
    function: Any, data: Any, updates: Sequence[DeferredUpdate], parts: dict[str, int]
) -> Any:
    """Runs each part of a step, then the update that follows it, and returns the logs of the step.

    Args:
        function: The concrete function of the step. It returns the logs, and the gradients of each
            update.
        data: Its argument.
        updates: The updates.
        parts: The part of each operation; those that are in none are left out.
    """
    graph = function.graph
    given = filter(tf.is_tensor, tf.nest.flatten(data, expand_composites=True))
    names = [tensor.name for tensor in graph.inputs]
    values = dict(zip(names, [*given, *function.captured_inputs], strict=True))
    definition = graph.as_graph_def()

    def computed(structure: Any) -> Any:
        return tf.nest.map_structure(
            lambda tensor: None if tensor is None else values[tensor.name],
            structure,
            expand_composites=True,
        )

    logs, gradients = graph.structured_outputs
    for part in range(len(updates) + 1):
        operations = [op for op in graph.get_operations() if parts.get(op.name) == part]
        if operations:
            values |= _run_part(operations, definition, values)
        if part < len(updates):
            updates[part].take(computed(gradients[part]))
    return computed(logs)


def _run_part(
    operations: Sequence[tf.Operation],
    definition: tf.compat.v1.GraphDef,
    values: dict[str, Any],
) -> dict[str, Any]:
    """Runs the operations of a part, compiled, and returns what is used outside of it, by name.

    Args:
        operations: Those of the part.
        definition: That of the graph of the step.
        values: The inputs of the graph, and what the parts before have computed.
    """
    own = {op.name for op in operations if op.type != "Placeholder"}
    inputs = {each.name: each for op in operations for each in op.inputs}
    inputs = {name: each for name, each in inputs.items() if each.op.name not in own}
    # XLA needs shapes and axes as constants: each part has those that it uses.
    constants = {each.op.name for each in inputs.values() if each.op.type == "Const"}
    given = [name for name, each in inputs.items() if each.op.type != "Const"]
    outputs = [tensor for op in operations if op.name in own for tensor in op.outputs]
    made = [tensor.name for tensor in outputs if _is_used_outside(tensor, own)]
    nodes = with_operations(definition, own | constants)

    @tf.function(jit_compile=True, autograph=False)
    def part(tensors: dict[str, tf.Tensor]) -> list[tf.Tensor]:
        # Handles of variables are captured, which keeps what is known of their shapes.
        capture = tf.compat.v1.get_default_graph().capture
        sources = {name: capture(values[name]) for name in given if name not in tensors}
        return tf.graph_util.import_graph_def(nodes, {**sources, **tensors}, made, name="")

    tensors = {name: values[name] for name in given if values[name].dtype != tf.resource}
    return dict(zip(made, part(tensors), strict=True))


def _is_used_outside(tensor: tf.Tensor, own: set[str]) -> bool:
    """Whether an operation that is none of these uses a tensor, or the graph returns it."""
    is_returned = any(tensor is each for each in tensor.graph.outputs)
    return is_returned or any(op.name not in own for op in tensor.consumers())
