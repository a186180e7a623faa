import functools
import math

import numpy as np
import pytest
import tensorflow as tf

import kmp
from kmp.scaling import DynamicScale, FixedScale
from kmp.scaling.settings import loss_scale_rule


def test_loss_scale_selects_the_rule_and_a_fixed_scale_may_be_outside_the_dynamic_bounds():
    assert loss_scale_rule(loss_scale="dynamic", initial_scale=8.0) == DynamicScale(
        initial_scale=8.0
    )
    assert loss_scale_rule(loss_scale=2.0**-20, initial_scale=2.0**-20) == FixedScale(2.0**-20)


def test_scalars_of_every_library_are_accepted():
    settings = {
        "initial_scale": np.float32(8),
        "growth_interval": tf.constant(7),
        "max_scale": np.array(16),
    }
    rule = loss_scale_rule(**settings)
    assert rule == DynamicScale(initial_scale=8.0, growth_interval=7, max_scale=16.0)
    assert [
        type(value) for value in (rule.initial_scale, rule.growth_interval, rule.max_scale)
    ] == [float, int, float]
    defaults = {"growth_interval": 2000.0, "max_scale": 2.0**127}
    assert loss_scale_rule(loss_scale=tf.constant(8.0), **settings | defaults) == FixedScale(8.0)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -1, 0, "static", None, [1], True, 2.0**128, 2.0**-127]
)
def test_invalid_loss_scale_raises_with_the_argument(value):
    with pytest.raises((ValueError, TypeError), match="`loss_scale` must be"):
        loss_scale_rule(loss_scale=value)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 0, -1, -0.5, "1", None, [1], True]
)
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *[(name, "2^-126 to 2^127") for name in ("initial_scale", "min_scale", "max_scale")],
        *[(name, "1 to 2") for name in ("growth_interval", "hysteresis")],
        ("growth_factor", "above 1"),
        ("backoff_factor", "0 and 1"),
    ],
)
def test_invalid_value_raises_with_argument_value_and_range(name, expected, value):
    with pytest.raises((ValueError, TypeError)) as error:
        loss_scale_rule(**{name: value})
    for part in (f"`{name}` must be", expected, f"{name}={value!r}"):
        assert part in str(error.value)


def test_factors_closest_to_1_in_float32_are_accepted():
    factors = {"growth_factor": 1 + 2.0**-23, "backoff_factor": 1 - 2.0**-24}
    assert vars(DynamicScale(**factors)).items() >= factors.items()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"growth_interval": 1.5}, "growth_interval=1.5"),
        ({"max_scale": 2.0**128}, "2\\^127"),
        ({"initial_scale": 2.0**-20}, "between `min_scale` and `max_scale`"),
        (
            {"min_scale": 2.0, "max_scale": 1.0},
            "`min_scale` must be at most.*min_scale=2.0, max_scale=1.0",
        ),
        ({"growth_interval": 2**63}, "growth_interval=9223372036854775808"),
        ({"initial_scale": 10**400}, "`initial_scale` must be"),
        # After rounding to float32, factors differ from 1.
        ({"growth_factor": 1 + 2.0**-24}, "`growth_factor` must be"),
        ({"backoff_factor": 1 - 2.0**-25}, "`backoff_factor` must be"),
        ({"loss_scale": np.array([1.0, 2.0])}, "`loss_scale` must be 'dynamic', or"),
        ({"loss_scale": np.bool_(False)}, "`loss_scale` must be"),
        ({"loss_scale": 2.0, "growth_interval": 5}, "no other settings"),
        ({"loss_scale": 2.0, "initial_scale": 4.0}, "no other settings"),
    ],
)
def test_invalid_or_contradictory_values_raise(arguments, match):
    with pytest.raises((ValueError, TypeError), match=match):
        loss_scale_rule(**arguments)


@pytest.mark.parametrize("call", [loss_scale_rule, kmp.enable, functools.partial(kmp.wrap, "sgd")])
def test_unknown_argument_raises(call):
    for arguments in ({"init_scale": 2}, {"loss_scale": 8.0, "init_scale": 2}):
        with pytest.raises((TypeError, ValueError), match="argument.*init_scale"):
            call(**arguments)
