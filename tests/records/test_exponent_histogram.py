import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmp.records import BIN_COUNT, ExponentHistogram
from kmp.records.exponent_histogram import shifted


def histogram(scale=8.0, **counts):
    array = np.zeros(BIN_COUNT, np.int64)
    for exponent, count in counts.pop("exponents", {}).items():
        array[exponent + 150] = count
    array[[0, -2, -1]] = counts.get("zero", 0), counts.get("inf", 0), counts.get("nan", 0)
    return ExponentHistogram(array, step=3, loss_scale=scale)


def exponents_of(histogram):
    nonempty = histogram.by_exponent > 0
    return dict(zip(histogram.exponents[nonempty].tolist(), histogram.by_exponent[nonempty].tolist(), strict=True))


def test_counts_are_available_by_category_and_make_two_histograms_equal():
    result = histogram(zero=4, inf=2, nan=1, exponents={-24: 5, 15: 8})
    assert (result.zeros, result.infs, result.nans, result.total) == (4, 2, 1, 20)
    assert exponents_of(result) == {-24: 5, 15: 8}
    assert result.zero_fraction == 0.2
    assert math.isnan(histogram().zero_fraction)
    assert (result.is_finite, histogram(zero=4).is_finite) == (False, True)
    assert repr(result) == "<ExponentHistogram step=3 loss_scale=8: 20 elements, 4 zero, 2 inf, 1 nan>"
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


def test_unscaled_histogram_is_the_scaled_histogram_shifted():
    unscaled = histogram(scale=2.0**10, zero=3, inf=1, exponents={-24: 5, 15: 8}).unscaled
    assert exponents_of(unscaled) == {-34: 5, 5: 8}
    assert (unscaled.zeros, unscaled.infs, unscaled.loss_scale) == (3, 1, 1.0)


def test_unscaled_histogram_needs_unscaled_counts_if_the_scale_is_not_a_power_of_two():
    scaled = histogram(scale=1000.0, exponents={0: 2})
    with pytest.raises(ValueError, match="not a power of two. Received: loss_scale=1000.0"):
        _ = scaled.unscaled
    with_unscaled = ExponentHistogram(scaled.counts, 3, 1000.0, histogram(exponents={-10: 2}).counts)
    assert exponents_of(with_unscaled.unscaled) == {-10: 2}
    assert with_unscaled != scaled


@given(st.integers(-300, 300), st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_shifted_counts_are_the_counts_of_the_multiplied_values(exponent, value):
    original = histogram(exponents={math.frexp(value)[1] - 1: 1} if value else {}, zero=int(value == 0))
    result = shifted(original.counts, exponent)
    magnitude = abs(math.ldexp(value, exponent)) if value else 0.0
    if magnitude == 0 or magnitude < 2.0**-149:
        assert result[0] == 1
    elif magnitude >= 2.0**128:
        assert result[-2] == 1
    else:
        assert result[math.frexp(magnitude)[1] - 1 + 150] == 1
    assert result.sum() == 1
