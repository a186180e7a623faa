"""What the operations of a graph are: what they call, depend on, and cost."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import tensorflow as tf

from kmp.backend.private_names import attribute

# Grappler folds no larger constants.
# Source: `kMaxConstantSize` in TensorFlow's grappler/optimizers/constant_folding.cc.
_LARGEST_FOLDED = 100 * 1024  # bytes

BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
LOOPS = ("While", "StatelessWhile")
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_FUNCTION_ATTRIBUTES = ("f", "then_branch", "else_branch", "branches", "cond", "body")

PASS_BUFFERS = {
    "Bitcast",
    "EnsureShape",
    "ExpandDims",
    "Identity",
    "IdentityN",
    "PreventGradient",
    "Reshape",
    "Squeeze",
    "StopGradient",
}
READ_ONLY_SHAPES = {
    "BroadcastGradientArgs",
    "OnesLike",
    "Rank",
    "Shape",
    "ShapeN",
    "Size",
    "ZerosLike",
}
READ_WHAT_THEY_WRITE = {"GatherNd", "GatherV2", "ResourceGather", "Slice", "StridedSlice"}
UPDATE_VARIABLES = ("AssignAddVariableOp", "AssignSubVariableOp", "ResourceScatter")


@dataclass(frozen=True)
class Cost:
    """What operations cost: kernels, the bytes that these read and write, and those of float32."""

    kernels: int = 0
    bytes: int = 0
    float32_bytes: int = 0

    def plus(self, other: "Cost", times: int = 1) -> "Cost":
        """Returns the cost with that of another, which may run several times."""
        return Cost(
            self.kernels + times * other.kernels,
            self.bytes + times * other.bytes,
            self.float32_bytes + times * other.float32_bytes,
        )


NO_COST = Cost()


def needed(graph: tf.Graph) -> list[tf.Operation]:
    """Returns what an output or a stateful operation depends on, in the order of the graph."""
    operations = graph.get_operations()
    waiting = [tensor.op for tensor in graph.outputs]
    waiting += [op for op in operations if op.op_def.is_stateful]
    found = set()
    while waiting:
        op = waiting.pop()
        if op not in found:
            found.add(op)
            waiting += [tensor.op for tensor in op.inputs]
            waiting += op.control_inputs
    return [op for op in operations if op in found]


def folded(graph: tf.Graph) -> set[tf.Operation]:
    """Returns the operations with small results that depend on nothing but constants and shapes."""
    return computed_from(graph, lambda op: op.type == "Const" or op.type in READ_ONLY_SHAPES)


def on_host(graph: tf.Graph) -> set[tf.Operation]:
    """Returns the operations that compute with loop counters and the like, on the host."""
    known = computed_from(graph, is_on_host)
    return {op for op in known if all(output.dtype in (tf.int32, tf.bool) for output in op.outputs)}


def computed_from(graph: tf.Graph, is_source: Callable[[tf.Operation], bool]) -> set[tf.Operation]:
    """Returns the sources with small results, and what is computed from nothing else."""
    found: set[tf.Operation] = set()
    for op in graph.get_operations():  # each after its inputs
        is_computed = bool(op.inputs) and not op.op_def.is_stateful and not bodies_of(op)
        is_known = is_computed and all(tensor.op in found for tensor in op.inputs)
        is_small = sum(map(size_of, op.outputs)) <= _LARGEST_FOLDED
        if is_small and (is_known or is_source(op)):
            found.add(op)
    return found


def cost_of(kernels: int, tensors: Iterable[tf.Tensor]) -> Cost:
    """Returns the cost of kernels that read or write tensors, each once for each time."""
    sizes = [(size_of(tensor), tensor.dtype == tf.float32) for tensor in tensors]
    return Cost(
        kernels,
        sum(size for size, _ in sizes),
        sum(size for size, is_float32 in sizes if is_float32),
    )


def size_of(tensor: tf.Tensor) -> int:
    """Returns the bytes of a tensor; 0 if they are not known, and for handles."""
    is_handle = tensor.dtype in (tf.resource, tf.variant)
    return 0 if is_handle else elements_of(tensor) * tensor.dtype.size


def elements_of(tensor: tf.Tensor) -> int:
    """Returns the number of elements of a tensor; 0 if it is not known."""
    return tensor.shape.num_elements() or 0


def bodies_of(op: tf.Operation) -> list[tf.Graph]:
    """Returns the graphs of the functions that an operation calls.

    TensorFlow 2.21 has no public name for the graph of a function by its name.
    """
    if op.type not in (*BRANCHES, *LOOPS, *CALLS):
        return []
    attributes = op.node_def.attr
    values = [attributes[name] for name in _FUNCTION_ATTRIBUTES if name in attributes]
    names = [function.name for value in values for function in value.list.func or [value.func]]
    function_of = attribute(op.graph, "tensorflow:Graph._get_function", lambda name: None)
    functions = filter(None, map(function_of, names))
    return [function.graph for function in functions if function.graph is not None]


def iterations_of(loop: tf.Operation) -> int:
    """Returns the maximum number of iterations of a loop, its second input; 1 if not known."""
    maximum = tf.get_static_value(loop.inputs[1]) if len(loop.inputs) > 1 else None
    return int(maximum) if maximum is not None and maximum.ndim == 0 and maximum > 0 else 1


def is_on_host(op: tf.Operation) -> bool:
    """Whether the host has a value: a constant, a shape, or an int32 scalar."""
    if op.type == "Const" or op.type in READ_ONLY_SHAPES or "CPU" in op.device:
        return True
    is_given = op.type in ("Placeholder", "ReadVariableOp")
    return is_given and op.outputs[0].dtype == tf.int32 and op.outputs[0].shape.rank == 0
