import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from built_runs import bin_counts, make_replay, run_of, sample_from

from kmp import what_if
from kmp.records import GradientSample, Record
from kmp.records.replay import LayerSearch


def sample(values, scale=1.0, step=1):
    values = np.asarray(values, np.float64)
    exponents = np.frexp(values[np.isfinite(values) & (values != 0)])[1] - 1
    others = np.sum(values == 0), np.isinf(values).sum(), np.isnan(values).sum()
    counts = bin_counts(Counter(exponents.tolist()), *others)
    amax = np.array([np.abs(values).max(initial=0)])
    return GradientSample(
        step, scale, ("v",), counts[None], amax, np.ones(1), np.ones(1), np.ones(1)
    )


def test_shares_match_casting_the_gradient_at_every_scale():
    gradient = np.exp2(np.random.default_rng(0).uniform(-60, 10, 5000)).astype(np.float32)
    curve = what_if([sample(gradient * np.float32(2.0**6), scale=2.0**6)])
    for k in range(-18, 31):
        with np.errstate(over="ignore"):
            cast = (gradient.astype(np.float64) * 2.0**k).astype(np.float16)
        assert curve.at(k)["underflow"] == np.mean(cast == 0)
        # The bin of 2^15 contains values that round to 65504 and values that round to Inf.
        assert abs(curve.at(k)["overflow"] - np.mean(np.isinf(cast))) <= 0.002
        assert curve.at(k)["skipped"] == np.isinf(cast).any()


def test_zeros_are_in_the_upper_bound_and_scales_above_the_one_in_use_are_extrapolated():
    curve = what_if([sample([0, 0, 0, 1.0], scale=2.0**4)])
    assert curve.at(4) == {
        "underflow": 0.0,
        "underflow_bound": 0.75,
        "overflow": 0.0,
        "skipped": 0.0,
    }
    assert (curve.is_measured, curve.is_lowest_known) == (False, False)
    assert curve.log2_scales[curve.is_extrapolated].tolist() == list(range(5, 29))
    of_zeros = what_if([sample([0.0, 0.0])])
    assert of_zeros.at(0) == {
        "underflow": 0.0,
        "underflow_bound": 1.0,
        "overflow": 0.0,
        "skipped": 0.0,
    }


def test_variables_of_float32_layers_are_ignored():
    small, large = (
        {"first": -30, "counts": [1], "amax": 2.0**-30},
        {"first": 0, "counts": [1], "amax": 1.0},
    )
    row = Record(step=1, sample=sample_from(1, 1.0, {"a": small, "b": large}))

    def underflow(*float32_variables):
        return what_if(run_of(row, float32_variables=list(float32_variables))).at(0)["underflow"]

    assert (underflow(), underflow("a"), underflow("b")) == (0.5, 0.0, 1.0)
    assert underflow("a", "b") == 0.5  # in a float32 run all variables count


def test_float32_reference_makes_the_curve_exact_unless_it_overflowed():
    reference = sample([0, 0, 2.0**-40, 2.0**-4])
    curve = what_if(
        run_of(Record(step=1, sample=sample([0, 0, 0, 1.0], scale=2.0**4), reference=reference))
    )
    assert (curve.is_measured, curve.is_lowest_known) == (True, True)
    assert not curve.is_extrapolated.any()
    assert curve.in_use == 4.0
    assert curve.at(4) == {
        "underflow": 0.25,
        "underflow_bound": 0.25,
        "overflow": 0.0,
        "skipped": 0.0,
    }
    assert curve.at(16)["underflow"] == 0.0
    curve = what_if(
        run_of(
            Record(step=1, sample=sample([1.0, 0.0])), Record(step=2, reference=sample([np.inf]))
        )
    )
    assert (curve.is_measured, curve.at(0)["underflow_bound"]) == (False, 0.5)


WIDE, WIDER = [2.0**-30, 2.0**-10], [2.0**-60, 2.0**-10]
FINITE = make_replay(8, 1.0, 1.0, 1.0, True, True, usable_scale=2.0**9)
OVERFLOWS_AT_EVERY_SCALE = replace(
    FINITE, is_finite=False, search=LayerSearch(is_found=True, layers=["modulus"])
)


@pytest.mark.parametrize(
    ("row", "recommended"),
    [
        ({"sample": sample(WIDE)}, (5, 24)),  # 2^-30 times 2^5 is 2^-25; 2^-10 times 2^24 is 2^14
        ({"sample": sample(WIDER)}, None),
        ({"sample": sample([0.0, 0.0])}, None),
        ({"sample": sample([2.0**-149], scale=4.0)}, None),  # it is zero without the loss scale
        ({"sample": sample(WIDE), "replay": FINITE}, (5, 9)),  # the limit of activation gradients
        ({"sample": sample(WIDE), "replay": OVERFLOWS_AT_EVERY_SCALE}, None),
        ({"sample": sample([2.0**4]), "reference": sample([2.0**-10])}, (-29, 10)),  # suits both
    ],
)
def test_recommended_range_extends_from_underflow_to_one_bit_below_overflow(row, recommended):
    curve = what_if(run_of(Record(step=1, **row)))
    assert curve.recommended == recommended
    assert np.isfinite(curve.underflow).all()


def test_overflowed_sample_counts_as_skipped_at_its_scale_and_above():
    curve = what_if(
        [sample([1.0], scale=2.0**4), sample([math.inf], scale=2.0**8), sample([1.0], scale=2.0**4)]
    )
    assert [curve.at(k)["skipped"] for k in (7, 8)] == [0.0, 1 / 3]


@pytest.mark.parametrize("samples", [[], [sample([])], [sample([math.nan, 1.0])]])
def test_samples_without_finite_gradients_are_an_error(samples):
    with pytest.raises(ValueError, match="no sample of finite gradients"):
        what_if(samples)


def test_scales_stay_within_the_range_of_float32():
    assert what_if([sample([1.0], scale=2.0**127)]).log2_scales[-1] == 127
    assert what_if([sample([1.0], scale=2.0**-126)]).log2_scales[0] == -126


@pytest.mark.parametrize("amax", [0.0, 1e30, math.nan])
def test_amax_that_contradicts_the_counts_is_replaced_by_their_largest_exponent(amax):
    right = sample([1.0, 2.0**-10])
    curve, expected = what_if([replace(right, amax=np.array([amax]))]), what_if([right])
    assert abs(curve.recommended[1] - expected.recommended[1]) <= 1
    np.testing.assert_allclose(curve.underflow, expected.underflow)
