"""Finds the operations of an eager pass that make NaN or Inf out of finite values, and constants that float16 loses."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kmp.records import NonfiniteOperation
from kmp.replay.layer_marks import LayerMarks
from kmp.utils import FLOAT16, FLOAT32

_MOST = 8


class NonfiniteOperations:
    """Records the first operations that return NaN or Inf for finite inputs, or NaN for inputs without NaN.

    Args:
        marks: The layers of the pass.

    Attributes:
        found: The operations.
        layers_done: For each of them, how many layers had returned.
        is_backward: Whether the backward pass runs.
        lost_constants: The scalars of float32 operations that are zero or infinite in float16, by layer.
    """

    def __init__(self, marks: LayerMarks) -> None:
        self._marks = marks
        self.found: list[NonfiniteOperation] = []
        self.layers_done: list[int] = []
        self.is_backward = False
        self.lost_constants: dict[str, list[float]] = {}

    def observe(self, operation: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Checks an operation; see `watching_operations`."""
        if not self.is_backward:
            self._record_lost_constants(inputs)
        results = _float_values(outputs)
        if len(self.found) == _MOST or all(np.isfinite(values).all() for _, values in results):
            return
        operands = _float_values(inputs)
        has_nan = any(np.isnan(values).any() for _, values in results)
        if any(np.isnan(values).any() for _, values in operands):
            return
        if not has_nan and any(np.isinf(values).any() for _, values in operands):
            return
        finite = [np.abs(values[np.isfinite(values)]).astype(np.float64) for _, values in operands]
        scalars = [float(values) for _, values in operands if not np.ndim(values) and np.isfinite(values)]
        self.layers_done.append(len(self._marks.called))
        self.found.append(
            NonfiniteOperation(
                place=self._marks.place,
                operation=operation,
                dtype=results[0][0],
                value="nan" if has_nan else "inf",
                largest_input=min(max((part.max(initial=0.0) for part in finite), default=0.0), FLOAT32.max),
                smallest_input=min((part.min(initial=FLOAT32.max) for part in finite), default=0.0),
                constant=scalars[0] if scalars else None,
                is_backward=self.is_backward,
                has_infinite_constant=any(not np.ndim(values) and bool(np.isinf(values)) for _, values in operands),
            )
        )

    def _record_lost_constants(self, inputs: Sequence[Any]) -> None:
        for dtype, values in _float_values(inputs):
            if not values.ndim and dtype == FLOAT32.name and _is_lost(float(values)):
                constants = self.lost_constants.setdefault(self._marks.place, [])
                if float(values) not in constants and len(constants) < _MOST:
                    constants.append(float(values))


def _is_lost(value: float) -> bool:
    is_zero_or_infinite = abs(value) <= 2.0**FLOAT16.flush_exponent or abs(value) > FLOAT16.max
    return value != 0 and bool(np.isfinite(value)) and is_zero_or_infinite


def _float_values(tensors: Sequence[Any]) -> list[tuple[str, np.ndarray]]:
    floating = [tensor for tensor in tensors if isinstance(tensor, tf.Tensor) and tensor.dtype.is_floating]
    return [(tensor.dtype.name, np.asarray(tensor.numpy())) for tensor in floating]
