"""How the tensors of a graph depend on a loss scale: to which power they are multiplied by it.

The graph is read, from the loss scale on. Nothing runs, and no operation is added.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from kmp.backend.graph_operations import BRANCHES, CALLS, LOOPS, bodies_of

_MOST_POWERS = 6  # of one tensor; a sum with more is not followed
_MOST_PASSES = 4  # over the body of a loop


class Nonlinear(NamedTuple):
    """A dependence that is no sum of powers.

    Attributes:
        operation: The operation that makes it so; `None` if it is not known what one does.
    """

    operation: tf.Operation | None


# The powers of the loss scale in the terms of a sum.
Powers: TypeAlias = frozenset[float]
Dependence: TypeAlias = Powers | Nonlinear

CONSTANT: Powers = frozenset({0.0})
ZERO: Powers = frozenset()  # of a tensor of zeros, which has any power
SCALED: Powers = frozenset({1.0})
UNKNOWN = Nonlinear(None)

# Linear in all operands that depend on the scale, or positively homogeneous, as a maximum is.
_LINEAR = {
    *("Abs", "AddN", "AddV2", "Add", "AvgPool", "AvgPool3D", "BatchToSpaceND", "BiasAdd"),
    *("BiasAddGrad", "Bitcast", "BroadcastTo", "Cast", "CheckNumerics", "Concat", "ConcatV2"),
    *("Conj", "ConjugateTranspose", "Cumsum", "DepthToSpace", "DynamicStitch", "EnsureShape"),
    *("ExpandDims", "Gather", "GatherNd", "GatherV2", "Identity", "LeakyRelu"),
    *("MatrixBandPart", "MatrixDiag", "MatrixDiagPart", "MatrixDiagPartV3", "MatrixDiagV3"),
    *("Max", "MaxPool", "Mean", "Min", "MirrorPad", "Neg", "Pack", "Pad", "PadV2"),
    *("ParallelConcat", "PreventGradient", "Real", "Relu", "Reshape", "ResourceGather"),
    *("Reverse", "ReverseSequence", "ReverseV2", "Roll", "ScatterNd", "SegmentSum", "Slice"),
    *("Snapshot", "SpaceToBatchND", "SpaceToDepth", "Split", "SplitV", "Squeeze", "StopGradient"),
    *("StridedSlice", "StridedSliceGrad", "Sub", "Sum", "TensorListConcatV2"),
    *("TensorListFromTensor", "TensorListGather", "TensorListGetItem", "TensorListPopBack"),
    *("TensorListPushBack", "TensorListSetItem", "TensorListStack", "TensorScatterAdd"),
    *("TensorScatterUpdate", "Tile", "Transpose", "Unpack", "UnsortedSegmentSum"),
}
_PRODUCTS = {
    *("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Conv2D", "Conv2DBackpropFilter"),
    *("Conv2DBackpropInput", "Conv3D", "Conv3DBackpropFilterV2", "Conv3DBackpropInputV2"),
    *("DepthwiseConv2dNative", "DepthwiseConv2dNativeBackpropFilter"),
    *("DepthwiseConv2dNativeBackpropInput", "Einsum", "MatMul", "Mul"),
    *("MulNoNan", "SparseTensorDenseMatMul"),
}
_QUOTIENTS = {"Div", "DivNoNan", "RealDiv"}
# They multiply the powers of the loss scale.
_EXPONENTS = {
    "Inv": -1.0,
    "L2Loss": 2.0,
    "Reciprocal": -1.0,
    "Rsqrt": -0.5,
    "Sqrt": 0.5,
    "Square": 2.0,
    "SquaredDifference": 2.0,
}
# They keep a power that all operands have. With operands of several powers they have none.
_COMPARED = {
    *("ClipByValue", "Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "Maximum"),
    *("Minimum", "NotEqual"),
}
_COMPARISONS = {"Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "NotEqual"}
_CHOICES = {"Select", "SelectV2"}
_INDEPENDENT = {
    *("ArgMax", "ArgMin", "BroadcastGradientArgs", "IsFinite", "IsInf", "IsNan", "OnesLike"),
    *("Rank", "Shape", "ShapeN", "Sign", "Size", "TensorListElementShape", "TensorListLength"),
}
_NONLINEAR = {
    *("Atan", "Atan2", "Ceil", "Cos", "Cosh", "Elu", "Erf", "Exp", "Expm1", "Floor", "FloorDiv"),
    *("FloorMod", "Log", "Log1p", "LogSoftmax", "Pow", "Relu6", "Rint", "Round", "Selu"),
    *("Sigmoid", "Sin", "Sinh", "Softmax", "Softplus", "Softsign", "Tan", "Tanh"),
}
_ZEROS = {"EmptyTensorList", "TensorListReserve", "ZerosLike"}
_LARGEST_ZEROS = 2**16  # elements of a constant that is looked at
_MOST_LOOKED_AT = 1000  # tensors, to find out whether one is zeros


def is_mixed(dependence: Dependence) -> bool:
    """Whether a tensor is a sum of terms with different powers."""
    return not isinstance(dependence, Nonlinear) and len(dependence) > 1


@dataclass
class ScalePowers:
    """The dependence of the tensors of a graph on the loss scale of one optimizer.

    Attributes:
        graph: The graph.
        scale: The tensors that are that loss scale.
        handles: The names of the tensors of the graph that are handles of its variable.
        end: How many operations of the graph are read.
        first_mixed: The first operation that adds terms with different powers.
        first_product: The first one that multiplies by the loss scale.
    """

    graph: Any
    scale: Sequence[tf.Tensor]
    handles: frozenset[str] = frozenset()
    end: int | None = None
    first_mixed: tf.Operation | None = None
    first_product: tf.Operation | None = None
    _known: dict[str, Dependence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._known.update((each.name, SCALED) for each in self.scale)
        self._is_scale = set(self._known)
        self._known.update(dict.fromkeys(self.handles, UNKNOWN))
        for operation in self.graph.get_operations()[: self.end]:
            _add(self._known, operation, is_backward=False)
            self._note(operation)

    def of(self, tensor: tf.Tensor) -> Dependence:
        """Returns the dependence of a tensor of the graph."""
        return self._known.get(tensor.name, CONSTANT)

    def inputs_that_depend(self, operation: tf.Operation) -> list[tf.Tensor]:
        """Returns the operands of an operation that depend on the loss scale, zeros apart."""
        return [each for each in operation.inputs if self.of(each) not in (CONSTANT, ZERO)]

    def _note(self, operation: tf.Operation) -> None:
        """Keeps the first operations of their sort."""
        outputs = operation.outputs
        if not outputs or outputs[0].name not in self._known:
            return
        if self.first_mixed is None and is_mixed(self._known[outputs[0].name]):
            self.first_mixed = operation
        if operation.type == "Cast" and operation.inputs[0].name in self._is_scale:
            self._is_scale.add(outputs[0].name)
        if self.first_product is None and operation.type == "Mul":
            factors = {each.name for each in operation.inputs}
            if factors & self._is_scale:
                self.first_product = operation


def _add(known: dict[str, Dependence], operation: tf.Operation, is_backward: bool) -> None:
    """Adds the dependence of the outputs of an operation, unless they do not depend on the scale.

    Args:
        known: The dependence of tensors by name, without those that are constant.
        operation: The operation; those of its inputs are in `known`.
        is_backward: Whether it is in a function of a backward pass.
    """
    inputs = operation.inputs
    found = [known.get(each.name, CONSTANT) for each in inputs]
    if all(each is CONSTANT for each in found):
        if operation.type in _ZEROS:
            known.update((each.name, ZERO) for each in operation.outputs)
        return
    is_backward = is_backward or "gradient_tape/" in operation.name
    results = _dependences(operation, inputs, found, is_backward)

    # The handle stands for the value of a variable. What is added to a variable comes after
    # another step, which is not read here.
    is_set = operation.type == "AssignVariableOp"
    is_added = operation.type.startswith("AssignAdd")
    if (is_set or is_added) and found[1] not in (CONSTANT, ZERO):
        known[inputs[0].name] = found[1] if is_set else UNKNOWN

    for output, result in zip(operation.outputs, results, strict=True):
        is_known = output.name in known  # the loss scale itself
        # Indices and shapes do not depend on the scale, and a condition has no power of it.
        is_condition = output.dtype == tf.bool and isinstance(result, Nonlinear)
        can_depend = is_condition or _is_term(output)
        if can_depend and result != CONSTANT and not is_known:
            known[output.name] = result


def _dependences(
    operation: tf.Operation, inputs: Any, found: Sequence[Dependence], is_backward: bool
) -> list[Dependence]:
    """Returns the dependence of each output."""
    kind = operation.type
    if kind in CALLS or kind in BRANCHES or kind in LOOPS:
        return _of_functions(operation, inputs, found, is_backward)
    if kind == "IdentityN":
        return list(found)
    if kind in _INDEPENDENT or kind in _ZEROS:
        return [ZERO if kind in _ZEROS else CONSTANT] * len(operation.outputs)
    return [_dependence(operation, inputs, found, is_backward)] * len(operation.outputs)


def _dependence(
    operation: tf.Operation, inputs: Any, found: Sequence[Dependence], is_backward: bool
) -> Dependence:
    kind = operation.type
    broken = [each for each in found if isinstance(each, Nonlinear)]
    if broken:  # preferably one whose operation is known
        return next((each for each in broken if each.operation is not None), UNKNOWN)
    powers: list[Powers] = [each for each in found if not isinstance(each, Nonlinear)]
    rule = _RULES.get(kind)
    if rule:
        return rule(operation, inputs, powers)
    if kind in _NONLINEAR and not is_backward:
        return Nonlinear(operation)
    # The backward pass of an operation is linear in the gradient that it gets.
    dependent = [each for each in powers if each not in (CONSTANT, ZERO)]
    if is_backward and len(dependent) == 1:
        return dependent[0]
    return ZERO if is_backward and not dependent else UNKNOWN


def _sum(operation: tf.Operation, inputs: Any, powers: Sequence[Powers]) -> Dependence:
    terms = [pair for pair in zip(inputs, powers, strict=True) if _is_term(pair[0])]
    if len({each for _, each in terms if each}) > 1:
        terms = [
            (tensor, each) for tensor, each in terms if each != CONSTANT or not _is_zero(tensor)
        ]
    return _bounded(frozenset[float]().union(*(each for _, each in terms)))


def _is_term(tensor: tf.Tensor) -> bool:
    """Whether an operand is a number, and no index, shape or condition."""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex or tensor.dtype == tf.variant)


def _product(operation: tf.Operation, inputs: Any, powers: Sequence[Powers]) -> Dependence:
    result: Powers = CONSTANT
    for each in powers:
        if each != CONSTANT:
            result = frozenset(mine + its for mine in result for its in each)
    return _bounded(result)


def _quotient(operation: tf.Operation, inputs: Any, powers: Sequence[Powers]) -> Dependence:
    above, below = powers
    if len(below) > 1:
        return Nonlinear(operation)
    return frozenset(power - sum(below) for power in above)


def _exponent(operation: tf.Operation, inputs: Any, powers: Sequence[Powers]) -> Dependence:
    exponent, terms = _EXPONENTS[operation.type], frozenset[float]().union(*powers)
    if len(terms) > 1:
        return Nonlinear(operation)
    return frozenset(exponent * power for power in terms)


def _power(operation: tf.Operation, inputs: Any, powers: Sequence[Powers]) -> Dependence:
    exponent = tf.get_static_value(inputs[1])
    is_one = exponent is not None and exponent.size == 1
    if not is_one or powers[1] != CONSTANT or len(powers[0]) > 1:
        return Nonlinear(operation)
    return frozenset(float(exponent) * power for power in powers[0])


def _compared(operation: tf.Operation, inputs: Any, powers: Sequence[Powers]) -> Dependence:
    terms = frozenset[float]()
    for tensor, each in zip(inputs, powers, strict=True):
        if each != CONSTANT or not _is_zero(tensor):
            terms |= each
    if len(terms) > 1:
        return Nonlinear(operation)
    return CONSTANT if operation.type in _COMPARISONS else terms


def _bounded(powers: Powers) -> Dependence:
    return powers if len(powers) <= _MOST_POWERS else UNKNOWN


_Rule: TypeAlias = Callable[[tf.Operation, Any, Sequence[Powers]], Dependence]
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_LINEAR, _sum),
    # The first operand is the condition.
    **dict.fromkeys(
        _CHOICES, lambda operation, inputs, powers: _sum(operation, inputs[1:], powers[1:])
    ),
    **dict.fromkeys(_PRODUCTS, _product),
    **dict.fromkeys(_QUOTIENTS, _quotient),
    **dict.fromkeys(_EXPONENTS, _exponent),
    **dict.fromkeys(_COMPARED, _compared),
    "Pow": _power,
    "ReadVariableOp": lambda operation, inputs, powers: powers[0],  # of the handle
}


def _is_zero(tensor: tf.Tensor, known: dict[str, bool] | None = None) -> bool:
    """Whether a tensor is known to be all zeros, from constants.

    The derivative of what a tape does not watch is zeros, and so is what follows from these.
    """
    known = {} if known is None else known
    operation, name = tensor.op, tensor.name
    if name in known or len(known) > _MOST_LOOKED_AT:
        return known.get(name, False)
    known[name] = False
    kind, numbers = operation.type, [each for each in operation.inputs if _is_term(each)]
    if kind in _ZEROS:
        result = True
    elif kind == "Const":
        is_small = _is_term(tensor) and math.prod(tensor.shape) <= _LARGEST_ZEROS
        value = tf.get_static_value(tensor) if is_small else None
        result = value is not None and not value.any()
    elif not numbers:
        result = False
    elif kind in _LINEAR or kind in ("Fill", "Square", "Sqrt"):
        result = all(_is_zero(each, known) for each in numbers)
    elif kind in _QUOTIENTS:
        result = _is_zero(numbers[0], known)
    elif kind in _PRODUCTS or "gradient_tape/" in operation.name:
        result = any(_is_zero(each, known) for each in numbers)
    else:
        result = False
    known[name] = result
    return result


def _of_functions(
    operation: tf.Operation, inputs: Any, found: Sequence[Dependence], is_backward: bool
) -> list[Dependence]:
    """Returns the dependence of the outputs of a call, a branch or a loop."""
    bodies = bodies_of(operation)
    unknown: list[Dependence] = [UNKNOWN] * len(operation.outputs)
    if not bodies:
        return unknown
    if operation.type in CALLS:
        return _of_body(bodies[0], found, is_backward) or unknown
    if operation.type in BRANCHES:
        if isinstance(found[0], Nonlinear):
            return [found[0]] * len(operation.outputs)
        results = [_of_body(body, found[1:], is_backward) or unknown for body in bodies]
        return [_joined(each) for each in zip(*results, strict=True)]

    body = bodies[-1]  # the other one is the condition
    started = []
    for tensor, dependence in zip(inputs, found, strict=True):
        is_constant = dependence == CONSTANT and tensor.dtype.is_floating
        started.append(ZERO if is_constant and _is_zero(tensor) else dependence)
    found = started
    for _ in range(_MOST_PASSES):
        after = _of_body(body, found, is_backward) or unknown
        joined = [_joined(each) for each in zip(found, after, strict=True)]
        if joined == found:
            return joined
        found = joined
    return unknown


def _joined(found: Iterable[Dependence]) -> Dependence:
    """Returns the dependence of a tensor that is one of several."""
    several = {each for each in found if each != ZERO}
    if len(several) > 1:
        return UNKNOWN
    return next(iter(several), ZERO)


def _of_body(body: Any, found: Sequence[Dependence], is_backward: bool) -> list[Dependence] | None:
    """Returns the dependence of the outputs of a function; `None` if it gets other arguments."""
    if len(body.inputs) != len(found):
        return None
    pairs = zip(body.inputs, found, strict=True)
    known = {tensor.name: each for tensor, each in pairs if each != CONSTANT}
    is_backward = is_backward or "backward" in body.name
    for operation in body.get_operations():
        _add(known, operation, is_backward)
    return [known.get(each.name, CONSTANT) for each in body.outputs]
