"""What 16 bits lose in a result, against arithmetic in 16 bits and in float64."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kmp.numerics.function import Elementwise
from kmp.numerics.functions import FUNCTIONS, tensorflow_function
from kmp.numerics.losses import exact_result, index_lost, is_elementwise, losses_of
from kmp.utils.float_formats import BFLOAT16, FLOAT16

ROWS = {each.tensorflow.split()[0]: each for each in FUNCTIONS if each.tensorflow}
COMPUTED = [kind for kind, each in ROWS.items() if is_elementwise(each)]
OF_TWO = "AddV2", "Atan2", "DivNoNan", "Mul", "Pow", "RealDiv", "SquaredDifference", "Sub"
OF_ONE = [kind for kind in COMPUTED if isinstance(ROWS[kind], Elementwise)]
RANDOM = np.random.default_rng(0)
SHAPE = 64, 16
NORMAL, OTHER = RANDOM.normal(size=(2, *SHAPE))
UNIFORM = RANDOM.uniform(0.05, 0.95, SHAPE)


def rounded(array, number_format):
    return array.astype(getattr(ml_dtypes, number_format.name, number_format.name))


def computed(kind, operands, number_format=FLOAT16):
    """Returns the results in 16 bits, of operands in 16 bits, and what is lost in them."""
    function, in_16_bits = tensorflow_function(kind), [rounded(x, number_format) for x in operands]
    with np.errstate(over="ignore"):
        result = rounded(exact_result(function, in_16_bits), number_format)
    return result.astype("float64"), losses_of(function, in_16_bits, result, number_format)


def kinds_of(kind, *operands):
    _, found = computed(kind, operands)
    return list(dict.fromkeys(each.kind for each in found))


@pytest.mark.parametrize("kind", COMPUTED)
def test_no_function_loses_anything_of_ordinary_operands(kind):
    first = UNIFORM + (kind == "Acosh")
    is_of_one = kind in OF_ONE or kind == "Reciprocal"
    assert kinds_of(kind, *[first, UNIFORM[::-1] + 0.5][: 1 if is_of_one else 2]) == []


@pytest.mark.parametrize("number_format", [FLOAT16, BFLOAT16])
@pytest.mark.parametrize("kind", [*OF_ONE, *OF_TWO])
@given(offset=st.floats(0.1, 200.0), spread=st.floats(1e-3, 10.0), beside=st.floats(0.1, 200.0))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_error_is_a_bound_and_at_most_12_times_what_rounding_does(
    kind, number_format, offset, spread, beside
):
    """Numbers of random bits are off by 0.4 unit roundoffs, and two errors may cancel."""
    low, high = tensorflow_function(kind).domain
    operands = [np.clip(offset + spread * NORMAL, low + 0.01, high - 0.01), beside + spread * OTHER]
    operands = operands[: 2 if kind in OF_TWO else 1]
    exact = exact_result(tensorflow_function(kind), operands)
    sizes = np.abs(exact)
    if not np.isfinite(exact).all() or sizes.max() > number_format.max or sizes.min() < 1e-4:
        return
    if np.std(exact) < 1e-6 * sizes.max():
        return
    result, found = computed(kind, operands, number_format)
    error = np.sqrt(np.mean((result - exact) ** 2)) / np.std(exact)
    is_of_few = np.abs(exact - exact.mean()).max() > 6 * np.std(exact)  # whose bits are not random
    for each in found:
        if each.kind != "saturation" and each.share == 1.0 and each.error < 0.3:
            assert error < 1.1 * each.error
            assert each.error < 12 * error or is_of_few


CONSTANT = np.array(500.0)


@pytest.mark.parametrize(
    ("kind", "operands", "expected"),
    [
        ("Sub", [500 + NORMAL, CONSTANT], ["cancellation"]),
        ("Sub", [500 * NORMAL, 500 * NORMAL], ["cancellation"]),
        ("Sub", [UNIFORM, UNIFORM], []),  # a mask
        ("AddV2", [NORMAL, CONSTANT], ["lost_terms"]),
        ("AddV2", [UNIFORM, np.array(1e-6)], []),
        ("AddV2", [UNIFORM, np.full(SHAPE, 1e-6)], []),
        ("AddV2", [1 + UNIFORM, 1e-6 * OTHER], ["lost_terms"]),
        ("AddN", [NORMAL, OTHER, 500 * UNIFORM], ["lost_terms"]),
        ("BiasAdd", [NORMAL, 1e-6 * OTHER[0]], []),
        ("Mul", [500 + NORMAL, np.array(0.1)], []),
        ("RealDiv", [500 + NORMAL, 500 + OTHER], []),
        ("Sqrt", [500 + NORMAL], []),
        ("Sin", [500 * NORMAL], ["phase"]),
        ("Tan", [500 * NORMAL], ["phase"]),
        ("Cos", [0.1 * NORMAL], ["lost_terms"]),
        ("Exp", [1e-3 * NORMAL], ["lost_terms"]),
        ("Log", [1 + 0.01 * UNIFORM], ["amplification"]),
        ("Pow", [1 + 0.01 * NORMAL, np.array(200.0)], ["amplification"]),
        ("SquaredDifference", [500 + NORMAL, 500 + OTHER], ["amplification"]),
        ("Sigmoid", [9 + NORMAL], ["saturation"]),
        ("Tanh", [5 * NORMAL], ["saturation"]),
        ("Erf", [5 * NORMAL], ["saturation"]),
        ("Elu", [5 * NORMAL - 5], ["saturation"]),
        ("Atan", [5000 * NORMAL], ["saturation"]),
        ("Sigmoid", [40 + NORMAL], []),  # it is 1 in float32 too
    ],
)
def test_kind_of_what_is_lost(kind, operands, expected):
    assert kinds_of(kind, *operands) == expected


@pytest.mark.parametrize(("largest", "share"), [(2000, 0.0), (4096, 0.5), (40_000, 0.95)])
def test_share_of_indices_that_a_format_does_not_have(largest, share):
    numbers = rounded(largest * np.linspace(0, 1, 1001), FLOAT16)
    found = [(each.kind, round(each.share, 2)) for each in index_lost(numbers, FLOAT16)]
    assert found == [("index", share)] * bool(share)


def test_terms_of_a_long_sum_are_lost_in_partial_sums():
    terms = np.ones((4, 4096), "float16")
    (found,) = losses_of(tensorflow_function("Sum"), [terms], terms.sum(axis=1), FLOAT16)
    assert (found.kind, found.share, found.typical) == ("lost_terms", 1.0, 1.0)
    few = terms[:, :1024]
    assert losses_of(tensorflow_function("Sum"), [few], few.sum(axis=1), FLOAT16) == []
