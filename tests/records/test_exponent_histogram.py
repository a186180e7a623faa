import math

import numpy as np
import pytest
from built_runs import bin_counts
from hypothesis import given
from hypothesis import strategies as st

from kmp.records import ExponentHistogram


def histogram(scale=8.0, **counts):
    return ExponentHistogram(bin_counts(**counts), step=3, loss_scale=scale)


def exponents_of(histogram):
    nonempty = histogram.by_exponent > 0
    return dict(
        zip(
            histogram.exponents[nonempty].tolist(),
            histogram.by_exponent[nonempty].tolist(),
            strict=True,
        )
    )


def test_counts_are_available_by_category_and_make_two_histograms_equal():
    result = histogram(zero=4, inf=2, nan=1, exponents={-24: 5, 15: 8})
    assert (result.zeros, result.infs, result.nans, result.total) == (4, 2, 1, 20)
    assert exponents_of(result) == {-24: 5, 15: 8}
    assert result.zero_fraction == 0.2
    assert math.isnan(histogram().zero_fraction)
    assert (result.is_finite, histogram(zero=4).is_finite) == (False, True)
    assert (
        repr(result) == "<ExponentHistogram step=3 loss_scale=8: 20 elements, 4 zero, 2 inf, 1 nan>"
    )
    assert histogram(zero=4) == histogram(zero=4)
    assert histogram(zero=4) != histogram(zero=5)
    assert len({histogram(zero=4), histogram(zero=4)}) == 1
    with pytest.raises(ValueError, match=r"\(280,\)"):
        ExponentHistogram(np.zeros(4), 1, 1.0)


def test_zones_split_at_the_limits_of_float16():
    counts = {-25: 1, -24: 2, -15: 4, -14: 8, 12: 16, 13: 32, 15: 64, 16: 128}
    assert histogram(zero=3, inf=5, nan=7, exponents=counts).zones == {
        **{"zero": 3, "below_subnormal": 1, "subnormal": 2 + 4, "normal": 8 + 16},
        **{"near_overflow": 32 + 64, "beyond": 128, "inf": 5, "nan": 7},
    }


@pytest.mark.parametrize(
    ("scale", "exponent"), [(1000.0, -10), (1025.0, -10), (1500.0, -11), (0.3, 2)]
)
def test_unscaled_histogram_is_shifted_by_the_nearest_power_of_two(scale, exponent):
    assert exponents_of(histogram(scale=scale, exponents={0: 2}).unscaled) == {exponent: 2}


@given(st.integers(-300, 300), st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_unscaled_counts_are_those_of_the_divided_values(log2_scale, value):
    exponents = {math.frexp(value)[1] - 1: 1} if value else {}
    unscaled = histogram(
        2.0**log2_scale, exponents=exponents, zero=2 + (value == 0), inf=3, nan=4
    ).unscaled
    magnitude = math.ldexp(abs(value), -log2_scale)
    is_zero, is_inf = magnitude < 2.0**-149, magnitude >= 2.0**128
    assert (unscaled.zeros, unscaled.infs, unscaled.nans) == (2 + is_zero, 3 + is_inf, 4)
    assert exponents_of(unscaled) == (
        {} if is_zero or is_inf else {math.frexp(magnitude)[1] - 1: 1}
    )
    assert unscaled.loss_scale == 1.0
