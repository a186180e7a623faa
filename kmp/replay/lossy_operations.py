"""The operations of a pass for whose finite results 16 bits are too few."""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from kmp.records.replay import LossyOperation
from kmp.replay.nonfinite_operations import FloatValues
from kmp.replay.output_errors import LARGEST_ERROR
from kmp.utils.float_formats import FORMATS_16_BIT

_SUMS = "Add", "AddV2", "Sub"
_PERIODIC = "Cos", "Sin", "Tan"
_LONG_SUMS = "Cumsum", "Sum"
# The largest argument for which the function is not exactly 1 in float32.
_SATURATING = {"Sigmoid": 16.6, "Tanh": 9.0}
_SMALL_DIFFERENCE = 0.25  # of the operands
_NOTED_ERROR = 0.01  # of results; smaller ones are their rounding
CLASSIFIED = {*_SUMS, *_PERIODIC, *_SATURATING, *_LONG_SUMS}

Kind = Literal["cancellation", "phase", "saturation", "lost_terms", "index"]


def classify_operation(
    layer: str, operation: str, operands: Sequence[FloatValues], result: FloatValues
) -> list[LossyOperation]:
    """Returns what an operation of the forward pass loses, beyond the rounding of its result.

    Args:
        layer: The path of its layer.
        operation: Its type, `"Cast"` or one of `CLASSIFIED`.
        operands: Values of its operands, which belong together.
        result: Those of its result; of a cast to integers its operand.
    """
    if operation == "Cast":
        return _lossy_cast(layer, result)
    if result.dtype not in FORMATS_16_BIT or not result.array.size:
        return []
    sampled = _sampled(operands, result)
    if sampled is None:
        return []
    arguments, values = sampled
    rounding = 2.0 ** -(FORMATS_16_BIT[result.dtype].fraction_bits + 1)
    if operation in _SUMS:
        has_constant = any(each.is_scalar for each in operands)
        losses = _losses_of_sum(np.abs(arguments), values, rounding, has_constant)
    elif operation in _PERIODIC:
        error = _relative_to_spread(rounding * _mean_size(arguments[0]), values)
        losses = [_Loss("phase", _mean_size(values), 1.0, error)]
    elif operation in _SATURATING:
        is_below = np.abs(arguments[0]) < _SATURATING[operation]
        share = float(np.mean(is_below & (np.abs(values) == 1.0)))
        losses = [_Loss("saturation", 1.0, share, share)]
    else:
        # Terms of a long sum that are lost in partial sums of the size of the result.
        terms = np.abs(arguments[0])
        is_lost = (terms > 0) & (terms <= rounding * float(np.max(np.abs(values))))
        share = float(np.mean(is_lost))
        losses = [_Loss("lost_terms", _mean_size(terms[is_lost]), share, share)]
        arguments = [values]
    largest = max(float(np.max(np.abs(each))) for each in arguments)
    return [
        LossyOperation(layer, operation, each.kind, result.dtype, largest, *each[1:])
        for each in losses
        if each.error > _NOTED_ERROR
    ]


def worst_by_layer(found: Iterable[LossyOperation]) -> list[LossyOperation]:
    """Returns the worst operation of each layer, the largest estimated error first."""
    worst: dict[str, LossyOperation] = {}
    for each in found:
        if each.layer not in worst or each.error > worst[each.layer].error:
            worst[each.layer] = each
    return sorted(worst.values(), key=lambda each: -each.error)


def _lossy_cast(layer: str, operand: FloatValues) -> list[LossyOperation]:
    """Returns a cast to integers of numbers between which 16 bits have no others."""
    sizes = np.abs(operand.array.astype(np.float32))
    limit = FORMATS_16_BIT[operand.dtype].max_exact_integer
    share = float(np.mean(sizes > limit)) if sizes.size else 0.0
    if share <= _NOTED_ERROR or not np.isfinite(sizes).all():
        return []
    largest, typical = float(sizes.max()), _mean_size(sizes)
    return [LossyOperation(layer, "Cast", "index", operand.dtype, largest, typical, share, share)]


class _Loss(NamedTuple):
    """What an operation loses: the kind of that, and its numbers as in `LossyOperation`."""

    kind: Kind
    typical: float
    share: float
    error: float


def _losses_of_sum(
    sizes: np.ndarray, values: np.ndarray, rounding: float, has_constant: bool
) -> list[_Loss]:
    larger, smaller = sizes.max(axis=0), sizes.min(axis=0)
    typical, operand, addend = map(_mean_size, (values, larger, smaller))
    error = _relative_to_spread(rounding * operand, values)
    losses = [_Loss("lost_terms", addend, 1.0, error)]
    if not values.any() and larger.max() > 1.0:  # not the numbers of a mask
        losses = [_Loss("cancellation", 0.0, 1.0, 1.0)]
    elif typical < _SMALL_DIFFERENCE * operand:
        losses = [_Loss("cancellation", typical, 1.0, error)]
    if has_constant:  # such as an epsilon, which is lost on purpose
        return losses
    is_lost = (smaller > 0) & (np.abs(values) == larger)
    share = float(np.mean(is_lost))
    return [*losses, _Loss("lost_terms", _mean_size(smaller[is_lost]), share, share)]


def _relative_to_spread(error: float, values: np.ndarray) -> float:
    """Returns an error relative to how values vary; 0 of values that are all the same."""
    spread = float(np.std(values, dtype=np.float64))
    return min(error / spread, LARGEST_ERROR) if spread else 0.0


def _sampled(
    operands: Sequence[FloatValues], result: FloatValues
) -> tuple[list[np.ndarray], np.ndarray] | None:
    """Returns the values of the operands and of the result; `None` if one is not finite.

    Operands that broadcast to the shape of the result get that shape, so that values belong
    together.
    """
    arrays = [each.array.astype(np.float32) for each in operands]
    values = result.array.astype(np.float32)
    if arrays and np.broadcast_shapes(*(each.shape for each in arrays), ()) == values.shape:
        arrays = [np.broadcast_to(each, values.shape) for each in arrays]
    if not arrays or not all(each.size and np.isfinite(each).all() for each in (*arrays, values)):
        return None
    return arrays, values


def _mean_size(values: np.ndarray) -> float:
    """Returns the root mean square; 0 without values."""
    if not values.size:
        return 0.0
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
