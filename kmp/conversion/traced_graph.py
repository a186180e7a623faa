"""The graph of a layer or operation that kmp looks into: what TensorFlow traces of its code."""

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from kmp.backend import layer_trace
from kmp.backend.graph_operations import BRANCHES, CALLS, LOOPS, PASS_BUFFERS, bodies_of
from kmp.backend.layer_trace import LayerTrace
from kmp.backend.promotion import line_of_user
from kmp.numerics import (
    BELOW_MAXIMUM,
    DATA,
    GATE_FUNCTION,
    SUM_WITH_ONE,
    TO_INTEGER,
    Call,
    Node,
    Value,
    between,
    constant,
    einsum_function,
    extremes,
    matrix_product_function,
    tensorflow_function,
)
from kmp.utils.float_formats import DTYPES_16_BIT, FLOAT16

_MOST_READ = 2**16  # elements of a variable whose values are looked at
# A learned weight stays within this factor of what it is; one that may have both signs, below 1.
_LEARNED_FACTOR = 2.0
_MOST_BEFORE = 30  # operations before a factor in which the other one is looked for
_WINDOWS = ("AvgPool", "AvgPool3D")
_DEPTHWISE = "DepthwiseConv2dNative"
_OF_AXES = ("Cumprod", "Cumsum", "EuclideanNorm", "Mean", "Prod", "Sum")
# Operations of positions and sizes, which are computed if they depend on constants alone.
_FOLDED = (
    *("AddV2", "Cast", "Exp", "ExpandDims", "Fill", "FloorDiv", "FloorMod", "Log", "Maximum"),
    *("Minimum", "Mul", "Neg", "Pow", "Range", "RealDiv", "Reshape", "Rsqrt", "SelectV2", "Sqrt"),
    *("Square", "Sub"),
)
_TRACER = layer_trace.__file__
_CAST = tensorflow_function("Cast")
_MULTIPLICATIONS = ("Mul", "RealDiv", "Cast", "Neg", "Identity")

Units = tuple[Hashable, ...]


@dataclass
class TracedNodes:
    """The nodes of a trace.

    Attributes:
        nodes: They, in the order of the graph.
        outputs: Those of the results.
        with_products: The units that multiply matrices.
    """

    nodes: list[Node] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)
    with_products: set[Hashable] = field(default_factory=set)


def nodes_of_trace(
    trace: LayerTrace,
    operands: Sequence[Node | Value],
    units: Units,
    follows: Sequence[Node],
    node_of_layer: Callable[[int, Units], Node | None],
    copies: Mapping[int, Any],
) -> TracedNodes:
    """Returns the nodes of the code of a layer or operation.

    Args:
        trace: The trace.
        operands: What it gets as float arguments.
        units: Those of the layer or operation.
        follows: As in `Node`.
        node_of_layer: Returns the node of a call of a layer in it, given its `id` and its units, if
            that is known without a look at its operations.
        copies: What takes the place of layers and variables of the trace in a layer that computes
            the same, by the `id` of the layer or of the handle of the variable.
    """
    reader = _Reader(trace.step.graph, units, tuple(follows), dict(trace.step.constants))
    for outer, inner in trace.step.graph.captures:
        reader.captured[inner.name] = copies.get(id(outer), outer)
    count = len(trace.step.graph.get_operations())
    reader.owners, known = [units] * count, [False] * count
    for call in reversed(trace.step.calls):  # a call returns after those in it
        start, stop, _ = call.operations.indices(count)
        if call.layer == trace.operation or start >= stop or known[start]:
            continue
        layer = copies.get(call.layer, call.layer)
        inner_units = (layer, *reader.owners[start])
        reader.owners[start:stop] = [inner_units] * (stop - start)
        node = node_of_layer(layer, inner_units)
        if node is not None:
            known[start:stop] = [True] * (stop - start)
            reader.known[start] = call.operations, call.outputs, node
    return reader.read(trace.inputs, operands, trace.outputs)


@dataclass
class _Reader:
    """Makes the nodes of one graph of TensorFlow.

    Attributes:
        graph: The graph.
        units: Those of all nodes.
        follows: As in `Node`.
        constants: The exact values of constants in 16 bits, by the name of the operation.
        captured: What a placeholder stands for: an eager tensor, or the handle of a variable.
        owners: The units of each operation; empty if all have those of the graph.
        known: The calls of layers that are known, by their first operation.
        of_name: The nodes, by the name of the operation.
        found: The result.
        folded: What is computed of constants, by the name of the tensor.
    """

    graph: Any
    units: Units = ()
    follows: tuple[Node, ...] = ()
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    captured: dict[str, Any] = field(default_factory=dict)
    owners: list[Units] = field(default_factory=list)
    known: dict[int, tuple[slice, list[tf.Tensor], Node]] = field(default_factory=dict)
    of_name: dict[str, Node] = field(default_factory=dict)
    found: TracedNodes = field(default_factory=TracedNodes)
    folded: dict[str, np.ndarray] = field(default_factory=dict)

    def read(
        self,
        inputs: Sequence[tf.Tensor],
        operands: Sequence[Node | Value],
        outputs: Sequence[tf.Tensor],
    ) -> TracedNodes:
        """Returns the nodes."""
        given = [each for each in inputs if _has_values(each)]
        for tensor, operand in zip(given, operands, strict=True):
            # The layer casts what it gets.
            self._add(tensor.op, Node(_CAST, [operand], units=self.units, follows=self.follows))
        operations, index = self.graph.get_operations(), 0
        while index < len(operations):
            if index in self.known:
                slice_, results, node = self.known[index]
                self.found.nodes.append(node)
                inside = {each.name for each in operations[slice_]}
                self.of_name.update(
                    (each.op.name, node) for each in results if each.op.name in inside
                )
                index = max(slice_.stop, index + 1)
                continue
            operation = operations[index]
            is_known = any(map(_has_values, operation.outputs))
            is_known |= operation.type in (*BRANCHES, *LOOPS, *CALLS)
            is_known |= operation.type == "Cast" and operation.inputs[0].dtype.is_floating
            if is_known and operation.name not in self.of_name:
                units = self.owners[index] if self.owners else self.units
                self._add(operation, self._node_of(operation, units))
            index += 1
        results = [self._operand(each) for each in outputs if _has_values(each)]
        self.found.outputs = [each for each in results if isinstance(each, Node)]
        return self.found

    def _add(self, operation: tf.Operation, node: Node) -> None:
        self.of_name[operation.name] = node
        self.found.nodes.append(node)

    def _operand(self, tensor: tf.Tensor) -> Node | Value:
        return self.of_name.get(tensor.op.name, DATA)

    def _node_of(self, operation: tf.Operation, units: Units) -> Node:
        dtypes = [each.dtype.name for each in operation.outputs if each.dtype.is_floating]
        floats = [each for each in operation.inputs if _has_values(each)]
        operands = [self._operand(each) for each in floats]
        node = Node(
            operands=operands,
            place=functools.partial(_line_of, operation),
            units=units,
            is_float32=not any(dtype in DTYPES_16_BIT for dtype in dtypes),
            follows=self.follows,
        )
        if operation.type == "Const":
            exact = self.constants.get(operation.name)
            values = tf.get_static_value(operation.outputs[0]) if exact is None else exact
            node.value, node.constants = constant(values), extremes(values)
            return node
        self._fold(operation)
        node.value = self._value_of(operation)
        if node.value is not None:
            node.operands = []
            return node
        bodies = bodies_of(operation)
        if bodies:
            self._read_functions(operation, bodies, node)
            return node
        node.function = tensorflow_function(operation.type)
        if operation.type == "Einsum":
            node.function = einsum_function(operation.get_attr("equation").decode())
        if operation.type == "Cast" and operation.outputs[0].dtype.is_integer:
            node.function = TO_INTEGER
            node.is_float32 = operation.inputs[0].dtype.name not in DTYPES_16_BIT
        if operation.type == "Mul" and self._is_gate(floats):
            node.function = GATE_FUNCTION
        if operation.type == "Sub" and _is_maximum_of(floats[1], floats[0]):
            node.function = BELOW_MAXIMUM
        if operation.type == "Sum" and self._has_one(operation.inputs[0]):
            node.function = SUM_WITH_ONE
        if node.function is None:
            return node
        shape = operation.outputs[0].shape
        if shape.rank is not None:
            node.function = matrix_product_function(node.function, shape)
        if "multiplies_matrices" in node.function.traits:
            self.found.with_products.update(units)
        are_same = len(floats) == 2 and floats[0] is floats[1]
        node.call = Call(_terms_of(operation), are_same)
        constants = (each.constants for each in operands if isinstance(each, Node))
        known = (each.value for each in operands if isinstance(each, Node))
        pairs = zip(constants, known, strict=True)
        node.constants = [number for each, value in pairs if value is not None for number in each]
        return node

    def _value_of(self, operation: tf.Operation) -> Value | None:
        """Returns what is known of a variable or a number of another dtype."""
        tensor = operation.outputs[0]
        if tensor.name in self.folded:
            return constant(self.folded[tensor.name])
        if operation.type == "ReadVariableOp":
            return _learned(self.captured.get(operation.inputs[0].name), tensor)
        if operation.type == "Placeholder" and tensor.name in self.captured:
            outer = self.captured[tensor.name]
            return constant(outer.numpy()) if hasattr(outer, "numpy") else DATA
        if operation.type == "Cast" and not operation.inputs[0].dtype.is_floating:
            if operation.inputs[0].dtype == tf.bool:
                return between(0.0, 1.0)
            known = self._static(operation.inputs[0])
            return DATA if known is None else constant(known.numpy())
        if operation.type in ("Range", "Fill", "LinSpace"):
            known = tf.get_static_value(tensor)
            return None if known is None else constant(known)
        return None

    def _fold(self, operation: tf.Operation) -> None:
        """Computes what depends on constants alone, but not in 16 bits, which would round it."""
        if operation.type not in _FOLDED or operation.outputs[0].dtype.name in DTYPES_16_BIT:
            return
        known = [self._static(each) for each in operation.inputs]
        is_small = (operation.outputs[0].shape.num_elements() or 0) < _MOST_READ
        if not is_small or any(each is None for each in known):
            return
        names = [each.name for each in operation.op_def.input_arg]
        names = ["axis" if name == "dim" else name for name in names]  # of `ExpandDims`
        attributes = {
            each.name: operation.get_attr(each.name)
            for each in operation.op_def.attr
            if each.name in ("DstT", "Truncate", "squeeze_dims")
        }
        arguments = dict(zip(names, known, strict=True))
        result = getattr(tf.raw_ops, operation.type)(**arguments, **attributes)
        self.folded[operation.outputs[0].name] = result.numpy()

    def _static(self, tensor: tf.Tensor) -> Any:
        known = self.folded.get(tensor.name)
        if known is None:
            known = tf.get_static_value(tensor)
        return None if known is None else tf.constant(known, tensor.dtype)

    def _read_functions(self, operation: tf.Operation, bodies: list[tf.Graph], node: Node) -> None:
        """Makes a node that of a call, a branch or a loop."""
        given = operation.inputs[1:] if operation.type in BRANCHES else operation.inputs
        sides: list[Node | Value] = []
        for body in bodies:
            if len(body.inputs) != len(given):
                continue
            inner = _Reader(body, node.units, self.follows)
            operands = []
            for index, (outer, placeholder) in enumerate(zip(given, body.inputs, strict=True)):
                if outer.name in self.captured:
                    inner.captured[placeholder.name] = self.captured[outer.name]
                # A loop may have changed what it carries.
                is_changed = operation.type in LOOPS and index < len(body.outputs)
                is_changed = is_changed and _unpassed(body.outputs[index]) is not placeholder
                if _has_values(placeholder):
                    operands.append(DATA if is_changed else self._operand(outer))
            read = inner.read(body.inputs, operands, body.outputs)
            if operation.type in LOOPS:
                inner.mark_sums(body)
            self.found.nodes += read.nodes
            self.found.with_products |= read.with_products
            sides += read.outputs
        node.function, node.operands = _CAST, sides or [DATA]

    def _has_one(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor has exponentials of differences from a maximum."""
        operation = _unpassed(tensor).op
        if operation.type != "Exp":
            return False
        while operation.type in ("Exp", *_MULTIPLICATIONS):
            operation = operation.inputs[0].op
        node = self.of_name.get(operation.name)
        return node is not None and node.function is BELOW_MAXIMUM

    def mark_sums(self, body: Any) -> None:
        """Marks the additions to what a loop carries as long sums."""
        for given, returned in zip(body.inputs, body.outputs, strict=False):
            is_list = returned.op.type == "TensorListSetItem"
            operation = _unpassed(returned.op.inputs[2] if is_list else returned).op
            node = self.of_name.get(operation.name)
            if node is None or operation.type not in ("AddV2", "Add", "Sub"):
                continue
            if any(_unpassed(each) is given for each in operation.inputs):
                node.function, node.call = tensorflow_function("Cumsum"), Call(math.inf)

    def _is_gate(self, factors: Sequence[tf.Tensor]) -> bool:
        """Whether a number is multiplied by a bounded function of itself, as in `silu`."""
        for own, other in (factors, factors[::-1]):
            sources = _multiplied_from(own)
            for operation in _before(other.op):
                function = tensorflow_function(operation.type)
                if function is None or not function.of([DATA, DATA]).value.is_bounded:
                    continue
                if any(
                    sources & {tensor.name for tensor in each.inputs} for each in _before(operation)
                ):
                    return True
        return False


def _unpassed(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor, or the list, that operations have only passed on."""
    while tensor.op.type in PASS_BUFFERS or tensor.op.type == "TensorListGetItem":
        tensor = tensor.op.inputs[0]
    return tensor


def _has_values(tensor: tf.Tensor) -> bool:
    """Whether a tensor has floats, or may be a list of such tensors."""
    return bool(tensor.dtype.is_floating) or tensor.dtype == tf.variant


def _is_maximum_of(tensor: tf.Tensor, other: tf.Tensor) -> bool:
    """Whether a tensor has the largest elements of another one."""
    operation = _unpassed(tensor).op
    return operation.type == "Max" and _unpassed(operation.inputs[0]) is _unpassed(other)


def _before(operation: tf.Operation) -> list[tf.Operation]:
    """Returns an operation and the closest ones before it."""
    found, index = [operation], 0
    while index < len(found) < _MOST_BEFORE:
        before = [each.op for each in found[index].inputs if each.dtype.is_floating]
        found += [each for each in before if each not in found]
        index += 1
    return found


def _multiplied_from(tensor: tf.Tensor) -> set[str]:
    """Returns the names of a tensor and of those of which it is a multiple."""
    names, waiting = {tensor.name}, [tensor]
    while waiting:
        operation = waiting.pop().op
        if operation.type in _MULTIPLICATIONS:
            floats = [each for each in operation.inputs if each.dtype.is_floating]
            waiting += [each for each in floats if each.name not in names]
            names.update(each.name for each in floats)
    return names


def _learned(handle: Any, tensor: tf.Tensor) -> Value:
    """Returns the range of a weight, by its values."""
    elements = tensor.shape.num_elements()
    if handle is None or not elements or elements > _MOST_READ or not hasattr(handle, "numpy"):
        return between(-1.0, 1.0)
    values = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tensor.dtype).numpy()
    known = constant(values.astype("float64"))
    if not known.is_bounded:
        return between(-1.0, 1.0)
    # A limit that float16 has, as that of a `clip`, stays one.
    largest = min(known.magnitude * _LEARNED_FACTOR, max(known.magnitude, FLOAT16.max))
    if known.smallest_magnitude:
        sizes = known.smallest_magnitude / _LEARNED_FACTOR, largest
        return between(*(sizes if known.low > 0 else (-sizes[1], -sizes[0])))
    largest = max(1.0, largest)
    return between(-largest, largest)


def _terms_of(operation: tf.Operation) -> float:
    """Returns how many elements are added up for each element of the result; Inf if not known."""
    kind, shapes = operation.type, [each.shape for each in operation.inputs]
    sizes: Sequence[int | None] = [None]
    if not shapes or any(each.rank is None for each in shapes):
        pass
    elif kind in _WINDOWS:
        sizes = operation.get_attr("ksize")
    elif kind == _DEPTHWISE:
        sizes = shapes[1][:2]
    elif kind in ("Conv2D", "Conv3D"):
        sizes = shapes[1][:-1]
    elif kind in ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
        attributes = operation.node_def.attr
        is_transposed = attributes["transpose_a"].b or attributes["adj_x"].b
        sizes = [shapes[0][-2 if is_transposed else -1]]
    elif kind in ("Softmax", "LogSoftmax"):
        sizes = [shapes[0][-1]]
    elif kind in _OF_AXES:
        axes = tf.get_static_value(operation.inputs[1])
        if axes is not None:
            sizes = [shapes[0][int(axis)] for axis in np.ravel(axes)]
    return _product(sizes)


def _product(sizes: Sequence[int | None]) -> float:
    return math.inf if None in sizes else float(math.prod(filter(None, sizes)))


def _line_of(operation: tf.Operation) -> str:
    """Returns the line of the user's code, as `attention.py:31`; empty if there is none."""
    inside = [index for index, frame in enumerate(operation.traceback) if frame.filename == _TRACER]
    file, line = line_of_user(list(operation.traceback)[inside[-1] :] if inside else [])
    return f"{Path(file).name}:{line}" if file else ""
