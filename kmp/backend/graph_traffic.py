"""How many kernels a GPU runs for a graph, and how many bytes they move, counted without a GPU.

An operation counts as one kernel that reads its inputs and writes its outputs once, as TensorFlow
runs it on a GPU in graph mode. These count as none:

- operations that only pass a buffer on (`Identity`, `Reshape`, `ReadVariableOp`,
  `AssignVariableOp`), or that run on the host (`Shape`, and what computes with int32 scalars, such
  as loop counters);
- operations that reach neither an output nor a stateful operation, which TensorFlow prunes;
- small results of constants and of shapes, which Grappler, TensorFlow's graph optimizer, computes
  before the first step.

Calls, branches and loops are followed. A step takes one side of a branch; the larger one is
counted. A loop counts its maximum number of iterations if that is a constant, else one. A tensor
whose shape is not fully known counts 0 bytes.

A function that XLA compiles is not followed, because XLA fuses its operations. It counts, as an
estimate: its tensors, one read of each variable that it reads, and one write of each that it
writes; one kernel for each large variable that it writes, one for all smaller ones, and one
reduction for each large tensor that it takes, such as a gradient. Large is more than `LARGE`
elements.

The numbers are an upper bound: Grappler fuses a few operations, and cuDNN some transpositions.
Compare them with each other.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from kmp.backend.private_names import attribute

LARGE = 2**14  # elements

# Grappler folds no larger constants.
# Source: `kMaxConstantSize` in TensorFlow's grappler/optimizers/constant_folding.cc.
_LARGEST_FOLDED = 100 * 1024  # bytes

_BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
_LOOPS = ("While", "StatelessWhile")
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_FUNCTION_ATTRIBUTES = ("f", "then_branch", "else_branch", "branches", "cond", "body")

_PASS_BUFFERS = {
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
_HOLD_BUFFERS = {
    "AssignVariableOp",
    "EmptyTensorList",
    "Placeholder",
    "ReadVariableOp",
    "TensorListElementShape",
    "TensorListFromTensor",
    "TensorListGetItem",
    "TensorListLength",
    "TensorListPopBack",
    "TensorListPushBack",
    "TensorListReserve",
    "TensorListSetItem",
    "VarHandleOp",
    "VariableShape",
}
_FREE = _PASS_BUFFERS | _HOLD_BUFFERS | {"Assert", "Const", "NoOp"}
_READ_ONLY_SHAPES = {
    "BroadcastGradientArgs",
    "OnesLike",
    "Rank",
    "Shape",
    "ShapeN",
    "Size",
    "ZerosLike",
}
_READ_WHAT_THEY_WRITE = {"GatherNd", "GatherV2", "ResourceGather", "Slice", "StridedSlice"}
_UPDATE_VARIABLES = ("AssignAddVariableOp", "AssignSubVariableOp", "ResourceScatter")


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


@dataclass(frozen=True)
class Traffic:
    """What the operations of a graph cost in one call.

    Args:
        kernels: Number of kernels, those of compiled functions included.
        bytes: Bytes that they read and write.
        float32_bytes: Those of float32 tensors.
        kept_bytes: Bytes of tensors of the forward pass that the backward pass reads, without
            variables and arguments.
        host_decisions: Branches and loops outside of compiled functions whose predicate is computed
            on the device, so that the host waits for it.
        compiled_calls: Calls of functions that XLA compiles.
        compiled_kernels: Their part of `kernels`, an estimate.
        compiled_bytes: Their part of `bytes`, an estimate.
        by_type: The cost of each type of operation, the largest first.
        by_owner: The cost of each owner of operations, the largest first; empty if `traffic_of` got
            no `owner`.
    """

    kernels: int
    bytes: int
    float32_bytes: int
    kept_bytes: int
    host_decisions: int
    compiled_calls: int
    compiled_kernels: int
    compiled_bytes: int
    by_type: Mapping[str, Cost]
    by_owner: Mapping[str, Cost]


def traffic_of(graph: tf.Graph, owner: Callable[[str], str] | None = None) -> Traffic:
    """Returns what the operations of a graph cost in one call.

    Args:
        graph: The graph of a function, such as `function.get_concrete_function(...).graph`.
        owner: Returns the owner of an operation, from its name, or `""`. The name of an operation
            in a called function starts with that of the call.
    """
    tally = _tally(graph, "", owner or (lambda name: ""))
    total, by_type, by_owner = Cost(), dict[str, Cost](), dict[str, Cost]()
    for (kind, label), cost in tally.costs.items():
        total = total.plus(cost)
        by_type[kind] = by_type.get(kind, Cost()).plus(cost)
        by_owner[label] = by_owner.get(label, Cost()).plus(cost)
    return Traffic(
        kernels=total.kernels,
        bytes=total.bytes,
        float32_bytes=total.float32_bytes,
        kept_bytes=_kept_bytes(graph),
        host_decisions=tally.host_decisions,
        compiled_calls=tally.compiled_calls,
        compiled_kernels=tally.compiled.kernels,
        compiled_bytes=tally.compiled.bytes,
        by_type=_largest_first(by_type),
        by_owner=_largest_first(by_owner) if owner else {},
    )


def _largest_first(costs: Mapping[str, Cost]) -> dict[str, Cost]:
    return dict(sorted(costs.items(), key=lambda item: (-item[1].bytes, item[0])))


@dataclass
class _Tally:
    """What was counted so far: costs by type and owner of the operations."""

    costs: dict[tuple[str, str], Cost] = field(default_factory=dict)
    host_decisions: int = 0
    compiled_calls: int = 0
    compiled: Cost = Cost()

    def count(self, kind: str, owner: str, cost: Cost, times: int = 1) -> None:
        self.costs[kind, owner] = self.costs.get((kind, owner), Cost()).plus(cost, times)

    def add(self, other: "_Tally", times: int = 1) -> None:
        for (kind, owner), cost in other.costs.items():
            self.count(kind, owner, cost, times)
        self.host_decisions += times * other.host_decisions
        self.compiled_calls += times * other.compiled_calls
        self.compiled = self.compiled.plus(other.compiled, times)

    @property
    def size(self) -> tuple[int, int]:
        """Kernels and bytes, to compare the sides of a branch."""
        costs = self.costs.values()
        return sum(cost.kernels for cost in costs), sum(cost.bytes for cost in costs)


def _tally(graph: tf.Graph, prefix: str, owner: Callable[[str], str]) -> _Tally:
    tally, not_run = _Tally(), _folded(graph) | _on_host(graph)
    for op in _needed(graph):
        name = prefix + op.name
        bodies = _bodies(op)
        if bodies and _is_compiled(op):
            cost = _compiled_cost(op, bodies[0])
            tally.count(op.type, owner(name), cost)
            tally.compiled_calls += 1
            tally.compiled = tally.compiled.plus(cost)
        elif bodies:
            # The names in a branch or loop are complete.
            inner_prefix = f"{name}/" if op.type in _CALLS else prefix
            _add_parts(tally, op, [_tally(body, inner_prefix, owner) for body in bodies])
            tally.host_decisions += _waits_for_device(op, bodies)
        elif op not in not_run and not _is_free(op):
            served = _served(op)
            label = owner(name) or (owner(prefix + served.name) if served else "")
            tally.count(op.type, label, _cost(1, _moved(op)))
    return tally


def _add_parts(tally: _Tally, op: tf.Operation, parts: list[_Tally]) -> None:
    """Adds what the graphs of an operation cost: all of a loop, or the larger side of a branch."""
    if op.type not in _LOOPS:
        tally.add(max(parts, key=lambda part: part.size))
        return
    for part in parts:
        tally.add(part, _iterations(op))


def _served(op: tf.Operation) -> tf.Operation | None:
    """Returns another operation with the same owner, for one that may be in no scope.

    Keras casts the arguments of a layer before it opens the scope, and a tape adds gradients in
    none.
    """
    if op.type == "AddN" or (op.type == "Cast" and _is_gradient(op)):
        return op.inputs[0].op
    consumers = op.outputs[0].consumers() if op.type == "Cast" else ()
    return consumers[0] if consumers else None


def _is_gradient(op: tf.Operation) -> bool:
    scopes = op.name.split("/")
    return "gradient_tape" in scopes or scopes[0].startswith("gradients")


def _needed(graph: tf.Graph) -> list[tf.Operation]:
    """Returns what an output or a stateful operation depends on, in the order of the graph."""
    operations = graph.get_operations()
    waiting = [tensor.op for tensor in graph.outputs]
    waiting += [op for op in operations if op.op_def.is_stateful]
    needed = set()
    while waiting:
        op = waiting.pop()
        if op not in needed:
            needed.add(op)
            waiting += [tensor.op for tensor in op.inputs]
            waiting += op.control_inputs
    return [op for op in operations if op in needed]


def _folded(graph: tf.Graph) -> set[tf.Operation]:
    """Returns the operations with small results that depend on nothing but constants and shapes."""
    return _computed_from(graph, lambda op: op.type == "Const" or op.type in _READ_ONLY_SHAPES)


def _on_host(graph: tf.Graph) -> set[tf.Operation]:
    """Returns the operations that compute with loop counters and the like, on the host."""
    known = _computed_from(graph, _is_on_host)
    return {op for op in known if all(output.dtype in (tf.int32, tf.bool) for output in op.outputs)}


def _computed_from(graph: tf.Graph, is_source: Callable[[tf.Operation], bool]) -> set[tf.Operation]:
    """Returns the sources with small results, and what is computed from nothing else."""
    found: set[tf.Operation] = set()
    for op in graph.get_operations():  # each after its inputs
        is_computed = bool(op.inputs) and not op.op_def.is_stateful and not _bodies(op)
        is_known = is_computed and all(tensor.op in found for tensor in op.inputs)
        is_small = sum(map(_size, op.outputs)) <= _LARGEST_FOLDED
        if is_small and (is_known or is_source(op)):
            found.add(op)
    return found


def _is_free(op: tf.Operation) -> bool:
    if op.type.startswith(_UPDATE_VARIABLES):
        return False
    return op.type in _FREE or not op.outputs


def _moved(op: tf.Operation) -> Iterator[tf.Tensor]:
    """Yields the tensors that an operation reads or writes, each once for each time."""
    if op.type.startswith(_UPDATE_VARIABLES):  # reads value and variable, and writes the latter
        yield from (*op.inputs, op.inputs[-1], op.inputs[-1])
    elif op.type in _READ_WHAT_THEY_WRITE:
        yield from (*op.inputs[1:], *op.outputs, *op.outputs)
    elif op.type in _READ_ONLY_SHAPES:
        yield from op.outputs
    else:
        yield from (*op.inputs, *op.outputs)


def _cost(kernels: int, tensors: Iterator[tf.Tensor] | Sequence[tf.Tensor]) -> Cost:
    sizes = [(_size(tensor), tensor.dtype == tf.float32) for tensor in tensors]
    return Cost(
        kernels,
        sum(size for size, _ in sizes),
        sum(size for size, is_float32 in sizes if is_float32),
    )


def _size(tensor: tf.Tensor) -> int:
    """Returns the bytes of a tensor; 0 if they are not known, and for handles."""
    return 0 if tensor.dtype in (tf.resource, tf.variant) else _elements(tensor) * tensor.dtype.size


def _elements(tensor: tf.Tensor) -> int:
    return tensor.shape.num_elements() or 0


def _bodies(op: tf.Operation) -> list[tf.Graph]:
    """Returns the graphs of the functions that an operation calls.

    TensorFlow 2.21 has no public name for the graph of a function by its name.
    """
    if op.type not in (*_BRANCHES, *_LOOPS, *_CALLS):
        return []
    attributes = op.node_def.attr
    values = [attributes[name] for name in _FUNCTION_ATTRIBUTES if name in attributes]
    names = [function.name for value in values for function in value.list.func or [value.func]]
    function_of = attribute(op.graph, "tensorflow:Graph._get_function", lambda name: None)
    functions = filter(None, map(function_of, names))
    return [function.graph for function in functions if function.graph is not None]


def _iterations(loop: tf.Operation) -> int:
    """Returns the maximum number of iterations of a loop, its second input; 1 if not known."""
    maximum = tf.get_static_value(loop.inputs[1]) if len(loop.inputs) > 1 else None
    return int(maximum) if maximum is not None and maximum.ndim == 0 and maximum > 0 else 1


def _waits_for_device(op: tf.Operation, bodies: Sequence[tf.Graph]) -> bool:
    """Whether the predicate of a branch or loop is computed on the device."""
    if op.type in _CALLS:
        return False
    # The first body of a loop is its `cond`.
    predicate = bodies[0].outputs[0] if op.type in _LOOPS else op.inputs[0]
    return predicate.op not in _computed_from(predicate.graph, _is_on_host)


def _is_on_host(op: tf.Operation) -> bool:
    """Whether the host has a value: a constant, a shape, or an int32 scalar."""
    if op.type == "Const" or op.type in _READ_ONLY_SHAPES or "CPU" in op.device:
        return True
    is_given = op.type in ("Placeholder", "ReadVariableOp")
    return is_given and op.outputs[0].dtype == tf.int32 and op.outputs[0].shape.rank == 0


def _is_compiled(op: tf.Operation) -> bool:
    """Whether XLA compiles the called function, as with `tf.function(jit_compile=True)`."""
    attributes = op.node_def.attr
    return "_XlaMustCompile" in attributes and attributes["_XlaMustCompile"].b


def _compiled_cost(op: tf.Operation, body: tf.Graph) -> Cost:
    tensors = [tensor for tensor in op.inputs if tensor.dtype != tf.resource]
    read, written = _variables(body)
    is_large = [_elements(value) > LARGE for value in written.values()]
    updates = sum(is_large) + (not all(is_large))
    reductions = sum(_elements(tensor) > LARGE for tensor in tensors)
    moved = [*tensors, *op.outputs, *read.values(), *written.values()]
    return _cost(max(updates + reductions, 1), moved)


def _variables(graph: tf.Graph) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
    """Returns the values that a function reads from variables, and that it writes, by handle."""
    read: dict[str, tf.Tensor] = {}
    written: dict[str, tf.Tensor] = {}
    for op in _needed(graph):
        if op.type == "ReadVariableOp":
            read[op.inputs[0].name] = op.outputs[0]
        elif op.type == "AssignVariableOp":
            written[op.inputs[0].name] = op.inputs[1]
        elif op.type.startswith(_UPDATE_VARIABLES):
            read[op.inputs[0].name] = written[op.inputs[0].name] = op.inputs[-1]
        arguments = op.inputs[1:] if op.type in _BRANCHES else op.inputs
        for body in _bodies(op):
            pairs = zip(body.inputs, arguments, strict=True)
            names = {inner.name: outer.name for inner, outer in pairs}
            inner_read, inner_written = _variables(body)
            read |= {names.get(name, name): value for name, value in inner_read.items()}
            written |= {names.get(name, name): value for name, value in inner_written.items()}
    return read, written


def _kept_bytes(graph: tf.Graph) -> int:
    """Returns the bytes that are kept from the forward pass for the backward pass."""
    folded = _folded(graph)
    backward: set[tf.Operation] = set()
    kept: dict[str, int] = {}
    for op in _needed(graph):  # each after its inputs
        if not _is_gradient(op) and not any(tensor.op in backward for tensor in op.inputs):
            continue
        backward.add(op)
        if op in folded or op.type in _READ_ONLY_SHAPES:
            continue
        for tensor in map(_buffer, op.inputs):
            is_forward = tensor.op not in backward and tensor.op not in folded
            if is_forward and tensor.op.type not in ("Placeholder", "ReadVariableOp"):
                kept[tensor.name] = _size(tensor)
    return sum(kept.values())


def _buffer(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor that others pass on."""
    while tensor.op.type in _PASS_BUFFERS:
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor
