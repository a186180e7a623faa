"""Reads in the graph of a training step how gradients depend on the loss scale."""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from kmp.backend.graph_operations import PASS_BUFFERS, bodies_of
from kmp.backend.promotion import line_of_user, stack_inside
from kmp.backend.scale_powers import CONSTANT, ZERO, Dependence, Nonlinear, ScalePowers, is_mixed
from kmp.backend.step_graph import AppliedGradients, StepGraph
from kmp.backend.step_places import LayerCall
from kmp.gradients.gradient_sampler import paths_of
from kmp.gradients.tensor_groups import values_of
from kmp.gradients.unscaling import is_overwritten
from kmp.records.step_facts import CodeLine, Scaling, StepFacts
from kmp.utils.float_formats import DTYPES_16_BIT

logger = logging.getLogger("kmp")

_MOST_LINES = 20
_MOST_BEFORE = 200  # operations before a gradient in which a division is looked for
# A frame of one of these files is in the stack of an operation that a tape has added.
_TAPE = ("eager/backprop.py", "eager/imperative_grad.py")
# Their result has as many bits as their operands.
_EXACT = PASS_BUFFERS | {
    *("Abs", "BroadcastTo", "Concat", "ConcatV2", "GatherNd", "GatherV2", "Max", "Maximum"),
    *("Min", "Minimum", "Neg", "Pack", "Pad", "PadV2", "Relu", "Select", "SelectV2", "Slice"),
    *("Split", "SplitV", "StridedSlice", "Tile", "Transpose", "Unpack"),
}


def facts_of(step: StepGraph, optimizer: Any) -> StepFacts | None:
    """Returns what the graph of a step says of the loss and the gradients of an optimizer.

    Args:
        step: What was recorded of the step.
        optimizer: One of its optimizers, which scales its loss.

    Returns:
        The facts, `None` if they are not known: the optimizer scales no loss in the step, or a part
        of the step is in a function, a branch or a loop. Also if reading fails, which never ends a
        training.
    """
    with _without_harm():
        if _is_known(step, optimizer):
            applied = [each for each in step.applied if each.optimizer is optimizer]
            return _facts_of(step, optimizer, applied)
    return None


@contextlib.contextmanager
def _without_harm() -> Iterator[None]:
    """Ends what fails in the context: a training goes on, and the facts are not known."""
    try:
        yield
    except Exception:
        logger.debug("The graph of the training step was not read.", exc_info=True)


def _is_known(step: StepGraph, optimizer: Any) -> bool:
    """Whether a graph has both the scaled loss and the update of an optimizer."""
    parts = (step.losses, step.applied)
    return step.is_complete and all(
        any(each.optimizer is optimizer for each in part) for part in parts
    )


def powers_of(step: StepGraph, optimizer: Any) -> ScalePowers:
    """Returns how the tensors of a step depend on the loss scale of an optimizer."""
    scale = [each.scale for each in step.scales if each.optimizer is optimizer]
    handles = _handles_of([optimizer.dynamic_scale], step.graph)
    return ScalePowers(step.graph, scale, handles, step.position or None)


def _handles_of(variables: Iterable[Any], graph: Any) -> frozenset[str]:
    """Returns the names of the tensors of a graph that are handles of variables."""
    handles = {id(getattr(each, "value", each).handle) for each in variables}
    captures = getattr(graph, "captures", ())
    return frozenset(inner.name for outer, inner in captures if id(outer) in handles)


class _Gradient(NamedTuple):
    """A gradient that is not scaled as `apply` expects."""

    scaling: Scaling
    path: str
    powers: Dependence
    operation: tf.Operation | None


def _facts_of(step: StepGraph, optimizer: Any, applied: Sequence[AppliedGradients]) -> StepFacts:
    losses = [each.loss for each in step.losses if each.optimizer is optimizer]
    in_16_bits = _operations_in_16_bits(step, losses)
    if not optimizer.rule.scales_loss:
        return StepFacts("right", operations_in_16_bits=in_16_bits)

    powers = powers_of(step, optimizer)
    found: list[_Gradient | None] = []
    for each in applied:
        found += _gradients(powers, each)
    wrong = [each for each in found if each and each.scaling != "unknown"]
    # What is not known to be zeros looks as if it were not scaled: another place has to show it.
    is_shown = _adds_loss(powers) or all(each and not is_mixed(each.powers) for each in found)
    if not is_shown:
        wrong = [each for each in wrong if each.scaling != "unscaled"]
    if not wrong:
        scaling: Scaling = "unknown" if any(found) else "right"
        return StepFacts(scaling, operations_in_16_bits=in_16_bits)

    # A change of gradients explains others that are unscaled, not the other way round.
    first = next((each for each in wrong if each.scaling != "unscaled"), wrong[0])
    same = [each.path for each in wrong if each.scaling == first.scaling]
    return StepFacts(
        scaling=first.scaling,
        operation=line_of(first.operation) if first.operation is not None else None,
        variables=list(dict.fromkeys(same)),
        are_all=len(same) == len(found),
        operations_in_16_bits=in_16_bits,
    )


def _gradients(powers: ScalePowers, applied: AppliedGradients) -> Iterator[_Gradient | None]:
    """Yields each gradient that is not scaled as `apply` expects, and `None` for the others."""
    expected = 0.0 if applied.are_unscaled else 1.0
    paths = paths_of(applied.variables)
    weights = _handles_of(applied.variables, powers.graph)
    for path, variable, gradient in zip(paths, applied.variables, applied.gradients, strict=True):
        if gradient is None or is_overwritten(variable):
            continue
        values = values_of(gradient)
        dependence = powers.of(values) if tf.is_symbolic_tensor(values) else ZERO
        if dependence in (ZERO, frozenset({expected})):
            yield None
        else:
            scaling, operation = _fault(powers, values, expected, weights)
            yield _Gradient(scaling, path, dependence, operation)


def _fault(
    powers: ScalePowers, gradient: tf.Tensor, expected: float, weights: frozenset[str]
) -> tuple[Scaling, tf.Operation | None]:
    """Returns what is wrong with a gradient, and the operation that makes it so.

    Args:
        powers: Of the graph.
        gradient: A gradient with another power than `apply` expects.
        expected: That power.
        weights: The names of the handles of the variables that are trained.
    """
    dependence = powers.of(gradient)
    if isinstance(dependence, Nonlinear):
        operation = dependence.operation
        is_of_scaled = any(map(_is_of_backward, _ancestors(powers, gradient)))
        return ("nonlinear", operation) if operation and is_of_scaled else ("unknown", None)
    if len(dependence) > 1:
        mixing = _mixing(powers, gradient)
        if not _is_of_backward(mixing):
            constant = [each for each in mixing.inputs if powers.of(each) == CONSTANT]
            # A variable may hold scaled gradients of earlier steps.
            if any(_may_be_of_earlier_steps(each, weights) for each in constant):
                return "unknown", None
            return "added", mixing
    elif max(dependence, default=0.0) > expected:
        return "multiplied", powers.first_product
    elif dependence != CONSTANT or not _is_derivative(gradient):
        scaling, operation = _division(powers, gradient, weights)
        if scaling != "unscaled":
            return scaling, operation
    return "unscaled", _adds_loss(powers) or powers.first_product


def _division(
    powers: ScalePowers, gradient: tf.Tensor, weights: frozenset[str]
) -> tuple[Scaling, tf.Operation | None]:
    """Returns what a step that divides gradients does, and the operation that divides."""
    divided = _division_before(powers, gradient, weights)
    if divided is None:
        return "unknown", None
    divisor, dividend = _operands_of_division(powers, divided)
    if any(map(_is_of_backward, _ancestors(powers, divisor))):
        return "nonlinear", divided  # by a norm of the gradients
    if powers.of(dividend) == CONSTANT and _may_be_of_earlier_steps(dividend, weights):
        return "unknown", None
    was_scaled = powers.of(dividend) != CONSTANT or not _is_derivative(dividend)
    return "divided" if was_scaled else "unscaled", divided


def _mixing(powers: ScalePowers, gradient: tf.Tensor) -> tf.Operation:
    """Returns the operation before a gradient that adds terms with different powers."""
    operation = gradient.op
    while True:
        mixed = [each for each in operation.inputs if is_mixed(powers.of(each))]
        if not mixed:
            return operation
        operation = mixed[0].op


def _adds_loss(powers: ScalePowers) -> tf.Operation | None:
    """Returns what adds a loss to a scaled one; `None` if nothing does before the backward pass."""
    mixed = powers.first_mixed
    return None if mixed is None or _is_of_backward(mixed) else mixed


def _division_before(
    powers: ScalePowers, gradient: tf.Tensor, weights: frozenset[str]
) -> tf.Operation | None:
    """Returns the operation before a gradient whose result has less powers than an operand.

    `None` if none is found: what lies between may be a clip of unscaled gradients.
    """
    power, waiting, seen = powers.of(gradient), [gradient.op], set[str]()
    while waiting and len(seen) < _MOST_BEFORE:
        operation = waiting.pop(0)
        seen.add(operation.name)
        dependent = powers.inputs_that_depend(operation)
        before = [each.op for each in dependent if powers.of(each) == power]
        if (dependent and not before) or _divides_unscaled(powers, operation, weights):
            return operation
        if not before:
            before = [each.op for each in operation.inputs]
        waiting += [each for each in before if each.name not in seen]
    return None


def _divides_unscaled(
    powers: ScalePowers, operation: tf.Operation, weights: frozenset[str]
) -> bool:
    """Whether a product is that of an unscaled gradient and what depends on the loss scale."""
    if operation.type != "Mul":
        return False
    constant = [each for each in operation.inputs if powers.of(each) == CONSTANT]
    if len(constant) != 1:
        return False
    return _is_derivative(constant[0]) or _may_be_of_earlier_steps(constant[0], weights)


def _operands_of_division(
    powers: ScalePowers, operation: tf.Operation
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns divisor and dividend of a division, or the factors of a product with a reciprocal."""
    operands = list(operation.inputs)
    if operation.type == "Mul":

        def lowest(tensor: tf.Tensor) -> float:
            dependence = powers.of(tensor)
            return 0.0 if isinstance(dependence, Nonlinear) else min(dependence, default=0.0)

        return min(operands, key=lowest), max(operands, key=lowest)
    return operands[-1], operands[0]


def _ancestors(powers: ScalePowers, tensor: tf.Tensor) -> Iterator[tf.Operation]:
    """Yields the operations that a tensor is computed by and that depend on the loss scale."""
    waiting, seen = [tensor.op], set[str]()
    while waiting:
        operation = waiting.pop()
        if operation.name not in seen:
            seen.add(operation.name)
            yield operation
            waiting += [each.op for each in powers.inputs_that_depend(operation)]


def _is_derivative(gradient: tf.Tensor) -> bool:
    """Whether a gradient that does not depend on the loss scale comes from a tape of this step.

    And not from a variable, such as a sum of gradients of earlier steps.
    """
    operation = gradient.op
    while operation.type in {*PASS_BUFFERS, "Cast"} and not _is_of_backward(operation):
        operation = operation.inputs[0].op
    return _is_of_backward(operation)


def _may_be_of_earlier_steps(tensor: tf.Tensor, weights: frozenset[str]) -> bool:
    """Whether a tensor is read from a variable that is none of the weights."""
    waiting = [tensor.op]
    for _ in range(_MOST_BEFORE):
        if not waiting:
            return False
        operation = waiting.pop()
        if operation.type == "ReadVariableOp":
            if operation.inputs[0].name not in weights:
                return True
            continue
        if operation.type in {*PASS_BUFFERS, "AddV2", "Cast", "Mul", "RealDiv", "Sub"}:
            waiting += [each.op for each in operation.inputs if not _is_of_backward(each.op)]
    return False


def _is_of_backward(operation: tf.Operation) -> bool:
    """Whether a tape has added an operation."""
    if "gradient_tape/" in operation.name:
        return True
    return any(frame.filename.endswith(_TAPE) for frame in operation.traceback)


def line_of(operation: tf.Operation) -> CodeLine:
    """Returns the line of the step that made an operation, if one of the user's own did.

    Not that which called the step, such as that with `fit`.
    """
    file, line = line_of_user(stack_inside(operation.traceback))
    dtype = operation.outputs[0].dtype.name if operation.outputs else ""
    return CodeLine(operation.type, dtype, file, line)


def _operations_in_16_bits(step: StepGraph, losses: Iterable[tf.Tensor]) -> list[CodeLine] | None:
    """Returns what rounds in 16 bits between the outputs of layers and losses.

    `None` if layers were not called in this graph, but in a function of it.
    """
    calls = _outermost(step.calls)
    if not calls or not all(call.outputs for call in calls):
        return None
    operations = step.graph.get_operations()
    inside = {each.name for call in calls for each in operations[call.operations]}
    needed, waiting = set[str](), [loss.op for loss in losses]
    while waiting:
        operation = waiting.pop()
        if operation.name not in needed and operation.name not in inside:
            needed.add(operation.name)
            waiting += [each.op for each in operation.inputs]
    depends, found = set(inside), dict[CodeLine, None]()
    for operation in operations[: step.position or None]:
        if operation.name not in needed or len(found) >= _MOST_LINES:
            continue
        if any(each.op.name in depends for each in operation.inputs):
            depends.add(operation.name)
            rounding = list(_that_round(operation))
            # Not the backward pass of a gradient that is a part of the loss.
            if rounding and not _is_of_backward(operation):
                found.update((line_of(each), None) for each in rounding)
    return list(found)


def _that_round(operation: tf.Operation) -> Iterator[tf.Operation]:
    """Yields an operation, or those of the functions that it calls, if they round in 16 bits."""
    bodies = bodies_of(operation)
    for body in bodies:
        for each in body.get_operations():
            yield from _that_round(each)
    dtypes = {each.dtype.name for each in operation.outputs}
    if not bodies and operation.type not in _EXACT and dtypes & set(DTYPES_16_BIT):
        yield operation


def _outermost(calls: Iterable[LayerCall]) -> list[LayerCall]:
    """Returns the calls that no other layer makes."""
    found: list[LayerCall] = []
    for call in sorted(calls, key=lambda each: (each.operations.start, -each.operations.stop)):
        if not found or call.operations.start >= found[-1].operations.stop:
            found.append(call)
    return found
