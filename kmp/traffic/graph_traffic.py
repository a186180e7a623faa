"""How many kernels a GPU runs for a graph, and how many bytes they move, counted without a GPU.

An operation counts as one kernel that reads its inputs and writes its outputs once, as TensorFlow
runs it on a GPU in graph mode. These count as none:

- operations that only pass a buffer on (`Identity`, `Reshape`, `ReadVariableOp`,
  `AssignVariableOp`), or that run on the host (`Shape`, and what computes with int32 scalars, such
  as loop counters);
- operations that reach neither an output nor a stateful operation, which TensorFlow prunes;
- small results of constants and of shapes, which Grappler, TensorFlow's graph optimizer, computes
  before the first step.

What TensorFlow adds on a GPU counts too: the transpositions of Grappler's layout optimizer and
those inside of a fused normalization (`kmp/backend/gpu_layout.py`), and the kernels of a fused
normalization's gradient with constant statistics.

Calls, branches and loops are followed. A step takes one side of a branch; the larger one is
counted. A loop counts its maximum number of iterations if that is a constant, else one. A tensor
whose shape is not fully known counts 0 bytes. What XLA makes of a function that it compiles is
estimated (`fused_traffic.py`).

Without that estimate, the numbers are an upper bound: Grappler fuses a few operations. Compare them
with each other.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import tensorflow as tf

from kmp.backend.gpu_layout import is_fused_normalization, layout_on_gpu, transposed_inside
from kmp.backend.graph_operations import CALLS, LOOPS, PASS_BUFFERS, bodies_of
from kmp.traffic.fused_traffic import compiled_cost
from kmp.traffic.operation_costs import (
    NO_COST,
    READ_ONLY_SHAPES,
    READ_WHAT_THEY_WRITE,
    UPDATE_VARIABLES,
    Cost,
    computed_from,
    cost_of,
    folded,
    is_on_host,
    iterations_of,
    needed,
    on_host,
    size_of,
)

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
_FREE = PASS_BUFFERS | _HOLD_BUFFERS | {"Assert", "Const", "NoOp"}


# Returns the owner of an operation, from a name and the operation.
Owner: TypeAlias = Callable[[str, tf.Operation], str]


@dataclass(frozen=True)
class Traffic:
    """What the operations of a graph cost in one call.

    Args:
        kernels: Number of kernels, those of compiled functions included.
        bytes: Bytes that they read and write.
        float32_bytes: Those of float32 tensors.
        kept_bytes: Bytes of tensors of the forward pass that the backward pass reads, without
            variables and arguments.
        transposed: The part of transpositions that TensorFlow adds on a GPU.
        host_decisions: Branches and loops outside of compiled functions whose predicate is computed
            on the device, so that the host waits for it.
        compiled_calls: Calls of functions that XLA compiles.
        compiled: Their part, an estimate.
        by_type: The cost of each type of operation, the largest first.
        by_owner: The cost of each owner of operations, the largest first; empty if `traffic_of` got
            no `owner`.
    """

    kernels: int
    bytes: int
    float32_bytes: int
    kept_bytes: int
    transposed: Cost
    host_decisions: int
    compiled_calls: int
    compiled: Cost
    by_type: Mapping[str, Cost]
    by_owner: Mapping[str, Cost]


def traffic_of(graph: tf.Graph, owner: Owner | None = None) -> Traffic:
    """Returns what the operations of a graph cost in one call.

    Args:
        graph: The graph of a function, such as `function.get_concrete_function(...).graph`.
        owner: Returns the owner of an operation or `""`, from a name and the operation. The name of
            one in a called function starts with that of the call; one in no scope may get the name
            of another operation with the same owner.
    """
    tally = _tally(graph, "", owner or (lambda name, op: ""))
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
        transposed=tally.transposed,
        host_decisions=tally.host_decisions,
        compiled_calls=tally.compiled_calls,
        compiled=tally.compiled,
        by_type=_largest_first(by_type),
        by_owner=_largest_first(by_owner) if owner else {},
    )


def _largest_first(costs: Mapping[str, Cost]) -> dict[str, Cost]:
    return dict(sorted(costs.items(), key=lambda item: (-item[1].bytes, item[0])))


@dataclass
class _Tally:
    """What was counted so far: costs by type and owner of the operations."""

    costs: dict[tuple[str, str], Cost] = field(default_factory=dict)
    transposed: Cost = NO_COST
    host_decisions: int = 0
    compiled_calls: int = 0
    compiled: Cost = NO_COST

    def count(self, kind: str, owner: str, cost: Cost, times: int = 1) -> None:
        self.costs[kind, owner] = self.costs.get((kind, owner), Cost()).plus(cost, times)

    def count_transposed(self, owner: str, tensors: Sequence[tf.Tensor]) -> None:
        cost = cost_of(len(tensors), [*tensors, *tensors])
        self.count("Transpose", owner, cost)
        self.transposed = self.transposed.plus(cost)

    def add(self, other: "_Tally", times: int = 1) -> None:
        for (kind, owner), cost in other.costs.items():
            self.count(kind, owner, cost, times)
        self.transposed = self.transposed.plus(other.transposed, times)
        self.host_decisions += times * other.host_decisions
        self.compiled_calls += times * other.compiled_calls
        self.compiled = self.compiled.plus(other.compiled, times)

    @property
    def size(self) -> tuple[int, int]:
        """Kernels and bytes, to compare the sides of a branch."""
        costs = self.costs.values()
        return sum(cost.kernels for cost in costs), sum(cost.bytes for cost in costs)


def _tally(graph: tf.Graph, prefix: str, owner: Owner) -> _Tally:
    tally, not_run = _Tally(), folded(graph) | on_host(graph)
    layout = layout_on_gpu(graph)
    for name, tensor in layout.transposed.items():
        if tensor.op not in not_run:
            tally.count_transposed(owner(prefix + name, tensor.op), [tensor])
    for op in needed(graph):
        name = prefix + op.name
        bodies = bodies_of(op)
        if bodies and op.node_def.attr["_XlaMustCompile"].b:  # as with `jit_compile=True`
            cost = compiled_cost(bodies[0])
            tally.count(op.type, owner(name, op), cost)
            tally.compiled_calls += 1
            tally.compiled = tally.compiled.plus(cost)
        elif bodies:
            # The names in a branch or loop are complete.
            inner_prefix = f"{name}/" if op.type in CALLS else prefix
            parts = [_tally(body, inner_prefix, owner) for body in bodies]
            if op.type in LOOPS:
                for part in parts:
                    tally.add(part, iterations_of(op))
            else:  # a call, or a branch with its larger side
                tally.add(max(parts, key=lambda part: part.size))
            tally.host_decisions += _waits_for_device(op, bodies)
        elif op not in not_run and not _is_free(op):
            served = _served(op)
            label = owner(name, op) or (owner(prefix + served.name, op) if served else "")
            kernels = 5 if _has_constant_statistics(op) else 1  # but for transpositions
            tally.count(op.type, label, cost_of(kernels, _moved(op)))
            if inside := transposed_inside(op, layout.formats.get(op.name)):
                tally.count_transposed(label, inside)
    return tally


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


def _is_free(op: tf.Operation) -> bool:
    if op.type.startswith(UPDATE_VARIABLES):
        return False
    return op.type in _FREE or not op.outputs


def _has_constant_statistics(op: tf.Operation) -> bool:
    """Whether an operation is the gradient of a fused normalization by constant statistics.

    Two kernels add up the gradient, with and without the input, two are of the statistics, and one
    is the result. Source: `FusedBatchNormFreezeGrad` in TensorFlow's fused_batch_norm_op.cu.cc.
    """
    return is_fused_normalization(op) and "Grad" in op.type and not op.get_attr("is_training")


def _moved(op: tf.Operation) -> Iterator[tf.Tensor]:
    """Yields the tensors that an operation reads or writes, each once for each time."""
    if op.type.startswith(UPDATE_VARIABLES):  # reads value and variable, and writes the latter
        yield from (*op.inputs, op.inputs[-1], op.inputs[-1])
    elif op.type in READ_WHAT_THEY_WRITE:
        yield from (*op.inputs[1:], *op.outputs, *op.outputs)
    elif op.type in READ_ONLY_SHAPES:
        yield from op.outputs
    else:
        if _has_constant_statistics(op):  # reads the gradient in three kernels
            yield from (op.inputs[0], op.inputs[0])
        yield from (*op.inputs, *op.outputs)


def _waits_for_device(op: tf.Operation, bodies: Sequence[tf.Graph]) -> bool:
    """Whether the predicate of a branch or loop is computed on the device."""
    if op.type in CALLS:
        return False
    # The first body of a loop is its `cond`.
    predicate = bodies[0].outputs[0] if op.type in LOOPS else op.inputs[0]
    return predicate.op not in computed_from(predicate.graph, is_on_host)


def _kept_bytes(graph: tf.Graph) -> int:
    """Returns the bytes that are kept from the forward pass for the backward pass."""
    constants = folded(graph)
    backward: set[tf.Operation] = set()
    kept: dict[str, int] = {}
    for op in needed(graph):  # each after its inputs
        if not _is_gradient(op) and not any(tensor.op in backward for tensor in op.inputs):
            continue
        backward.add(op)
        if op in constants or op.type in READ_ONLY_SHAPES:
            continue
        for tensor in map(_buffer, op.inputs):
            is_forward = tensor.op not in backward and tensor.op not in constants
            if is_forward and tensor.op.type not in ("Placeholder", "ReadVariableOp"):
                kept[tensor.name] = size_of(tensor)
    return sum(kept.values())


def _buffer(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor that others pass on."""
    while tensor.op.type in PASS_BUFFERS:
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor
