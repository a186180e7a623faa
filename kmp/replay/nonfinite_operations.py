"""Finds the operations of an eager pass that make NaN or Inf out of finite values, and constants that float16 loses."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kmp.records import NonfiniteOperation
from kmp.replay.layer_marks import LayerMarks, is_eager_float
from kmp.utils import FLOAT16, FLOAT32

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

Values = tuple[
    str, np.ndarray
]  # the dtype and the values of a float tensor; NumPy has no name for bfloat16


class NonfiniteOperations:
    """Records the first operations that return NaN or Inf for finite inputs, or NaN for inputs without NaN.

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
        self._marks = marks
        self.found: list[NonfiniteOperation] = []
        self.layers_done: list[int] = []
        self.is_backward = False
        self.underflows: dict[str, float] = {}
        self._cast: tuple[str, float] | None = (
            None  # the layer during the last cast, and the share that it lost
        )
        self.lost_constants: dict[str, list[float]] = {}

    def observe(self, operation: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Checks an operation; see `watching_operations`."""
        results = _float_values(outputs[: _RESULTS.get(operation, len(outputs))])
        is_finite = operation == "ReadVariableOp" or all(
            np.isfinite(values).all() for _, values in results
        )
        if self.is_backward and is_finite:
            return
        typed_operands = _float_values(inputs[: _OPERANDS.get(operation, len(inputs))])
        if not self.is_backward:
            self._record_lost_constants(typed_operands)
            self._record_underflow(operation, typed_operands, results)
        if is_finite:
            return
        operands = [values for _, values in typed_operands]
        has_nan = any(np.isnan(values).any() for _, values in results)
        if not self._is_wanted("nan" if has_nan else "inf") or any(
            np.isnan(values).any() for values in operands
        ):
            return
        arrays = [
            values for values in operands if np.ndim(values)
        ]  # beside them, a scalar is a constant
        if not has_nan and any(np.isinf(values).any() for values in arrays or operands):
            return
        scalars = [float(values) for values in operands if not np.ndim(values)]
        finite = [value for value in scalars if np.isfinite(value)]
        last = _last_operand(operation, operands)
        radicand = operands[0] if operation == "Pow" and operands else last
        self.layers_done.append(len(self._marks.called))
        self.found.append(
            NonfiniteOperation(
                layer=self._marks.layer,
                operation=operation,
                dtype=results[0][0],
                value="nan" if has_nan else "inf",
                largest_input=min(max(map(_largest, operands), default=0.0), FLOAT32.max),
                smallest_input=float(np.min(np.abs(last), initial=FLOAT32.max)),
                constant=next(
                    (float(np.clip(value, -FLOAT32.max, FLOAT32.max)) for value in finite), None
                ),
                is_backward=self.is_backward,
                has_infinite_constant=any(np.isinf(value) for value in scalars),
                has_negative_input=bool((radicand < 0).any()),
            )
        )

    def _is_wanted(self, value: str) -> bool:
        """Whether to record an operation that returns this value, `"inf"` or `"nan"`, in the layer that runs now."""
        found = [(other.layer, other.is_backward, other.value) for other in self.found]
        is_full = len(found) >= _MOST and not (
            value == "nan" and all(other.value == "inf" for other in self.found)
        )
        return not is_full and (self._marks.layer, self.is_backward, value) not in found

    def _record_underflow(
        self, operation: str, operands: Sequence[Values], results: Sequence[Values]
    ) -> None:
        layer = self._marks.layer
        if (
            self._cast and self._cast[0] != layer
        ):  # the inputs of a layer are cast before it is called
            self.underflows[layer] = max(self._cast[1], self.underflows.get(layer, 0.0))
            self._cast = None
        if operation not in _WITHOUT_CANCELLATION or not results or results[0][0] != FLOAT16.name:
            return
        if not operands:  # the zeros of a mask
            return
        lost = results[0][1] == 0
        for _, values in operands:
            lost = lost & (values != 0)
        share = float(np.mean(lost)) if lost.size else 0.0
        if share:
            self._cast = (layer, share) if operation == "Cast" else self._cast
            self.underflows[layer] = max(share, self.underflows.get(layer, 0.0))

    def _record_lost_constants(self, operands: Sequence[Values]) -> None:
        for value in [
            float(values) for dtype, values in operands if dtype == FLOAT32.name and not values.ndim
        ]:
            is_lost = (
                abs(value) <= 2.0**FLOAT16.flush_exponent or FLOAT16.max < abs(value) < math.inf
            )
            constants = self.lost_constants.get(self._marks.layer, [])
            if value and is_lost and value not in constants and len(constants) < _MOST:
                self.lost_constants[self._marks.layer] = [*constants, value]


def _last_operand(operation: str, operands: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the operand that divides or is taken the root of: the last one, or the base of a negative power."""
    if not operands:
        return np.zeros(0)
    has_negative_exponent = operation == "Pow" and bool((operands[-1] < 0).all())
    return operands[0 if has_negative_exponent else -1].astype(np.float32)


def _largest(values: np.ndarray) -> float:
    return float(np.max(np.abs(values[np.isfinite(values)].astype(np.float64)), initial=0.0))


def _float_values(tensors: Sequence[Any]) -> list[Values]:
    return [(tensor.dtype.name, np.asarray(tensor)) for tensor in tensors if is_eager_float(tensor)]
