"""The operations of a pass that make NaN or Inf out of finite values.

The constants and results that float16 makes 0 or Inf are here too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from kmp.records.replay import NonfiniteOperation
from kmp.utils.float_formats import FLOAT16, FLOAT32

MOST_NONFINITE = 8

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


@dataclass
class NonfiniteOperations:
    """The first operations of a pass that make NaN or Inf out of values without it.

    Each layer has the first that returns Inf and the first that returns NaN, because many layers
    have an Inf that does no harm, such as a mask.

    Attributes:
        found: The operations.
        layers_done: For each of them, how many layers had returned.
        underflows: The largest share of the results of a forward operation that are 0 in float16
            and not in float32, by layer.
        lost_constants: The scalars of float32 operations that are zero or infinite in float16, by
            layer.
    """

    found: list[NonfiniteOperation] = field(default_factory=list)
    layers_done: list[int] = field(default_factory=list)
    underflows: dict[str, float] = field(default_factory=dict)
    lost_constants: dict[str, list[float]] = field(default_factory=dict)

    def add_constant(self, layer: str, value: float) -> None:
        """Adds a scalar of a float32 operation, if float16 loses it."""
        size = abs(value)
        becomes_zero = 0 < size <= 2.0**FLOAT16.flush_exponent
        becomes_inf = FLOAT16.max < size < math.inf
        if not (becomes_zero or becomes_inf):
            return
        constants = self.lost_constants.setdefault(layer, [])
        if value not in constants and len(constants) < MOST_NONFINITE:
            constants.append(value)

    def add_underflow(self, layer: str, exact: np.ndarray, result: np.ndarray) -> None:
        """Adds the results of an operation that are 0 in float16 and not in float32."""
        with np.errstate(over="ignore"):
            is_lost = (result == 0) & (exact.astype(np.float32) != 0)
        share = float(np.mean(is_lost)) if is_lost.size else 0.0
        if share:
            self.underflows[layer] = max(share, self.underflows.get(layer, 0.0))

    def is_wanted(self, layer: str, value: Nonfinite, *, is_backward: bool) -> bool:
        """Whether to record an operation that returns this value in a layer."""
        place = layer, is_backward, value
        if place in [(each.layer, each.is_backward, each.value) for each in self.found]:
            return False
        if len(self.found) < MOST_NONFINITE:
            return True
        return value == "nan" and all(each.value == "inf" for each in self.found)


def described(operation: NonfiniteOperation, operands: Sequence[FloatValues]) -> NonfiniteOperation:
    """Returns an operation with what its operands are."""
    scalars = [float(each.array) for each in operands if each.is_scalar]
    finite = [scalar for scalar in scalars if math.isfinite(scalar)]
    constant = float(np.clip(finite[0], -FLOAT32.max, FLOAT32.max)) if finite else None
    largest = 0.0
    for each in operands:
        values = each.array[np.isfinite(each.array)].astype(np.float64)
        largest = max(largest, float(np.max(np.abs(values), initial=0.0)))
    # What divides, or whose root is taken: the last operand, or the base of a negative power.
    divisor = radicand = np.zeros(0)
    if operands:
        is_power = operation.operation == "Pow"
        has_negative_exponent = is_power and bool((operands[-1].array < 0).all())
        divisor = operands[0 if has_negative_exponent else -1].array.astype(np.float32)
        radicand = operands[0].array if is_power else divisor
    return replace(
        operation,
        largest_input=min(largest, FLOAT32.max),
        smallest_input=float(np.min(np.abs(divisor), initial=FLOAT32.max)),
        constant=constant,
        has_infinite_constant=any(map(math.isinf, scalars)),
        has_negative_input=bool((radicand < 0).any()),
    )
