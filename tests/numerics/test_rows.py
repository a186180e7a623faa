"""The rows of the table hold for arithmetic: for what TensorFlow and Keras compute in float64.

A row says in which range a result is, and by how much an error of the operands changes it. Operands
are rounded to 16 bits, or are off by as much as their error allows.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from references import reference_of, references_by_name

from kmp.numerics.function import Call, Elementwise, Fixed
from kmp.numerics.functions import FUNCTIONS
from kmp.numerics.values import INFINITY, Value
from kmp.utils.float_formats import BFLOAT16, FLOAT16

# A bound is a sum of what is reached at different operands, and the grid misses little.
SLACK = 1.05
# Weights are no result of arithmetic.
ASSUMED = {"look-up"}
# Rounding decides on which side of a jump they are.
JUMPS = {"remainder", "threshold", "floor of the quotient"}
# Ends outside of a domain are drawn again, and a loaded machine is slow.
HEALTH = [HealthCheck.filter_too_much, HealthCheck.too_slow]
PROPERTY = settings(derandomize=True, deadline=None, max_examples=24, suppress_health_check=HEALTH)


def identified(functions):
    return [pytest.param(each, id=f"{each.name}: {names_of(each)[0]}") for each in functions]


def names_of(function):
    return (*function.tensorflow.split(), *function.keras.split())


COMPARED = [each for each in FUNCTIONS if each.name not in ASSUMED and reference_of(each)]
WITH_ERRORS = [
    each
    for each in COMPARED
    if not isinstance(each, Fixed)
    and not getattr(each, "has_steps", False)
    and each.name not in JUMPS
]
ENDS = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 0.5, 2.0, 1e-3]),
    st.floats(-8.0, 8.0, width=32),
    st.builds(
        lambda sign, power: sign * 10.0**power, st.sampled_from([-1.0, 1.0]), st.floats(-6.0, 4.0)
    ),
)


@st.composite
def ranges(draw, domain, may_be_infinite=True):
    """Draws a range within a domain; where that has no end, the range may have none."""
    ends = ENDS.filter(lambda end: domain[0] <= end <= domain[1])
    low, high = sorted((draw(ends) + 0.0, draw(ends) + 0.0))  # without -0
    if may_be_infinite:
        low = -INFINITY if domain[0] == -INFINITY and draw(st.booleans()) else low
        high = INFINITY if domain[1] == INFINITY and draw(st.booleans()) else high
    return low, high


@st.composite
def wide_ranges(draw, domain):
    """Draws a finite range that is no point."""
    low, high = draw(ranges(domain, may_be_infinite=False))
    width = 0.1 * max(1.0, abs(low), abs(high))
    if high - low < width:
        low = max(low - width, domain[0])
        high = min(high + width, domain[1])
    return low, high


def elements(random, low, high, terms, batch=64):
    """Elements of a finite range: its ends, common and small ones."""
    shape = (batch, terms) if terms else (batch,)
    found = random.uniform(low, high, shape)
    small = np.clip(random.choice([-1, 1], shape) * 10 ** random.uniform(-6, 1, shape), low, high)
    found = np.where(random.random(shape) < 0.3, small, found)
    found = np.where(random.random(shape) < 0.2, random.choice([low, high], shape), found)
    found[0], found[1] = low, high
    return found


def densely(random, low, high, terms):
    """Many elements of a range, with all combinations of its ends in several operands."""
    found = elements(random, low, high, terms, batch=2048)
    found[98] = np.clip(0.0, low, high)
    found[2:66] = random.choice([low, high], found[2:66].shape)
    for each in range(66, 98):
        found[each] = random.choice([low, high])
    return found


def limited(value, limit):
    """A range whose missing ends are at a limit."""
    low = -max(limit, -value.high) if value.low == -INFINITY else value.low
    high = max(limit, value.low) if value.high == INFINITY else value.high
    return low, high


def results_of(reference, operands):
    return np.asarray(reference.compute(*operands)).astype("float64")


ELEMENTWISE = [each for each in FUNCTIONS if isinstance(each, Elementwise)]
ORDINARY = np.concatenate([sign * np.geomspace(0.01, 29.9, 200) for sign in (-1.0, 1.0)])


@pytest.mark.parametrize("function", identified(ELEMENTWISE))
def test_all_names_of_a_row_are_names_of_its_function(function):
    points = ORDINARY[(function.domain[0] <= ORDINARY) & (function.domain[1] >= ORDINARY)]
    exact = function.compute(points)
    for reference in references_by_name(function):
        # The operation `gelu` is the approximation by a tanh.
        precision = 1e-3 if function.name == "GELU" else 1e-6
        results = results_of(reference, [points])
        np.testing.assert_allclose(results, exact, precision, atol=precision)


@pytest.mark.parametrize("function", identified(ELEMENTWISE))
def test_row_flushes_if_ordinary_operands_have_results_that_float16_rounds_to_0(function):
    points = ORDINARY[(function.domain[0] <= ORDINARY) & (function.domain[1] >= ORDINARY)]
    smallest = 2.0**FLOAT16.flush_exponent
    for reference in references_by_name(function):
        sizes = np.abs(results_of(reference, [points]))
        is_flushed = bool(np.any((sizes > 0.0) & (sizes <= smallest)))
        assert ("flushes" in function.traits) == is_flushed


@pytest.mark.parametrize("function", identified(COMPARED))
@PROPERTY
@given(data=st.data())
@np.errstate(all="ignore")
def test_results_are_in_the_range_of_the_row(function, data):
    reference = reference_of(function)
    values = [Value(*data.draw(ranges(domain))) for domain in reference.domains]
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    limit = min(getattr(function, "assumed", INFINITY), 1e6)  # of what the data decide
    operands = [
        elements(random, *limited(value, limit), terms)
        for value, terms in zip(values, reference.terms, strict=True)
    ]
    if isinstance(function, Elementwise):  # most of its extremes are here
        dense = np.clip(np.linspace(-4.0, 4.0, 801), *limited(values[0], limit))
        operands = [np.append(operands[0], dense)]
    found = function.of(values, Call(terms=max(reference.terms))).value
    results = results_of(reference, operands)
    if found.growth < INFINITY:
        results = results[~np.isinf(results)]  # the pole of a logarithm is no part of its range
    if np.isnan(results).all():
        return
    # Close to 1, TensorFlow's inverse error function is less exact than the row.
    precision = 1e-2 if function.name == "inverse error function" else 1e-6
    least, most = np.fmin.reduce(results, axis=None), np.fmax.reduce(results, axis=None)
    assert least >= found.low or least == pytest.approx(found.low, precision, 1e-6)
    assert most <= found.high or most == pytest.approx(found.high, precision, 1e-6)


def off_by(random, operand, value, how, number_format):
    """An operand with an error: that of rounding, or as large as it may be."""
    error = value.relative * np.abs(operand) + value.absolute
    if how == "rounded":
        rounded = operand.astype(number_format.name).astype("float64")
        return np.where(np.abs(rounded - operand) <= error, rounded, operand)  # not flushed
    signs = {
        "outward": np.sign(operand),
        "inward": -np.sign(operand),
        "upward": 1.0,
        "downward": -1.0,
        "anyhow": random.choice([-1.0, 1.0], operand.shape),
    }
    return operand + signs[how] * error


@st.composite
def errors(draw):
    """Draws the errors of an operand: of rounding alone, or of the operations before it too."""
    number_format = draw(st.sampled_from([FLOAT16, BFLOAT16]))
    unit = 2.0 ** -(number_format.fraction_bits + 1)
    absolute = draw(st.sampled_from([FLOAT16.smallest_subnormal, unit, 4.0 * unit]))
    return number_format, draw(st.sampled_from([unit, 3.0 * unit])), absolute


HOW = ("rounded", "outward", "inward", "upward", "downward", "anyhow")
# How many times larger a bound may be than what is reached: the largest error of one operand need
# not meet the largest of another one.
LOOSE = {
    "Pow": INFINITY,  # where base and exponent both vary, the bound is far above what is met
    "Xlogy": 4.0,
    "Xlog1py": 8.0,
    "Prod": 4.0,
    "Cumprod": 8.0,
    "TensorScatterAdd": 8.0,
    "LeakyRelu": 5.0,
    "Atan2": INFINITY,  # close to where it jumps
    "HSVToRGB": 16.0,
    "ResizeArea": 4.0,
}
# An exclusive product begins with 1, the slope of a leaky ReLU is not known, and hues are those of
# any colors.
LOOSE_RANGES = {"Cumprod", "LeakyRelu", "RGBToHSV"}


def claimed_and_actual(function, reference, data, may_be_infinite):
    """Returns the bound of the errors of results, and the errors."""
    number_format, relative, absolute = data.draw(errors())
    with_absolute = data.draw(st.booleans())
    values = [
        Value(
            *data.draw(ranges(domain, may_be_infinite)),
            relative=relative,
            absolute=absolute if with_absolute else 0.0,
        )
        for domain in reference.domains
    ]
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    exact = [
        elements(random, *value.ordinary, terms)
        for value, terms in zip(values, reference.terms, strict=True)
    ]
    how = data.draw(st.sampled_from(HOW))
    off = [
        np.clip(off_by(random, operand, value, how, number_format), *domain)
        for operand, value, domain in zip(exact, values, reference.domains, strict=True)
    ]
    call = Call(terms=max(reference.terms))
    found = function.of(values, call).value
    if "multiplies_matrices" in function.traits and not found.is_bounded:
        found = Value(relative=INFINITY)  # its errors are not followed
    is_long_sum = call.terms and not all(value.is_bounded for value in values)
    scale = call.terms if is_long_sum and not found.is_bounded else 1.0
    results, results_off = results_of(reference, exact), results_of(reference, off)
    is_number = np.isfinite(results) & np.isfinite(results_off)
    results, results_off = results[is_number], results_off[is_number]
    claimed = found.relative * np.abs(results) + found.absolute * scale
    largest = max(float(np.max(np.abs(each), initial=0.0)) for each in (*exact, results))
    return claimed, np.abs(results_off - results), reference.precision * (1.0 + largest)


@pytest.mark.parametrize("function", identified(WITH_ERRORS))
@PROPERTY
@given(data=st.data())
@np.errstate(all="ignore")
def test_results_of_inexact_operands_are_off_by_no_more_than_the_row_says(function, data):
    reference = reference_of(function)
    claimed, actual, tolerance = claimed_and_actual(function, reference, data, may_be_infinite=True)
    is_more = actual > SLACK * claimed + tolerance
    assert not is_more.any(), (actual[is_more], claimed[is_more])


@pytest.mark.parametrize("function", identified(WITH_ERRORS))
@PROPERTY
@given(data=st.data())
@np.errstate(all="ignore")
def test_ranges_and_errors_are_reached(function, data):
    reference = reference_of(function)
    number_format, relative, absolute = data.draw(errors())
    values = [
        Value(*data.draw(wide_ranges(domain)), 0.0, relative, absolute)
        for domain in reference.domains
    ]
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    operands = [
        densely(random, value.low, value.high, terms)
        for value, terms in zip(values, reference.terms, strict=True)
    ]
    found = function.of(values, Call(terms=max(reference.terms))).value
    results = results_of(reference, operands)
    if found.magnitude > 1e10 or not np.isfinite(results).all():
        return  # at a pole
    name = names_of(function)[0]
    factor, width = LOOSE.get(name, 2.5), np.max(results) - np.min(results)
    if name not in LOOSE_RANGES:
        assert found.high - found.low <= factor * width + 1e-6 * (1.0 + found.magnitude)
    if not width or not 1e-9 * found.magnitude < found.error < INFINITY:
        return  # a constant, or a pole
    claimed = found.relative * np.abs(results) + found.absolute
    share = 0.0
    for how in HOW[1:]:
        off = [
            np.clip(off_by(random, operand, value, how, number_format), *domain)
            for operand, value, domain in zip(operands, values, reference.domains, strict=True)
        ]
        actual = np.abs(results_of(reference, off) - results)
        share = max(share, np.nanmax(np.where(claimed > 0, actual / claimed, 1.0)))
    assert share * factor >= 1.0, (share, found)
