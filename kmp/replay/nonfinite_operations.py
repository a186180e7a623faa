"""Finds the operations of an eager pass that make NaN or Inf out of finite values.

And values that float16 loses: constants, and results that become 0.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from kmp.records.replay import NonfiniteOperation
from kmp.replay.arrays import array_of
from kmp.replay.layer_marks import LayerMarks
from kmp.replay.output_errors import is_eager_float
from kmp.utils.float_formats import FLOAT16, FLOAT32

_MOST = 8
# Elementwise operations whose result is 0 only for an operand that is 0, or by underflow: unlike a
# difference.
_WITHOUT_CANCELLATION = (
    "Cast",
    "Div",
    "Exp",
    "Mul",
    "Pow",
    "RealDiv",
    "Reciprocal",
    "Rsqrt",
    "Square",
)

# How many of an operation's inputs and outputs are values: what a fused normalization keeps for its
# gradient may be any bits on a GPU, NaN too.
_OPERANDS = {"FusedBatchNormGradV3": 3}
_RESULTS = {"FusedBatchNormV3": 3}

Nonfinite = Literal["inf", "nan"]


class FloatValues(NamedTuple):
    """A float tensor of an operation.

    Attributes:
        dtype: The name of its dtype: NumPy has none for bfloat16.
        array: Its values.
    """

    dtype: str
    array: np.ndarray

    @property
    def is_scalar(self) -> bool:
        """Whether it has no dimensions."""
        return self.array.ndim == 0

    @property
    def has_nan(self) -> bool:
        """Whether a value is NaN."""
        return bool(np.isnan(self.array).any())

    @property
    def has_inf(self) -> bool:
        """Whether a value is infinite."""
        return bool(np.isinf(self.array).any())

    @property
    def is_finite(self) -> bool:
        """Whether no value is NaN or infinite."""
        return bool(np.isfinite(self.array).all())


class _CastLoss(NamedTuple):
    """The share of values that the last cast lost, and the layer during it."""

    layer: str
    share: float


class NonfiniteOperations:
    """Records the first operations that make NaN or Inf out of values without it.

    Of each layer, the first that returns Inf and the first that returns NaN: many layers have an
    Inf that does no harm, such as a mask.

    Args:
        marks: The layers of the pass.

    Attributes:
        found: The operations.
        layers_done: For each of them, how many layers had returned.
        is_backward: Whether the backward pass runs.
        underflows: The largest share of the results of a forward operation that are 0 in float16,
            though its operands are not, by layer.
        lost_constants: The scalars of float32 operations that are zero or infinite in float16, by
            layer.
    """

    def __init__(self, marks: LayerMarks) -> None:
        self.found: list[NonfiniteOperation] = []
        self.layers_done: list[int] = []
        self.is_backward = False
        self.underflows: dict[str, float] = {}
        self.lost_constants: dict[str, list[float]] = {}
        self._marks = marks
        self._cast: _CastLoss | None = None

    def observe(self, operation: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Checks an operation; see `watching_operations`."""
        results = float_values(outputs[: _RESULTS.get(operation, len(outputs))])
        value = _nonfinite_value(operation, results)
        if self.is_backward and value is None:
            return
        operands = float_values(inputs[: _OPERANDS.get(operation, len(inputs))])
        if not self.is_backward:
            self._record_lost_constants(operands)
            self._record_underflow(operation, operands, results)
        if value is None or not self._is_wanted(value) or not _is_origin(value, operands):
            return
        self.layers_done.append(len(self._marks.called))
        self.found.append(self._record(operation, value, results[0].dtype, operands))

    def _is_wanted(self, value: Nonfinite) -> bool:
        """Whether to record an operation that returns this value in the layer that runs now."""
        place = self._marks.layer, self.is_backward, value
        if place in [(each.layer, each.is_backward, each.value) for each in self.found]:
            return False
        if len(self.found) < _MOST:
            return True
        return value == "nan" and all(each.value == "inf" for each in self.found)

    def _record(
        self, operation: str, value: Nonfinite, dtype: str, operands: Sequence[FloatValues]
    ) -> NonfiniteOperation:
        scalars = [float(each.array) for each in operands if each.is_scalar]
        finite = [scalar for scalar in scalars if math.isfinite(scalar)]
        constant = float(np.clip(finite[0], -FLOAT32.max, FLOAT32.max)) if finite else None
        largest = max((_largest(each.array) for each in operands), default=0.0)
        divisor = _divisor(operation, operands)
        radicand = operands[0].array if operation == "Pow" and operands else divisor
        return NonfiniteOperation(
            layer=self._marks.layer,
            operation=operation,
            dtype=dtype,
            value=value,
            largest_input=min(largest, FLOAT32.max),
            smallest_input=float(np.min(np.abs(divisor), initial=FLOAT32.max)),
            constant=constant,
            is_backward=self.is_backward,
            has_infinite_constant=any(map(math.isinf, scalars)),
            has_negative_input=bool((radicand < 0).any()),
        )

    def _record_underflow(
        self, operation: str, operands: Sequence[FloatValues], results: Sequence[FloatValues]
    ) -> None:
        layer = self._marks.layer
        if self._cast and self._cast.layer != layer:
            # The inputs of a layer are cast before it is called.
            self._add_underflow(layer, self._cast.share)
            self._cast = None
        if operation not in _WITHOUT_CANCELLATION:
            return
        if not operands or not results:  # without operands: the zeros of a mask
            return
        if results[0].dtype != FLOAT16.name:
            return
        share = _lost_share(operands, results[0])
        if not share:
            return
        self._add_underflow(layer, share)
        if operation == "Cast":
            self._cast = _CastLoss(layer, share)

    def _add_underflow(self, layer: str, share: float) -> None:
        self.underflows[layer] = max(share, self.underflows.get(layer, 0.0))

    def _record_lost_constants(self, operands: Sequence[FloatValues]) -> None:
        for operand in operands:
            if not operand.is_scalar or operand.dtype != FLOAT32.name:
                continue
            value = float(operand.array)
            if not _is_lost_in_float16(value):
                continue
            constants = self.lost_constants.setdefault(self._marks.layer, [])
            if value not in constants and len(constants) < _MOST:
                constants.append(value)


def _nonfinite_value(operation: str, results: Sequence[FloatValues]) -> Nonfinite | None:
    """Returns what an operation makes, or `None` if all is finite or it only reads a variable."""
    if operation == "ReadVariableOp" or all(each.is_finite for each in results):
        return None
    return "nan" if any(each.has_nan for each in results) else "inf"


def _is_origin(value: Nonfinite, operands: Sequence[FloatValues]) -> bool:
    """Whether an operation makes NaN or Inf out of operands that do not have it."""
    if any(each.has_nan for each in operands):
        return False
    if value == "nan":
        return True
    arrays = [each for each in operands if not each.is_scalar]
    # Beside arrays, a scalar is a constant.
    return not any(each.has_inf for each in arrays or operands)


def _divisor(operation: str, operands: Sequence[FloatValues]) -> np.ndarray:
    """Returns the operand that divides, or whose root is taken.

    The last one, or the base of a negative power.
    """
    if not operands:
        return np.zeros(0)
    has_negative_exponent = operation == "Pow" and bool((operands[-1].array < 0).all())
    index = 0 if has_negative_exponent else -1
    return operands[index].array.astype(np.float32)


def _lost_share(operands: Sequence[FloatValues], result: FloatValues) -> float:
    """Returns the share of results that are 0 though no operand is."""
    is_lost = result.array == 0
    for operand in operands:
        is_lost = is_lost & (operand.array != 0)
    return float(np.mean(is_lost)) if is_lost.size else 0.0


def _is_lost_in_float16(value: float) -> bool:
    """Whether a number that is not zero or infinite is so in float16."""
    size = abs(value)
    is_zero = 0 < size <= 2.0**FLOAT16.flush_exponent
    return is_zero or FLOAT16.max < size < math.inf


def _largest(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)].astype(np.float64)
    return float(np.max(np.abs(finite), initial=0.0))


def float_values(tensors: Sequence[Any]) -> list[FloatValues]:
    """Returns the float tensors among the inputs or outputs of an operation."""
    return [
        FloatValues(tensor.dtype.name, array_of(tensor))
        for tensor in tensors
        if is_eager_float(tensor)
    ]
