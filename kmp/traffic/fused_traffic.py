"""How many kernels XLA makes of a compiled function for a GPU, and how many bytes they move.

This is an estimate. It is read from the graph before XLA sees it, in milliseconds:

- a matrix product, a convolution and a few others are one kernel each, which takes tensors in
  memory. So are a scatter, which reads and writes all of what it changes, and a reduction, which is
  two if it adds up more than `LARGE` elements at once;
- elementwise operations, and those that only move elements, are computed by the kernel that needs
  them. They are a kernel where their result is an output, a new value of a variable, or needed by a
  kernel that takes tensors in memory;
- such kernels of one shape are one if they read the same tensor, or only fill tensors;
- what a branch or a loop writes to variables is copied once more.

Compared with what XLA makes for an H100 (`benchmarks/xla_gpu.py`), for the updates of ten
optimizers of dense, convolutional, attention and embedding layers, it is 0.8 to 1.2 times the
kernels and 0.6 to 1.5 times the bytes. The least is Muon, of whose products XLA splits some into
sums. With gradient accumulation, in branches, it is up to 5 and 2.2 times as much: XLA selects
values in place of a small branch. A scatter into a variable counts the rows that it changes, as XLA
scatters in place; `xla_gpu.py` counts all rows.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from kmp.backend.graph_operations import BRANCHES, CALLS, LOOPS, PASS_BUFFERS, bodies_of
from kmp.traffic.operation_costs import (
    NO_COST,
    READ_WHAT_THEY_WRITE,
    UPDATE_VARIABLES,
    Cost,
    elements_of,
    folded,
    iterations_of,
    needed,
)

LARGE = 2**14  # elements

_TAKE_MEMORY = (
    *("BatchMatMul", "Einsum", "MatMul", "Conv", "DepthwiseConv", "MaxPool", "AvgPool"),
    *("Cholesky", "FFT", "MatrixInverse", "MatrixTriangularSolve", "Qr", "Svd", "Sort", "TopK"),
    "FusedBatchNorm",
)
_SCATTER = ("Scatter", "TensorScatter", "UnsortedSegment", "Segment")
_SCANS = ("Cumsum", "Cumprod", "CumulativeLogsumexp")
_REDUCTIONS = ("All", "Any", "Max", "Mean", "Min", "Prod", "Sum")
_TAKE_PARTS = (*READ_WHAT_THEY_WRITE, "Split", "Unpack")


@dataclass(frozen=True, eq=False)
class _Buffer:
    """A tensor in memory, and how many kernels run after each other until it is there."""

    elements: int
    bytes: int
    is_float32: bool
    level: int = 0


@dataclass(frozen=True, eq=False)
class _Value:
    """A tensor as a kernel computes it from tensors in memory, or one of these itself."""

    shape: tuple[int | None, ...]
    elements: int
    dtype: tf.DType
    reads: frozenset[_Buffer]
    is_in_memory: bool = False

    @property
    def level(self) -> int:
        return max((buffer.level for buffer in self.reads), default=0)


@dataclass
class _Kernel:
    """An elementwise kernel."""

    reads: set[_Buffer]
    writes: set[_Buffer]


@dataclass
class _Fusion:
    """The kernels of a function, while its operations are visited.

    Args:
        cost: That of kernels that are not elementwise.
        elementwise: The other kernels, by level and shape.
        variables: The values of variables, by the handle.
        written: The handles of those that the function writes.
        stored: The values that were written to memory, by value.
    """

    cost: Cost = NO_COST
    elementwise: dict[tuple[int, Any], list[_Kernel]] = field(default_factory=dict)
    variables: dict[str, _Value] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    stored: dict[_Value, _Value] = field(default_factory=dict)

    def store(self, value: _Value) -> _Value:
        """Returns a value in memory, written there by an elementwise kernel if need be."""
        if value.is_in_memory:
            return value
        if value not in self.stored:
            stored = _in_memory(value, value.level + 1)
            kernels = self.elementwise.setdefault((value.level, value.shape), [])
            kernel = _Kernel(set(value.reads), set(stored.reads))
            for other in list(kernels):
                # XLA joins kernels that read a tensor of more than one element, and those that
                # only fill tensors.
                shared = other.reads & value.reads
                only_fill = not (other.reads or value.reads)
                if only_fill or any(buffer.elements > 1 for buffer in shared):
                    kernels.remove(other)
                    kernel.reads |= other.reads
                    kernel.writes |= other.writes
            kernels.append(kernel)
            self.stored[value] = stored
        return self.stored[value]

    def run(self, value: _Value, inputs: Iterable[_Value], kernels: int = 1) -> _Value:
        """Returns the result of a kernel that is not elementwise, and counts it."""
        reads = frozenset().union(*(each.reads for each in inputs))
        level = max((buffer.level for buffer in reads), default=0)
        stored = _in_memory(value, level + 1)
        self.cost = self.cost.plus(_cost(kernels, [*reads, *stored.reads]))
        return stored

    def total(self) -> Cost:
        """Returns the cost of all kernels."""
        total = self.cost
        for kernel in itertools.chain.from_iterable(self.elementwise.values()):
            total = total.plus(_cost(1, [*kernel.reads, *kernel.writes]))
        return total


def compiled_cost(graph: tf.Graph) -> Cost:
    """Returns an estimate of what a function costs that XLA compiles for a GPU."""
    fusion = _Fusion()
    _finish(fusion, graph, [_given(tensor) for tensor in graph.inputs])
    return fusion.total()


def _finish(fusion: _Fusion, graph: tf.Graph, arguments: Sequence[_Value | str]) -> list[_Value]:
    """Visits a graph and writes its outputs and variables to memory."""
    outputs = _visit(fusion, graph, arguments)
    stored = [fusion.store(each) for each in outputs if isinstance(each, _Value)]
    for handle in fusion.written:
        fusion.variables[handle] = fusion.store(fusion.variables[handle])
    return stored


def _visit(fusion: _Fusion, graph: tf.Graph, arguments: Sequence[_Value | str]) -> list[Any]:
    """Adds the kernels of a graph, and returns its outputs. Handles of variables are strings."""
    constants = folded(graph)
    values: dict[str, _Value | str] = {
        tensor.name: argument for tensor, argument in zip(graph.inputs, arguments, strict=True)
    }
    for op in needed(graph):
        if op.outputs and op.outputs[0].name in values:
            continue
        inputs = [values[tensor.name] for tensor in op.inputs]
        if op in constants or op.type == "Const":
            results: list[_Value | str] = [_computed(tensor, []) for tensor in op.outputs]
        elif op.type == "VarHandleOp":
            results = [op.name]
        else:
            results = _results(fusion, op, inputs)
        values |= {tensor.name: each for tensor, each in zip(op.outputs, results, strict=True)}
    return [values[tensor.name] for tensor in graph.outputs]


def _results(fusion: _Fusion, op: tf.Operation, inputs: list[Any]) -> list[Any]:
    """Adds the kernels of an operation, and returns its outputs."""
    is_passed_on = op.type in PASS_BUFFERS or bool(bodies_of(op))
    if inputs and isinstance(inputs[0], str) and not is_passed_on:
        return _with_variable(fusion, op, inputs)
    for types, rule in _RULES:
        if op.type.startswith(types):
            return rule(fusion, op, inputs)
    results = [_computed(tensor, inputs) for tensor in op.outputs]
    is_elementwise = all(each.elements >= _largest(inputs) for each in results)
    is_joined = is_elementwise or _reduces_rows(op)
    return results if is_joined else _own_kernel(fusion, op, inputs)


def _reduces_rows(op: tf.Operation) -> bool:
    """Whether an operation reduces the last axes to more than one result.

    XLA joins it with what comes before and after, as in a softmax.
    """
    axes = tf.get_static_value(op.inputs[1]) if op.type in _REDUCTIONS else None
    rank = op.inputs[0].shape.rank
    if axes is None or rank is None:
        return False
    last = set(range(rank - axes.size, rank))
    return {int(axis) % rank for axis in axes.flat} == last and elements_of(op.outputs[0]) > 1


def _passed_on(fusion: _Fusion, op: tf.Operation, inputs: list[Any]) -> list[Any]:
    pairs = zip(op.outputs, inputs, strict=False)  # a reshape has its shape as an input too
    return [
        each
        if isinstance(each, str)
        else dataclasses.replace(each, shape=_shape(tensor), dtype=tensor.dtype)
        for tensor, each in pairs
    ]


def _parts(fusion: _Fusion, op: tf.Operation, inputs: list[Any]) -> list[Any]:
    """Returns what is read from a part of a tensor, which is the first input of most."""
    results = [_computed(tensor, inputs) for tensor in op.outputs]
    sources = [each for each in inputs if each.elements == _largest(inputs)]
    if not all(each.is_in_memory for each in sources):
        return results
    others = [each.reads for each in inputs if each not in sources]
    return [
        dataclasses.replace(each, reads=_in_memory(each, each.level).reads.union(*others))
        for each in results
    ]


def _stored(fusion: _Fusion, op: tf.Operation, inputs: list[Any]) -> list[Any]:
    return [fusion.store(each) for each in inputs]


def _scattered(fusion: _Fusion, op: tf.Operation, inputs: list[Any]) -> list[Any]:
    # What the operation scatters to is filled before, in a kernel of its own.
    filled = fusion.store(_computed(op.outputs[0], []))
    return [fusion.run(_computed(op.outputs[0], []), [*inputs, filled])]


def _own_kernel(fusion: _Fusion, op: tf.Operation, inputs: list[Any]) -> list[Any]:
    results = [_computed(tensor, []) for tensor in op.outputs]
    is_split = any(_largest(inputs) > LARGE * each.elements > 0 for each in results)
    first, *others = results
    others = [fusion.run(each, [], kernels=0) for each in others]
    return [fusion.run(first, inputs, kernels=1 + is_split), *others]


def _with_variable(fusion: _Fusion, op: tf.Operation, inputs: list[Any]) -> list[Any]:
    """Reads or writes a variable, whose new value stays in a kernel while it can."""
    handle, *values = inputs
    if op.type == "ReadVariableOp":
        return [fusion.variables.setdefault(handle, _given(op.outputs[0]))]
    if op.type == "AssignVariableOp":
        fusion.variables[handle] = values[-1]
    elif op.type.startswith(UPDATE_VARIABLES):
        before = fusion.variables.get(handle) or _given(op.inputs[-1])
        if op.type.startswith("Resource"):  # a scatter, into the tensor itself
            updated = fusion.run(before, [fusion.store(before), *values])
        else:
            reads = before.reads.union(*(each.reads for each in values))
            updated = dataclasses.replace(before, reads=reads, is_in_memory=False)
        fusion.variables[handle] = updated
    else:  # a gather, or what needs the shape only
        results = [_computed(tensor, values) for tensor in op.outputs]
        reads_rows = [_in_memory(each, level=0).reads for each in results]
        pairs = zip(results, reads_rows, strict=True)
        return [dataclasses.replace(each, reads=each.reads | rows) for each, rows in pairs]
    fusion.written.add(handle)
    return []


def _apart(fusion: _Fusion, op: tf.Operation, inputs: list[Any]) -> list[Any]:
    """Adds the kernels of the larger side of a branch, or of all iterations of a loop."""
    for handle in fusion.written:
        fusion.variables[handle] = fusion.store(fusion.variables[handle])
    inputs = [fusion.store(each) if isinstance(each, _Value) else each for each in inputs]
    arguments = inputs[1:] if op.type in BRANCHES else inputs
    costs = []
    for body in bodies_of(op):
        inner = _Fusion()
        _finish(inner, body, arguments)
        costs.append(inner.total())
        for handle in inner.written:
            fusion.variables[handle] = inner.variables[handle]
            # XLA copies the variables that a branch or loop writes.
            fusion.run(inner.variables[handle], [inner.variables[handle]])
    if op.type in LOOPS:
        for cost in costs:
            fusion.cost = fusion.cost.plus(cost, iterations_of(op))
    else:
        largest = max(costs, key=lambda cost: (cost.kernels, cost.bytes))
        fusion.cost = fusion.cost.plus(largest)
    level = max((each.level for each in inputs if isinstance(each, _Value)), default=0)
    results = [_in_memory(_computed(tensor, []), level + 1) for tensor in op.outputs]
    # A loop returns the handles of the variables that it takes.
    is_handle = [tensor.dtype == tf.resource for tensor in op.outputs]
    return [inputs[i] if is_handle[i] else each for i, each in enumerate(results)]


def _given(tensor: tf.Tensor) -> Any:
    """Returns an argument of the function: a tensor in memory, or the handle of a variable."""
    if tensor.dtype == tf.resource:
        return tensor.name
    return _in_memory(_computed(tensor, []), level=0)


def _computed(tensor: tf.Tensor, inputs: Sequence[_Value]) -> _Value:
    """Returns a tensor that a kernel computes from others."""
    if tensor.shape.is_fully_defined():
        elements = elements_of(tensor)
    else:  # as many as what is computed from the tensor
        computed = [output for each in tensor.consumers() for output in each.outputs]
        elements = max(map(elements_of, computed), default=0)
    reads = frozenset[_Buffer]().union(*(each.reads for each in inputs))
    return _Value(_shape(tensor), elements, tensor.dtype, reads)


def _shape(tensor: tf.Tensor) -> tuple[int | None, ...]:
    return (None,) if tensor.shape.rank is None else tuple(tensor.shape)


def _largest(values: Sequence[_Value]) -> int:
    return max((each.elements for each in values), default=0)


def _in_memory(value: _Value, level: int) -> _Value:
    size = 0 if value.dtype == tf.variant else value.elements * value.dtype.size
    buffer = _Buffer(value.elements, size, value.dtype == tf.float32, level)
    return dataclasses.replace(value, reads=frozenset({buffer}), is_in_memory=True)


def _cost(kernels: int, buffers: Iterable[_Buffer]) -> Cost:
    sizes = [(buffer.bytes, buffer.is_float32) for buffer in buffers]
    in_float32 = sum(size for size, is_float32 in sizes if is_float32)
    return Cost(kernels, sum(size for size, _ in sizes), in_float32)


# The operations, by the beginning of their types, that are not elementwise. What is in no row and
# has fewer elements than its inputs is a reduction.
_RULES: tuple[tuple[tuple[str, ...], Callable[[_Fusion, tf.Operation, list[Any]], list[Any]]], ...]
_RULES = (
    (CALLS, lambda fusion, op, inputs: _visit(fusion, bodies_of(op)[0], inputs)),
    ((*BRANCHES, *LOOPS), _apart),
    (tuple(PASS_BUFFERS), _passed_on),
    (_TAKE_PARTS, _parts),
    (("XlaOptimizationBarrier",), _stored),
    (_SCATTER, _scattered),
    (
        _TAKE_MEMORY,
        lambda fusion, op, inputs: _own_kernel(fusion, op, _stored(fusion, op, inputs)),
    ),
    (_SCANS, _own_kernel),
)
