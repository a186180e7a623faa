"""Formulas of functions of several numbers, and of sums: what they make of ranges and errors.

Each takes the operands and the `Call`, and returns the `Outcome`. Errors are bounded for all
operands in their ranges, and for ordinary data where these have no bounds. What else is true of a
formula, and what it computes of arrays, stands above it.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from kmp.numerics import formulas
from kmp.numerics.function import (
    LARGEST_ERROR,
    UNKNOWN_CALL,
    Call,
    Elementwise,
    Formula,
    Outcome,
    Traits,
)
from kmp.numerics.values import DATA, INFINITY, Value, between, union

Operands = Sequence[Value]

_SMALL_SUM = 64.0
_FEW = UNKNOWN_CALL._replace(terms=1)  # of terms, whose sum rounds as one operation does
_ZERO = between(0.0, 0.0)
_CHOOSES: Traits = ("selects", "compares")
_PRODUCTS: Traits = ("multiplies", "multiplies_matrices")


@partial(Formula, compute=lambda *operands: functools.reduce(np.add, operands), traits=("adds",))
def added(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns the sum of several numbers."""
    low = sum(each.low for each in operands)
    high = sum(each.high for each in operands)
    degree = max(each.growth for each in operands)
    size = max(abs(sum(ends)) for ends in zip(*(each.ordinary for each in operands), strict=True))
    return Outcome(Value(low, high, degree, *_error_of_sum(operands), size))


def _error_of_sum(operands: Operands) -> tuple[float, float]:
    """Returns the relative and the absolute error of a sum.

    Numbers of one sign cannot cancel. Where others do, their errors are left.
    """
    largest = max(each.relative for each in operands)
    if all(each.low >= 0 for each in operands) or all(each.high <= 0 for each in operands):
        return largest, sum(each.absolute for each in operands)
    unbounded = [each for each in operands if not each.is_bounded]
    if len(unbounded) != 1:
        return 0.0, sum(each.ordinary_error for each in operands)
    # Where other numbers, such as those of a mask, are large beside the data, the sum is.
    data = unbounded[0]
    others = [each for each in operands if each.is_bounded]
    error = sum(each.absolute for each in operands)
    error += (data.relative + largest) * data.ordinary_magnitude
    error += data.relative * sum(each.smallest_magnitude for each in others)
    return largest, error


def negated(x: Value) -> Value:
    """Returns minus a value."""
    return replace(x, low=-x.high, high=-x.low)


@partial(Formula, traits=("selects",))
def negative(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns minus a number."""
    return Outcome(negated(operands[0]))


@partial(Formula, compute=np.subtract, traits=("adds",))
def subtracted(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns a difference."""
    return added([operands[0], negated(operands[1])])


@partial(Formula, traits=("selects",))
def absolute(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns the magnitude of a number."""
    x = operands[0]
    return Outcome(replace(x, low=x.smallest_magnitude, high=x.magnitude))


@partial(Formula, traits=_CHOOSES)
def larger(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns the largest of several numbers."""
    found = union(operands)
    low = max(each.low for each in operands)
    return Outcome(replace(found, low=low, degree=_degree_of_choice(operands, low, found.high)))


@partial(Formula, traits=_CHOOSES)
def smaller(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns the smallest of several numbers."""
    found = union(operands)
    high = min(each.high for each in operands)
    return Outcome(replace(found, high=high, degree=_degree_of_choice(operands, found.low, high)))


def _degree_of_choice(operands: Operands, low: float, high: float) -> float:
    is_bounded = math.isfinite(low) and math.isfinite(high)
    return 0.0 if is_bounded else max(each.growth for each in operands)


@partial(Formula, traits=_CHOOSES)
def clipped(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns a number that is not below a second and not above a third one."""
    x, lowest, highest = operands
    return smaller([larger([x, lowest]).value, highest])


@partial(Formula, traits=("selects",))
def rectified(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns a number, or 0 if it is negative."""
    return larger([operands[0], _ZERO])


@partial(Formula, traits=("selects",))
def rectified_up_to_six(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns a number that is not below 0 and not above 6."""
    return clipped([operands[0], _ZERO, between(6.0, 6.0)])


@partial(Formula, traits=("selects",))
def leaky(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns a number, if it is negative times a factor from 0 to 1."""
    x = operands[0]
    return Outcome(replace(x, high=max(x.high, 0.0) if x.low < 0 else x.high))


@partial(Formula, traits=("selects",))
def shrunk(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns a number, or 0 if it is small."""
    return Outcome(union([operands[0], _ZERO]))


@partial(Formula, compute=np.multiply, traits=("multiplies", "needs_range"))
def multiplied(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns the product of several numbers."""
    value = functools.reduce(_product_of_two, operands)
    if call.are_same:
        value = replace(value, low=operands[0].smallest_magnitude ** 2)
    return Outcome(value)


def _product_of_two(first: Value, second: Value) -> Value:
    corners = _products((first.low, first.high), (second.low, second.high))
    size = max(map(abs, _products(first.ordinary, second.ordinary)))
    relative = first.relative + second.relative + first.relative * second.relative
    error = _times(first.absolute, second.absolute)
    for own, other in ((first, second), (second, first)):
        error += _times(own.absolute, other.ordinary_magnitude * (1.0 + other.relative))
    degree = first.growth + second.growth
    return Value(min(corners), max(corners), degree, relative, error, size)


def _products(ends: tuple[float, float], others: tuple[float, float]) -> list[float]:
    return [_times(end, other) for end in ends for other in others]


def _times(a: float, b: float) -> float:
    return 0.0 if 0.0 in (a, b) else a * b  # 0 times Inf: the data are finite


@partial(Formula, compute=lambda x, y: np.square(x - y))
def squared_difference(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns the square of a difference."""
    return power([subtracted(operands).value, between(2.0, 2.0)])


@Formula
def cross_product(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns a difference of products."""
    product = multiplied(operands[:2]).value
    return subtracted([product, product])


@partial(Formula, compute=np.divide, traits=("divides", "needs_range"))
def divided(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns a quotient."""
    dividend, divisor = operands
    smallest = divisor.smallest_magnitude
    if not smallest:
        return _divided_by_zero(dividend, divisor)
    inverse = inverted([divisor]).value
    value = multiplied([dividend, inverse]).value
    return Outcome(value, slope=max(1.0 / smallest, min(dividend.magnitude, 1.0) / smallest**2))


def _divided_by_zero(dividend: Value, divisor: Value) -> Outcome:
    """Returns a quotient whose divisor may be 0, or anything close to it."""
    low, high = -INFINITY, INFINITY
    if divisor.low == 0.0:  # which is not -0
        low = 0.0 if dividend.low >= 0.0 else low
        high = 0.0 if dividend.high <= 0.0 else high
    of_inverse, error = _errors_of_inverse(divisor.relative)
    relative = dividend.relative + of_inverse + dividend.relative * of_inverse
    if divisor.absolute or dividend.absolute:
        error = INFINITY
    return Outcome(Value(low, high, INFINITY, relative, error), slope=INFINITY)


@partial(Formula, compute=np.reciprocal, traits=("divides",))
def inverted(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns 1 divided by a number."""
    x = operands[0]
    smallest = x.smallest_magnitude
    if not smallest:
        return _divided_by_zero(between(1.0, 1.0), x)
    low, high = sorted((_inverse(x.low), _inverse(x.high)))
    relative, error = _errors_of_inverse(x.relative + x.absolute / smallest)
    return Outcome(Value(low, high, 0.0, relative, error), slope=1.0 / smallest**2)


def _inverse(x: float) -> float:
    return 0.0 if math.isinf(x) else 1.0 / x


def _errors_of_inverse(relative: float) -> tuple[float, float]:
    """Returns the relative and the absolute error of 1 divided by a number with an error."""
    return (relative / (1.0 - relative), 0.0) if relative < 1.0 else (0.0, INFINITY)


@partial(
    Formula,
    compute=lambda x, y: np.where(y == 0.0, 0.0, x / np.where(y, y, 1.0)),
    traits=("needs_range",),
)
def divided_or_zero(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns a quotient, or 0 if the divisor is 0."""
    outcome = divided(operands)
    if operands[1].smallest_magnitude:
        return outcome
    return outcome._replace(value=shrunk([outcome.value]).value)


@partial(Formula, traits=("divides", "needs_range"))
def floor_divided(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns a quotient that is rounded down, on which no error is passed."""
    value = divided(operands).value
    # The ends of its range are not exact.
    low = _floor(value.low - 1e-9 * abs(value.low))
    high = _floor(value.high + 1e-9 * abs(value.high))
    return Outcome(replace(value, low=low, high=high, relative=0.0, absolute=0.0), slope=0.0)


def _floor(x: float) -> float:
    return float(math.floor(x)) if math.isfinite(x) else x


@Formula
def remainder(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns the remainder of a quotient, with the sign of the divisor.

    Rounding decides whether it jumps; between jumps it has the errors of both.
    """
    dividend, divisor = operands
    quotient = divided(operands).value
    error = dividend.ordinary_error
    if divisor.relative or divisor.absolute:
        error += _times(divisor.ordinary_error, math.ceil(min(quotient.ordinary_magnitude, 1e30)))
    value = Value(min(divisor.low, 0.0), max(divisor.high, 0.0), divisor.growth, 0.0, error)
    return Outcome(value)


@partial(Formula, compute=np.power, traits=("divides", "flushes"))
def power(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns a number to the power of another one."""
    base, exponent = operands
    if exponent.low == exponent.high and not exponent.error:
        return _power_of(exponent.low).of([base])
    if base.low == base.high > 0 and not base.error:
        return _exponential_of(base.low).of([exponent])
    if base.low <= 0:  # a negative number has no powers but those of integers
        return Outcome(Value(-INFINITY, INFINITY, INFINITY, absolute=INFINITY), slope=INFINITY)
    of_log = multiplied([exponent, _LOGARITHM.of([base]).value]).value
    outcome = _exponential_of(math.e).of([of_log])
    if not of_log.error:
        return outcome
    # A large error is at most the width of what inexact operands lead to.
    inexact = power([_with_errors(base, 0.0), _with_errors(exponent)]).value
    error = min(outcome.value.absolute, inexact.high - inexact.low)
    return outcome._replace(value=replace(outcome.value, absolute=error))


def _with_errors(x: Value, lowest: float = -INFINITY) -> Value:
    """Returns the range of a value and its errors, without an error."""
    return Value(max(x.low - x.error, lowest), x.high + x.error)


@functools.lru_cache(maxsize=256)
def _power_of(exponent: float) -> Elementwise:
    is_integer = exponent.is_integer()
    return Elementwise(
        name="power",
        compute=lambda x: np.power(x, exponent),
        domain=(-INFINITY if is_integer else 0.0, INFINITY),
        turns=(0.0,) if exponent > 0 else (-1e-160, 0.0, 1e-160),
        degree=max(exponent, 0.0),
    )


@functools.lru_cache(maxsize=256)
def _exponential_of(base: float) -> Elementwise:
    return Elementwise(
        name="power",
        compute=lambda x: np.power(base, x),
        degree=INFINITY,
    )


_LOGARITHM = Elementwise(name="logarithm", compute=np.log, domain=(0.0, INFINITY), degree=0.0)
_SIGMOID = Elementwise(name="sigmoid", compute=formulas.sigmoid, degree=0.0)


@partial(Formula, compute=lambda x, y: np.where(x == 0.0, 0.0, x * np.log(y)))
def times_logarithm(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns a number times the logarithm of another one, or 0 if the number is 0."""
    logarithm = _LOGARITHM.of([operands[1]])
    product = multiplied([operands[0], logarithm.value])
    return product._replace(slope=logarithm.slope)


@partial(Formula, compute=lambda x, y: np.where(x == 0.0, 0.0, x * np.log1p(y)))
def times_logarithm_of_sum(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns a number times the logarithm of 1 plus another one."""
    return times_logarithm([operands[0], added([operands[1], between(1.0, 1.0)]).value])


@partial(Formula, traits=("needs_range",))
def scaled_by_power_of_two(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns a number times a power of 2."""
    exponent = operands[1] if len(operands) > 1 else DATA  # integers are no operands
    return multiplied([operands[0], _exponential_of(2.0).of([exponent]).value])


@partial(Formula, compute=np.arctan2)
def angle(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns the angle of a point with the coordinates y and x."""
    y, x = operands
    corners = [math.atan2(a, b) for a in (y.low, y.high) for b in (x.low, x.high)]
    low, high = min(corners), max(corners)
    if x.low < 0 and y.low < 0 <= y.high:  # where it jumps
        low, high = -math.pi, math.pi
    distance = math.hypot(y.smallest_magnitude, x.smallest_magnitude)
    error = (y.relative + x.relative) * _share_of_relative_errors(y, x)
    if y.absolute or x.absolute:
        error += (y.absolute + x.absolute) / distance if distance else INFINITY
        if x.low < x.error and y.low - y.error <= 0 <= y.high + y.error:  # where it jumps
            error = INFINITY
    slope = 1.0 / distance if distance else INFINITY
    return Outcome(Value(low, high, 0.0, 0.0, min(error, 2.0 * math.pi)), slope=slope)


def _share_of_relative_errors(y: Value, x: Value) -> float:
    """Returns the largest abs(x y) / (x^2 + y^2), which is 1/2 for numbers of equal magnitude."""
    least = y.smallest_magnitude / (x.ordinary_magnitude or 1.0)
    if least > 1.0:
        return least / (1.0 + least**2)
    most = y.ordinary_magnitude / (x.smallest_magnitude or 1e-300)
    return most / (1.0 + most**2) if most < 1.0 else 0.5


@partial(Formula, compute=np.hypot)
def hypotenuse(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns the distance of a point from 0."""
    low = math.hypot(*(each.smallest_magnitude for each in operands))
    high = math.hypot(*(each.magnitude for each in operands))
    relative = max(each.relative for each in operands)
    error = sum(each.absolute for each in operands)
    degree = max(each.growth for each in operands)
    size = math.hypot(*(each.ordinary_magnitude for each in operands))
    return Outcome(Value(low, high, degree, relative, error, size))


@Formula
def gated(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns one half of a tensor times the sigmoid of the other half."""
    x = operands[0]
    return multiplied([x, _SIGMOID.of([x]).value])


@partial(Formula, traits=("sums",))
def summed(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns the sum of so many elements of one tensor.

    If the data decide how large it is, it is taken to be as large as one of them: its error is
    divided by the number of terms.
    """
    x, terms = operands[0], call.terms
    low, high = _times(x.low, terms), _times(x.high, terms)
    relative = x.relative if x.has_one_sign else 0.0
    error = x.absolute if x.has_one_sign else x.ordinary_error
    if math.isfinite(max(abs(low), abs(high))):
        error = _times(error, terms)
    degree = max(x.growth, 1.0)
    size = x.ordinary_magnitude
    return Outcome(Value(low, high, degree, relative, error, size), terms=terms)


@partial(Formula, traits=("sums",))
def accumulated(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns sums of up to so many elements of one tensor."""
    outcome = summed(operands, call)
    return outcome._replace(value=union([outcome.value, operands[0], _ZERO]))


@partial(Formula, traits=("accumulates",))
def accumulated_in(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns elements of a first tensor, plus sums of elements of a second one."""
    outcome = accumulated(operands[1:], call)
    return outcome._replace(value=added([operands[0], outcome.value]).value)


@partial(Formula, traits=("accumulates",))
def product_of_elements(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns the product of so many elements of one tensor."""
    x, terms = operands[0], call.terms
    size = x.magnitude
    high = size if size <= 1.0 and terms == INFINITY else _to_the_power(size, terms)
    low = 0.0 if x.low >= 0 else -high
    if x.low >= 1.0:
        low = _to_the_power(x.low, terms)
    relative = _to_the_power(1.0 + x.relative, terms) - 1.0
    error = INFINITY if x.absolute and terms == INFINITY else 0.0
    if x.absolute and terms < INFINITY:
        others = _to_the_power(x.ordinary_magnitude + x.absolute, terms - 1.0)
        error = x.absolute * terms * others
    value = Value(low, high, INFINITY if high == INFINITY else 0.0, relative, error)
    return Outcome(value, terms=terms)


@partial(Formula, traits=("accumulates",))
def products_of_elements(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns products of up to so many elements of one tensor, of none is 1."""
    return product_of_elements([union([operands[0], between(1.0, 1.0)])], call)


def _to_the_power(x: float, exponent: float) -> float:
    try:
        return x**exponent
    except OverflowError:
        return INFINITY


@partial(Formula, traits=("accumulates",))
def averaged(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns the mean of so many elements of one tensor."""
    x = operands[0]
    if x.has_one_sign:
        return Outcome(x, terms=call.terms)
    return Outcome(replace(x, relative=0.0, absolute=x.ordinary_error), terms=call.terms)


@partial(Formula, traits=("accumulates", "needs_range"))
def averaged_with_mask(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns the mean of those of so many elements that a mask selects: a quotient of sums."""
    return averaged(operands, call)


@Formula
def interpolated(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns what is between elements of one tensor."""
    return averaged(operands[:1], _FEW)


@Formula
def interpolated_with_zeros(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns what is between elements of one tensor and zeros."""
    return averaged([union([operands[0], _ZERO])], _FEW)


@Formula
def interpolated_by_splines(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns what is between elements, or outside by up to their width: splines overshoot."""
    x = operands[0]
    width = x.high - x.low
    error = 3.0 * x.ordinary_error
    return Outcome(Value(x.low - width, x.high + width, x.degree, 0.0, error, 3.0 * x.size))


@partial(Formula, traits=("accumulates",))
def sum_of_squares(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns half the sum of the squares of the elements."""
    squares = power([operands[0], between(2.0, 2.0)]).value
    outcome = summed([squares], call)
    half = multiplied([outcome.value, between(0.5, 0.5)]).value
    return outcome._replace(value=half)


@partial(Formula, traits=("accumulates",))
def norm(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns the root of the sum of the squares of the elements."""
    x, terms = operands[0], call.terms
    root = math.sqrt(terms)
    low, high = _times(x.smallest_magnitude, root), _times(x.magnitude, root)
    error = x.absolute
    if high < INFINITY:
        error = _times(error, root)
    size = x.ordinary_magnitude
    return Outcome(Value(low, high, x.growth, x.relative, error, size), terms=terms)


@partial(Formula, traits=_PRODUCTS)
def matrix_product(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns sums of products, which Tensor Cores add up in float32.

    They are as large as the data, unless their bound is small: few sums come close to it.
    """
    outcome = dot_product(operands, call)
    is_small = outcome.value.magnitude <= _SMALL_SUM
    return Outcome(outcome.value if is_small else DATA)


@partial(Formula, traits=("accumulates",))
def dot_product(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns sums of products."""
    return summed([multiplied(operands).value], call)


@partial(Formula, traits=_PRODUCTS)
def convolved(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns sums of products, also with zeros around an image."""
    outcome = matrix_product(operands, call)
    return outcome._replace(value=union([outcome.value, _ZERO]))


@partial(Formula, traits=(*_PRODUCTS, "accumulates"))
def convolved_by_channel(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns sums of products, which 16-bit kernels may add up in 16 bits."""
    outcome = convolved(operands, call)
    return outcome._replace(terms=call.terms)


@partial(Formula, traits=("flushes",))
def softmax(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns the probabilities of so many logits."""
    low, high = (math.exp(end) for end in _of_log_softmax(operands[0], call.terms))
    error = operands[0].ordinary_error
    relative = math.expm1(min(1.0, 2.0 * error))
    if relative > LARGEST_ERROR:  # of small ones, and less of others
        return Outcome(Value(low, high, 0.0, 0.0, math.tanh(error / 2.0)))
    return Outcome(Value(low, high, 0.0, relative))


@Formula
def log_softmax(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns the logarithms of the probabilities of so many logits."""
    low, high = _of_log_softmax(operands[0], call.terms)
    degree = max(operands[0].growth, 1.0)
    return Outcome(Value(low, high, degree, 0.0, 2.0 * operands[0].ordinary_error))


def _of_log_softmax(x: Value, terms: float) -> tuple[float, float]:
    """Returns the range of the logarithms of probabilities."""
    width = x.high - x.low
    if not 1 < terms < INFINITY or width > _LARGEST_EXPONENT:
        return -INFINITY, 0.0
    low, high = (-math.log1p((terms - 1.0) * math.exp(end)) for end in (width, -width))
    return low, high


_LARGEST_EXPONENT = 600.0  # of numbers that float64 has


@Formula
def cross_entropy_of_logits(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns the cross-entropy of so many logits, the first operand."""
    return negative([log_softmax(operands[:1], call).value])


@Formula
def cross_entropy(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns the cross-entropy of probabilities, the last operand."""
    logarithm = _LOGARITHM.of([absolute([operands[-1]]).value])
    return Outcome(replace(logarithm.value, low=0.0, high=INFINITY), logarithm.slope)


@Formula
def to_hsv(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns hue and saturation, which are quotients, and the largest of three colors."""
    value = union([operands[0], between(0.0, 1.0)])
    error = INFINITY if operands[0].error else 0.0  # of black
    return Outcome(replace(value, absolute=error), slope=INFINITY)


@Formula
def from_hsv(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns colors: what is between the largest of three and 0, by six times the hue."""
    x = operands[0]
    error = 8.0 * x.ordinary_error * max(1.0, x.ordinary_magnitude)
    value = union([x, _ZERO])
    return Outcome(replace(value, relative=0.0, absolute=error))


@Formula
def averaged_together(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns means of elements of several tensors."""
    return averaged([union(operands)], _FEW)


@Formula
def stepped(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns numbers from a first to a second one."""
    ends = operands[:2]
    size = max(each.ordinary_magnitude for each in ends)
    return interpolated([replace(union(ends), size=size)])


@Formula
def below_maximum(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns numbers less the largest of them."""
    outcome = subtracted(operands)
    return outcome._replace(value=replace(outcome.value, high=0.0))


@partial(Formula, traits=("accumulates",))
def sum_with_one(operands: Operands, call: Call = UNKNOWN_CALL) -> Outcome:
    """Returns a sum of positive numbers, one of which is 1."""
    outcome = summed(operands, call)
    return outcome._replace(value=replace(outcome.value, low=max(1.0, outcome.value.low)))
