"""Looks at the operations of a pass, one by one."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from kmp.backend.step_graph import StepGraph
from kmp.backend.step_places import LayerCall
from kmp.gradients.step_facts import line_of
from kmp.numerics import tensorflow_function
from kmp.numerics.losses import exact_result, is_elementwise, is_long_sum
from kmp.records.replay import LossyOperation, NonfiniteOperation
from kmp.replay.arrays import array_of
from kmp.replay.layer_results import counts_of_nonfinite, sample
from kmp.replay.lossy_operations import classify_operation, worst_by_layer
from kmp.replay.nonfinite_operations import (
    FloatValues,
    Nonfinite,
    NonfiniteOperations,
    described,
)
from kmp.replay.step_program import ProgramView
from kmp.utils.float_formats import DTYPES_16_BIT, FLOAT16, FLOAT32

_MOST_VALUES = 2**14  # of an operand: more would not change the statistics

# How many of an operation's inputs and outputs are values: what a fused normalization keeps for its
# gradient may be any bits on a GPU, NaN too.
_OPERANDS = {"FusedBatchNormGradV3": 3}
_RESULTS = {"FusedBatchNormV3": 3}
_PASSING_ON = "Const", "ReadVariableOp"  # what they return is not theirs


class _Watched(NamedTuple):
    """An operation of a program.

    Attributes:
        position: Where it is in the graph of the step.
        operation: The operation.
        layer: The path of its layer, or `LOSS_FUNCTION`.
        is_backward: Whether it is of the backward pass.
        operands: The floats that it gets, by their names in the graph of the step.
        results: Those that it returns.
        dtypes: Those of the results in the program.
    """

    position: int
    operation: tf.Operation
    layer: str
    is_backward: bool
    operands: list[tf.Tensor]
    results: list[tf.Tensor]
    dtypes: list[str]


class _Sampled(NamedTuple):
    """An operation of which the program returns values.

    Attributes:
        watched: The operation.
        dtypes: The dtypes of the operands, and of the result.
    """

    watched: _Watched
    dtypes: list[str]


class OperationWatch:
    """Looks at the operations of a program that runs them one by one.

    Args:
        step: The step.
        path_of: Returns the path of the layer of a call.
        examples: The number of examples in the batch.
    """

    def __init__(
        self, step: StepGraph, path_of: Callable[[LayerCall | None], str], examples: int
    ) -> None:
        self._step, self._path_of, self._examples = step, path_of, examples
        self._watched: list[_Watched] = []
        self._position: dict[str, int] = {}  # of the counts of a tensor, by its name
        self._sampled: list[_Sampled] = []
        self._scalars: list[str] = []  # the layers of scalar operands in float32

    def add(self, view: ProgramView) -> Any:
        """Adds the operations that measure to a program, and returns what it returns of them."""
        counts: list[tf.Tensor] = []
        samples: list[list[tf.Tensor]] = []
        scalars: list[tf.Tensor] = []
        places, names = self._step.places, view.operations
        for index, operation in enumerate(self._step.graph.get_operations()):
            if operation.name not in names or not operation.outputs:
                continue
            owner, is_backward = places.owners[index], places.are_backward[index]
            layer = self._path_of(owner)

            # Where NaN and Inf are: of both passes.
            operands = _floats(operation.inputs[: _OPERANDS.get(operation.type)])
            results = _floats(operation.outputs[: _RESULTS.get(operation.type)])
            for tensor in (*operands, *results):
                if tensor.name not in self._position:
                    self._position[tensor.name] = len(counts)
                    counts.append(counts_of_nonfinite(view.find(tensor)))
            dtypes = [view.find(each).dtype.name for each in results]
            watched = _Watched(index, operation, layer, is_backward, operands, results, dtypes)
            self._watched.append(watched)

            # What 16 bits lose: of the forward pass.
            if is_backward:
                continue
            for each in operands:
                found = view.find(each)
                if found.shape.rank == 0 and found.dtype.name == FLOAT32.name:
                    scalars.append(found)
                    self._scalars.append(layer)
            if found_samples := self._samples_of(view, watched):
                samples.append(found_samples)
        return tf.stack(counts), samples, scalars

    def _samples_of(self, view: ProgramView, watched: _Watched) -> list[tf.Tensor]:
        """Returns values of the operands and the result that belong together."""
        operation = watched.operation
        operands = [view.find(each) for each in watched.operands]
        result = view.find(operation.outputs[0])
        if operation.type == "Cast" and result.dtype.is_integer:
            result = view.find(operation.inputs[0])
        if not operands or result.dtype.name not in DTYPES_16_BIT or not _is_known(operation):
            return []
        dtypes = [each.dtype.name for each in (*operands, result)]
        self._sampled.append(_Sampled(watched, dtypes))
        sampled = sample(result, self._examples, _MOST_VALUES)
        if sampled is not result and not is_long_sum(tensorflow_function(operation.type)):
            shape = tf.shape(result)
            operands = [
                each if each.shape.rank == 0 else tf.broadcast_to(each, shape) for each in operands
            ]
        return [*(sample(each, self._examples, _MOST_VALUES) for each in operands), sampled]

    def read(
        self, measured: Any, values_of: Callable[[list[tf.Tensor]], list[tf.Tensor]]
    ) -> tuple[NonfiniteOperations, list[LossyOperation]]:
        """Returns what a run has shown.

        Args:
            measured: What the program has returned.
            values_of: Runs the pass once more for the values of tensors of the graph.
        """
        counts, samples, scalars = measured
        found = NonfiniteOperations()
        for layer, scalar in zip(self._scalars, scalars, strict=True):
            found.add_constant(layer, float(scalar))
        lossy: list[LossyOperation] = []
        for sampled, tensors in zip(self._sampled, samples, strict=True):
            layer, kind = sampled.watched.layer, sampled.watched.operation.type
            *operands, result = (
                FloatValues(dtype, array_of(each))
                for dtype, each in zip(sampled.dtypes, tensors, strict=True)
            )
            arrays = [each.array for each in operands]
            is_cast = kind == "Cast"
            exact = arrays[0] if is_cast else exact_result(tensorflow_function(kind), arrays)
            if exact is not None and result.dtype == FLOAT16.name:
                found.add_underflow(layer, exact, result.array)
            if not is_cast or sampled.watched.operation.outputs[0].dtype.is_integer:
                lossy += classify_operation(layer, kind, operands, result)
        self._add_nonfinite(found, array_of(counts)[:, 2:] > 0, values_of)
        return found, worst_by_layer(lossy)

    def _add_nonfinite(
        self,
        found: NonfiniteOperations,
        has: np.ndarray,
        values_of: Callable[[list[tf.Tensor]], list[tf.Tensor]],
    ) -> None:
        """Adds the operations that make NaN or Inf.

        Args:
            found: What was found.
            has: Whether each tensor has -Inf, Inf and NaN: shape `(tensors, 3)`.
            values_of: As in `read`.
        """
        origins: list[_Watched] = []
        for watched in self._watched:
            results = has[[self._position[each.name] for each in watched.results]]
            if not results.any() or watched.operation.type in _PASSING_ON:
                continue
            value: Nonfinite = "nan" if results[:, 2].any() else "inf"
            if not found.is_wanted(watched.layer, value, is_backward=watched.is_backward):
                continue
            if not self._is_origin(watched, value, has):
                continue
            before = [call for call in self._step.calls if call.operations.stop <= watched.position]
            found.layers_done.append(len({self._path_of(call) for call in before}))
            new = NonfiniteOperation(
                watched.layer,
                watched.operation.type,
                watched.dtypes[0],
                value,
                largest_input=0,
                smallest_input=0,
                constant=None,
                is_backward=watched.is_backward,
                code=line_of(watched.operation),
            )
            found.found.append(new)
            origins.append(watched)
        if not origins:
            return

        # Another run, for the values of their operands.
        values = iter(values_of([each for watched in origins for each in watched.operands]))
        for index, watched in enumerate(origins):
            tensors = [next(values) for _ in watched.operands]
            operands = [FloatValues(each.dtype.name, array_of(each)) for each in tensors]
            found.found[index] = described(found.found[index], operands)

    def _is_origin(self, watched: _Watched, value: Nonfinite, has: np.ndarray) -> bool:
        """Whether an operation makes NaN or Inf out of operands that do not have it."""
        operands = [has[self._position[each.name]] for each in watched.operands]
        if any(each[2] for each in operands):
            return False
        if value == "nan":
            return True
        known = list(zip(operands, watched.operands, strict=True))
        arrays = [each for each, tensor in known if tensor.shape.rank != 0]
        computed = [each for each, tensor in known if tensor.op.type != "Const"]
        # Beside arrays, a scalar is a constant.
        return not any(each[:2].any() for each in arrays or computed or operands)


def _is_known(operation: tf.Operation) -> bool:
    """Whether it is known what an operation makes of values of its operands."""
    if operation.type == "BiasAdd":
        return operation.get_attr("data_format") != b"NCHW"  # the bias broadcasts otherwise
    function = tensorflow_function(operation.type)
    return operation.type == "Cast" or is_elementwise(function) or is_long_sum(function)


def _floats(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return [each for each in tensors if each.dtype.is_floating]
