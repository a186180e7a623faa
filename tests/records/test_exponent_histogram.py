import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmp.records import BIN_COUNT, ExponentHistogram
from kmp.records.exponent_histogram import pack, shifted, unpack


def histogram(scale=8.0, **counts):
    array = np.zeros(BIN_COUNT, np.int64)
    for exponent, count in counts.pop("exponents", {}).items():
        array[exponent + 150] = count
    array[[0, -2, -1]] = counts.get("zero", 0), counts.get("inf", 0), counts.get("nan", 0)
    return ExponentHistogram(array, step=3, loss_scale=scale)


def exponents_of(found):
    filled = found.by_exponent > 0
    return dict(zip(found.exponents[filled].tolist(), found.by_exponent[filled].tolist(), strict=True))


def test_histogram_names_its_bins():
    made = histogram(zero=4, inf=2, nan=1, exponents={-24: 5, 15: 8})
    assert (made.zeros, made.infs, made.nans, made.total) == (4, 2, 1, 20)
    assert exponents_of(made) == {-24: 5, 15: 8}
    assert made.zero_fraction == 0.2
    assert not made.is_finite
    assert histogram(zero=4).is_finite


def test_histogram_survives_json():
    made = histogram(zero=4, nan=1, exponents={-149: 5, 127: 8})
    back = ExponentHistogram.from_dict(json.loads(json.dumps(made.to_dict())))
    np.testing.assert_array_equal(back.counts, made.counts)
    assert (back.step, back.loss_scale) == (3, 8.0)


def test_histograms_are_equal_when_their_contents_are():
    assert histogram(zero=4) == histogram(zero=4)
    assert histogram(zero=4) != histogram(zero=5)
    assert len({histogram(zero=4), histogram(zero=4)}) == 1


def test_histogram_shows_itself_in_one_line():
    shown = repr(histogram(zero=4, nan=1))
    assert shown == "<ExponentHistogram step=3 loss_scale=8: 5 elements, 4 zero, 0 inf, 1 nan>"


def test_histogram_of_another_shape_is_an_error():
    with pytest.raises(ValueError, match=r"\(280,\)"):
        ExponentHistogram(np.zeros(4), 1, 1.0)


def test_empty_histogram_has_no_share_of_zeros():
    assert math.isnan(histogram().zero_fraction)


def test_each_zone_of_float16_is_told_apart():
    counts = {-25: 1, -24: 2, -15: 4, -14: 8, 12: 16, 13: 32, 15: 64, 16: 128}
    assert histogram(zero=3, inf=5, nan=7, exponents=counts).zones == {
        "zero": 3,
        "below_subnormal": 1,
        "subnormal": 2 + 4,
        "normal": 8 + 16,
        "near_overflow": 32 + 64,
        "beyond": 128,
        "inf": 5,
        "nan": 7,
    }


def test_unscaled_histogram_is_the_scaled_one_shifted():
    found = histogram(scale=2.0**10, zero=3, inf=1, exponents={-24: 5, 15: 8}).unscaled
    assert exponents_of(found) == {-34: 5, 5: 8}
    assert (found.zeros, found.infs, found.loss_scale) == (3, 1, 1.0)


def test_unscaled_histogram_of_another_scale_is_the_one_that_was_counted():
    made = histogram(scale=1000.0, exponents={0: 2})
    with pytest.raises(ValueError, match="no power of two: 1000"):
        _ = made.unscaled
    counted = ExponentHistogram(made.counts, 3, 1000.0, histogram(exponents={-10: 2}).counts)
    assert exponents_of(counted.unscaled) == {-10: 2}
    assert exponents_of(ExponentHistogram.from_dict(counted.to_dict()).unscaled) == {-10: 2}


@given(st.integers(-300, 300), st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_shifting_counts_is_counting_the_multiplied_values(by, value):
    made = histogram(exponents={math.frexp(value)[1] - 1: 1} if value else {}, zero=int(value == 0))
    moved = shifted(made.counts, by)
    magnitude = abs(math.ldexp(value, by)) if value else 0.0
    if magnitude == 0 or magnitude < 2.0**-149:
        assert moved[0] == 1
    elif magnitude >= 2.0**128:
        assert moved[-2] == 1
    else:
        assert moved[math.frexp(magnitude)[1] - 1 + 150] == 1
    assert moved.sum() == 1


@given(st.dictionaries(st.integers(0, BIN_COUNT - 1), st.integers(0, 2**40)))
def test_packing_loses_nothing(filled):
    counts = np.zeros(BIN_COUNT, np.int64)
    for place, count in filled.items():
        counts[place] = count
    np.testing.assert_array_equal(unpack(json.loads(json.dumps(pack(counts)))), counts)


@pytest.mark.parametrize("first", [-150, 127])
def test_exponents_outside_float32_are_an_error(first):
    with pytest.raises(ValueError, match="between -149 and 127"):
        unpack({"zero": 0, "inf": 0, "nan": 0, "first": first, "counts": [1, 1]})
