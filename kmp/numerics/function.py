"""What a function does to numbers: its range, its derivative and its rounding error.

A row of the table in `functions` is a `Function`. From the range and the error of its operands it
computes those of its result. `combinations` has the formulas of functions of several numbers.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from kmp.numerics.values import DATA, INFINITY, Value, union
from kmp.utils.float_formats import FLOAT16, FLOAT32

DERIVATION = "derived from its formula"
# A relative error up to this is kept as one; a larger one may be a smaller absolute error.
LARGEST_ERROR = 0.01
# Up to this it is kept too, if the error of the largest results becomes at most so much larger, as
# after an exponential. Close to a zero of the function, errors are not relative to the results.
_LARGEST_RELATIVE = 0.1
_LOOSEST = 1.1
_LARGE = 1e3  # results of huge data that exceed it have no bounds, unlike logarithms
_ORDINARY = 1e4  # poles and steep slopes are looked for up to here

# The magnitudes where a function is computed: more of them where most functions bend, and close to
# 1, where some end. Between neighbors, smooth functions change little.
_MAGNITUDES = np.unique(
    np.concatenate(
        [
            np.geomspace(1e-45, 1e-3, 80),
            np.geomspace(1e-3, 1e3, 240),
            np.geomspace(1e3, FLOAT32.max, 80),
            1.0 - np.geomspace(1e-16, 0.1, 32),
            1.0 + np.geomspace(1e-15, 0.1, 32),
        ]
    )
)
_GRID = np.concatenate([-_MAGNITUDES[::-1], [0.0], _MAGNITUDES])
_STEPS = np.linspace(0.0, 1.0, 200)  # of a finite range
# Where a function is said to flush.
_EVERYDAY = np.concatenate([sign * np.geomspace(0.01, 29.9, 200) for sign in (-1.0, 1.0)])


class Call(NamedTuple):
    """What a result depends on beside the values of the operands.

    Attributes:
        terms: How many elements are added up for each element of the result; Inf if not known.
        are_same: Whether both operands are one tensor.
    """

    terms: float = INFINITY
    are_same: bool = False


UNKNOWN_CALL = Call()


class Outcome(NamedTuple):
    """What a function makes of its operands.

    Attributes:
        value: The result, before it is rounded.
        slope: The largest magnitude of the derivative, which the backward pass multiplies by.
        terms: How many numbers it adds up.
    """

    value: Value
    slope: float = 1.0
    terms: float = 1


# What the range and the error of a function do not say of it.
Trait = Literal[
    "adds",  # its operands, or subtracts them
    "sums",  # elements of its last operand, as many as the call has terms
    "accumulates",  # so many terms, which it makes of elements: squares, products or shares
    "multiplies",  # its operands
    "multiplies_matrices",  # on Tensor Cores, or is made of such products
    "divides",  # and is infinite where it divides by 0
    "flushes",  # ordinary operands have results that float16 rounds to 0
    "needs_range",  # and nothing else of float32, so that bfloat16 does
    "selects",  # its results are as exact as its operands
    "compares",  # its operands, so that a constant that is infinite in a format does no harm
]
Traits = tuple[Trait, ...]


@dataclass(frozen=True)
class Formula:
    """What functions of several numbers, or of sums of them, compute.

    Args:
        combine: Returns what is known of the result.
        compute: Computes it for float64 arrays; `None` if it is not elementwise.
        traits: What else is true of it.
    """

    combine: Callable[[Sequence[Value], Call], Outcome]
    compute: Callable[..., Any] | None = None
    traits: Traits = ()

    def __call__(self, operands: Sequence[Value], call: Call = UNKNOWN_CALL) -> Outcome:
        return self.combine(operands, call)


@dataclass(frozen=True, kw_only=True)
class Function:
    """A row of the table.

    Args:
        name: What users call it: `"logarithm"`. Rows may have the same name.
        keras: Its names in Keras, in lowercase letters and without underscores: of classes of
            operations in `keras.ops`, of layers, and of activations, with their default arguments.
        tensorflow: The types of TensorFlow's operations.
        source: Where it can be looked up in which precision it runs, or what its range is. By
            default this follows from its formula alone.
        overflow: Why float16 does not do where the data decide how large its operands are.
        in_16_bits: Why it runs in 16 bits, whatever its operands; may be empty.
        in_float32: Why it needs float32, whatever its operands; may be empty.
        in_bfloat16: Why bfloat16 does not do, if that is another reason.
        most_terms: How many terms 16-bit kernels add up with a small error; by default as many as
            arithmetic in 16 bits allows. Where it is given, kernels for bfloat16 add up in float32.
        domain: Where it is defined: the range of its first operand.
    """

    name: str
    keras: str = ""
    tensorflow: str = ""
    source: str = DERIVATION
    overflow: str = ""
    in_16_bits: str = ""
    in_float32: str = ""
    in_bfloat16: str = ""
    most_terms: float | None = None
    domain: tuple[float, float] = (-INFINITY, INFINITY)

    @property
    def traits(self) -> Traits:
        """What its range and its error do not say."""
        return ()

    @functools.cached_property
    def adds_up(self) -> bool:
        """Whether it adds up so many terms as the call has."""
        return "sums" in self.traits or "accumulates" in self.traits

    def of(self, operands: Sequence[Value], call: Call = UNKNOWN_CALL) -> Outcome:
        """Returns what it makes of its operands, which only float operands are."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Move(Function):
    """Returns elements of its operands, or what is between them, and rounds nothing.

    Args:
        adds_zeros: Whether zeros are among its results too.
    """

    adds_zeros: bool = False

    @property
    def traits(self) -> Traits:
        return ("selects",)

    def of(self, operands: Sequence[Value], call: Call = UNKNOWN_CALL) -> Outcome:
        if self.adds_zeros and operands:
            operands = [*operands, Value(0.0, 0.0)]
        return Outcome(union(operands))


@dataclass(frozen=True, kw_only=True)
class Fixed(Function):
    """Has the same range for all operands, and passes no error on.

    Args:
        low: The smallest result.
        high: The largest one.
        traits: What these do not say.
    """

    low: float = -INFINITY
    high: float = INFINITY
    traits: Traits = ()

    def of(self, operands: Sequence[Value], call: Call = UNKNOWN_CALL) -> Outcome:
        return Outcome(Value(self.low, self.high))


@dataclass(frozen=True, kw_only=True)
class Elementwise(Function):
    """A function of one number.

    Args:
        compute: It, for float64 arrays.
        turns: Where it has a maximum or a minimum inside of its domain.
        degree: How it grows with large operands: 1 as they do, 0.5 as their root.
        period: Its period, if it has one. It then has the `turns` of one.
        bounds: The range of a whole period.
        assumed: The largest result that is assumed where the data decide how large the operand is.
        has_steps: Whether it is constant between steps. It passes no error on then: rounding
            decides on which side of a step an operand is.
    """

    compute: Callable[[Any], Any]
    turns: tuple[float, ...] = ()
    degree: float = 1.0
    period: float = INFINITY
    bounds: tuple[float, float] = (-1.0, 1.0)
    assumed: float = INFINITY
    has_steps: bool = False

    def of(self, operands: Sequence[Value], call: Call = UNKNOWN_CALL) -> Outcome:
        return _of_one(self, operands[0])

    @functools.cached_property
    def traits(self) -> Traits:
        low, high = self.domain
        points = _EVERYDAY[(low <= _EVERYDAY) & (high >= _EVERYDAY)]
        with np.errstate(all="ignore"):
            sizes = np.abs(self.compute(points))
            at_zero, far = self.compute(np.array([0.0, INFINITY]))
        is_flushed = (sizes > 0.0) & (sizes <= 2.0**FLOAT16.flush_exponent)
        found: Traits = ("flushes",) if is_flushed.any() else ()
        return (*found, "divides") if at_zero == INFINITY and far == 0.0 else found

    @functools.cached_property
    def tends_to_number(self) -> bool:
        """Whether results for many operands are close to one number, or come close to it often."""
        with np.errstate(all="ignore"):
            far = self.compute(np.array([-1e30, -1e20, 1e20, 1e30]))
        is_constant = far[0] == far[1] or far[2] == far[3]
        return self.assumed == INFINITY and (bool(is_constant) or self.period < INFINITY)


@dataclass(frozen=True, kw_only=True)
class Combination(Function):
    """A function of several numbers, or of sums of them.

    Args:
        formula: What it computes.
    """

    formula: Formula

    @property
    def traits(self) -> Traits:
        return self.formula.traits

    def of(self, operands: Sequence[Value], call: Call = UNKNOWN_CALL) -> Outcome:
        return self.formula(operands, call)


@functools.lru_cache(maxsize=4096)
@np.errstate(all="ignore")
def _of_one(function: Elementwise, x: Value) -> Outcome:
    low = max(x.low, function.domain[0], -FLOAT32.max)
    high = min(x.high, function.domain[1], FLOAT32.max)
    if low > high:  # NaN, in every precision
        return Outcome(DATA)
    points = _points(function, low, high)
    results = function.compute(points)

    # The range. A pole where close results are not large, as that of a logarithm, is no part of it.
    has_pole = bool(np.isinf(results[np.abs(points) <= max(_ORDINARY, x.smallest_magnitude)]).any())
    finite = results[np.isfinite(results)]
    if has_pole and finite.size and float(np.abs(finite).max()) <= _LARGE:
        has_pole, results = False, np.clip(results, finite.min(), finite.max())
    least, most = float(np.fmin.reduce(results)), float(np.fmax.reduce(results))
    if high - low >= function.period:
        least, most = function.bounds
    ends = [end for end, limit in ((results[0], x.low), (results[-1], x.high)) if math.isinf(limit)]
    if ends:
        least = -INFINITY if min(ends) < -_LARGE else least
        most = INFINITY if max(ends) > _LARGE else most
    if x.high == INFINITY:
        most = min(most, max(function.assumed, float(results[0])))
    is_ordinary = np.abs(points) <= max(_ORDINARY, x.smallest_magnitude)
    is_infinite = not math.isfinite(max(abs(least), abs(most)))
    degree = x.growth * function.degree if x.growth and function.degree else 0.0
    if has_pole or (is_infinite and x.is_bounded):
        degree = INFINITY
    value = Value(least, most, degree)
    if function.has_steps:
        return Outcome(value, slope=0.0)

    # The derivative.
    slopes = np.abs(np.diff(results) / np.diff(points))
    slope = float(np.fmax.reduce(slopes[is_ordinary[1:]], initial=0.0))

    # The error.
    if not x.is_bounded:
        points = _points(function, *x.ordinary)
        results = function.compute(points)
        size = float(np.fmax.reduce(np.abs(results)))
        value = replace(value, size=size if size < INFINITY else 1.0)
    if x.relative or x.absolute:
        relative, absolute = _error(function, x, points, results)
        if x.ordinary_error > function.period / 8:  # the grid is too coarse for the phase
            absolute = function.bounds[1] - function.bounds[0]
        value = replace(value, relative=relative, absolute=absolute)
    return Outcome(value, slope)


def _points(function: Elementwise, low: float, high: float) -> np.ndarray:
    """Returns the points of a range where a function is computed, in order."""
    low, high = (min(max(end, function.domain[0]), function.domain[1]) for end in (low, high))
    inside = _GRID[np.searchsorted(_GRID, low) : np.searchsorted(_GRID, high, "right")]
    parts = [inside, np.array([low, high])]
    if function.turns:
        turns = np.asarray(function.turns)
        if math.isfinite(function.period):
            first = np.ceil((low - turns) / function.period)
            turns = np.concatenate([turns + (first + each) * function.period for each in (0, 1)])
        parts.append(turns[(low <= turns) & (turns <= high)])
    if high - low < _ORDINARY:
        parts.append(low + _STEPS * (high - low))
    return np.sort(np.concatenate(parts).clip(low, high))


def _error(
    function: Elementwise, x: Value, points: np.ndarray, results: np.ndarray
) -> tuple[float, float]:
    """Returns the relative and the absolute error of the results at some points."""
    sizes, magnitudes = np.abs(points), np.abs(results)
    shifts = _shifts(function, points, results, x.relative * sizes)
    ratios = np.where(shifts == 0.0, 0.0, shifts / magnitudes)
    relative = _largest(ratios)
    largest_shift = _largest(shifts)
    is_as_tight = relative * float(magnitudes.max()) <= _LOOSEST * largest_shift < INFINITY
    is_moderate = relative <= _LARGEST_RELATIVE and x.is_bounded and not x.absolute
    if relative > LARGEST_ERROR and not (is_moderate and is_as_tight):
        relative = 0.0
    if x.absolute:
        shifts = _shifts(function, points, results, x.relative * sizes + x.absolute)
    elif relative:
        return relative, 0.0
    left = np.where(shifts == 0.0, 0.0, shifts - relative * magnitudes)
    return relative, max(0.0, _largest(left))


def _shifts(
    function: Elementwise, points: np.ndarray, results: np.ndarray, errors: np.ndarray
) -> np.ndarray:
    """Returns by how much results change with errors of the operand."""
    lower = function.compute(np.maximum(points - errors, function.domain[0]))
    upper = function.compute(np.minimum(points + errors, function.domain[1]))
    shifts = np.maximum(np.abs(lower - results), np.abs(upper - results))
    shifts[np.isnan(shifts)] = INFINITY
    return np.where(errors == 0.0, 0.0, shifts)


def _largest(errors: np.ndarray) -> float:
    """Returns the largest error; Inf if one is not known."""
    largest = float(errors.max())
    return INFINITY if math.isnan(largest) else largest
