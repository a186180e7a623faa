"""What a 16-bit format loses in the finite result of a function, from the values of its operands.

One formula for all functions: the error of a result is the sum, over the operands, of the unit
roundoff times the magnitude times the derivative, and its own rounding, relative to how the results
vary. Added to it is what the result alone shows: terms of a sum that change nothing, and results at
a limit that the function only tends to.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from kmp.numerics.function import Combination, Elementwise, Function
from kmp.numerics.values import INFINITY
from kmp.utils.float_formats import FLOAT32, FloatFormat

LossKind = Literal["cancellation", "phase", "amplification", "saturation", "lost_terms", "index"]

_MOST = 1e6  # a larger error says no more
_NOTED_ERROR = 0.01  # of results; smaller ones are their rounding
# Times the relative error of the operands, or their rounding beside how they vary. What products
# and roots add to it is less.
_AMPLIFIED = 4.0
_STEP = 2.0**-26  # of a derivative, relative to the operand: the root of float64's precision


class Loss(NamedTuple):
    """What a format loses in a result.

    Attributes:
        kind: As in `kmp.records.replay.LossyOperation`, as the other attributes.
        largest: The largest magnitude of the operands; of what is lost beside larger results, that
            of the results.
        typical: The root mean square of the results; of lost terms, that of these.
        share: The share of the results with this loss.
        error: The error of the results, relative to how they vary.
    """

    kind: LossKind
    largest: float
    typical: float
    share: float
    error: float


def is_elementwise(function: Function | None) -> bool:
    """Whether `exact_result` is known of a function."""
    return _formula(function) is not None


def adds(function: Function | None) -> bool:
    """Whether a function adds up numbers, of one tensor or of several."""
    return function is not None and ("adds" in function.traits or "sums" in function.traits)


def is_long_sum(function: Function | None) -> bool:
    """Whether a function adds up elements of one tensor."""
    return function is not None and "sums" in function.traits


def exact_result(function: Function | None, operands: Sequence[np.ndarray]) -> np.ndarray | None:
    """Returns what a function makes of its operands in float64; `None` if that is not known."""
    formula = _formula(function)
    if formula is None:
        return None
    with np.errstate(all="ignore"):
        return np.asarray(formula(*(each.astype(np.float64) for each in operands)))


def losses_of(
    function: Function, operands: Sequence[np.ndarray], result: np.ndarray, rounded: FloatFormat
) -> list[Loss]:
    """Returns what a format loses in a result, beyond the rounding of each value.

    Args:
        function: A row of the table.
        operands: Values of its operands. Those of an elementwise function broadcast to the shape of
            the result, whose first axis are the examples.
        result: Those of its result.
        rounded: The format of the result, and of the operands.
    """
    arrays = [each.astype(np.float64) for each in (*operands, result)]
    if len(arrays) == 1 or not all(each.size and np.isfinite(each).all() for each in arrays):
        return []
    *arguments, values = arrays
    if is_long_sum(function):
        found = [_terms_lost_in_long_sum(arguments[-1], values, rounded)]
    else:
        exact = exact_result(function, arguments)
        if exact is None or exact.shape != values.shape or not np.isfinite(exact).all():
            return []
        found = [*_losses(function, arguments, values, exact, rounded)]
    return [each for each in found if each.error > _NOTED_ERROR]


def index_lost(numbers: np.ndarray, rounded: FloatFormat) -> list[Loss]:
    """Returns the loss of a cast to integers of numbers between which a format has no others."""
    sizes = np.abs(numbers.astype(np.float64))
    if not sizes.size or not np.isfinite(sizes).all():
        return []
    share = float(np.mean(sizes > rounded.max_exact_integer))
    if share <= _NOTED_ERROR:
        return []
    return [Loss("index", float(sizes.max()), _mean_size(sizes), share, share)]


def _formula(function: Function | None) -> Callable[..., Any] | None:
    if isinstance(function, Elementwise) and not function.has_steps:
        return function.compute
    if isinstance(function, Combination):
        return function.formula.compute
    return None


def _losses(
    function: Function,
    operands: Sequence[np.ndarray],
    values: np.ndarray,
    exact: np.ndarray,
    rounded: FloatFormat,
) -> Iterator[Loss]:
    """Yields what an elementwise function loses."""
    is_sum = "adds" in function.traits
    largest = max(float(np.max(np.abs(each))) for each in operands)
    arrays = [np.broadcast_to(each, exact.shape) for each in operands]
    varying = [index for index, each in enumerate(arrays) if _varies(each)]
    varying = varying or list(range(len(arrays)))

    # The error of the operands, passed on, and the rounding of results that are not exact.
    passed = _passed_on(function, arrays, varying, exact)
    own = np.where(values == exact, 0.0, np.abs(exact))
    error = min(_unit(rounded) * _relative(_mean_size(passed + own), exact), _MOST)
    if is_sum and not values.any() and largest > 1.0:  # not the numbers of a mask
        yield Loss("cancellation", largest, 0.0, 1.0, 1.0)
    elif _mean_size(passed) > _AMPLIFIED * _mean_size(exact):
        yield Loss(_kind(function), largest, _mean_size(values), 1.0, error)

    # What the result alone shows.
    is_at_limit = _is_at_limit(function, values, exact, rounded)
    share = float(np.mean(is_at_limit))
    before = [_relative(_mean_size(arrays[index]), arrays[index]) for index in varying]
    least = min(filter(None, before), default=INFINITY)
    if share > _NOTED_ERROR:
        yield Loss("saturation", largest, _mean_size(values[is_at_limit]), share, share)
    elif _relative(_mean_size(own), exact) > _AMPLIFIED * least:
        if is_sum:
            terms = np.min(np.abs(arrays), axis=0)
            yield Loss("lost_terms", largest, _mean_size(terms), 1.0, error)
        else:
            size = float(np.max(np.abs(values)))
            yield Loss("lost_terms", size, float(np.std(exact)), 1.0, error)
    if is_sum and len(varying) == len(arrays):  # a constant may be lost on purpose: an epsilon
        sizes = np.abs(arrays)
        smaller = sizes.min(axis=0)
        is_lost = (smaller > 0.0) & (np.abs(values) == sizes.max(axis=0))
        share = float(np.mean(is_lost))
        yield Loss("lost_terms", largest, _mean_size(smaller[is_lost]), share, share)


def _varies(operand: np.ndarray) -> bool:
    """Whether an operand is not the same in all examples, as an epsilon or a bias is."""
    return bool(operand.ndim and (operand != operand[:1]).any())


def _kind(function: Function) -> LossKind:
    """Returns the kind of an error that a function enlarges."""
    if isinstance(function, Elementwise) and function.period < INFINITY:
        return "phase"
    if "adds" in function.traits:
        return "cancellation"
    return "amplification"


def _passed_on(
    function: Function,
    operands: Sequence[np.ndarray],
    varying: Sequence[int],
    exact: np.ndarray,
) -> np.ndarray:
    """Returns the sum over the operands of magnitude times derivative.

    The rounding of one that is the same in all examples does not change how the results vary.
    """
    total = np.zeros(exact.shape)
    for index in varying:
        shifts = []
        for step in (-_STEP, _STEP):  # one of them may leave the domain
            moved = list(operands)
            moved[index] = operands[index] * (1.0 + step)
            result = exact_result(function, moved)
            assert result is not None
            shifts.append(np.abs(result - exact) / _STEP)
        total += np.nan_to_num(np.fmax(*shifts), posinf=0.0)
    return total


def _is_at_limit(
    function: Function, values: np.ndarray, exact: np.ndarray, rounded: FloatFormat
) -> np.ndarray:
    """Returns where results are at a limit of the function that they do not reach in float32.

    A limit of 0 is none: these results underflow.
    """
    found = np.zeros(values.shape, bool)
    if not isinstance(function, Elementwise) or function.period < INFINITY:
        return found
    dtype, in_float32 = np.dtype(rounded.name), exact.astype(np.float32)
    with np.errstate(all="ignore"):
        limits = function.compute(np.array([-FLOAT32.max, FLOAT32.max]))
    for limit in limits:
        if limit and abs(limit) < rounded.max:
            is_rounded = values == limit.astype(dtype).astype(np.float64)
            found |= is_rounded & (in_float32 != np.float32(limit))
    return found


def _terms_lost_in_long_sum(operand: np.ndarray, values: np.ndarray, rounded: FloatFormat) -> Loss:
    """Returns the terms that are lost in partial sums of the size of the result."""
    terms, largest = np.abs(operand), float(np.max(np.abs(values)))
    is_lost = (terms > 0.0) & (terms <= _unit(rounded) * largest)
    share = float(np.mean(is_lost))
    return Loss("lost_terms", largest, _mean_size(terms[is_lost]), share, share)


def _unit(rounded: FloatFormat) -> float:
    """Returns the unit roundoff of a format."""
    return 2.0 ** -(rounded.fraction_bits + 1)


def _relative(size: float, values: np.ndarray) -> float:
    """Returns a size relative to how values vary; 0 of values that are the same in float32."""
    spread = float(np.std(values))
    return size / spread if spread > _unit(FLOAT32) * _mean_size(values) else 0.0


def _mean_size(values: np.ndarray) -> float:
    """Returns the root mean square; 0 without values."""
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0
