import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ReferenceRule

from kmp.scaling import DynamicScale, FixedScale, ScaleState, StepOutcome
from kmp.scaling.settings import make_rule

powers = st.integers(-14, 20).map(lambda exponent: 2.0**exponent)


def initial_state(rule):
    return tf.constant(rule.initial_scale), tf.constant(0, tf.int64), tf.constant(0, tf.int64)


def step_function(rule, compile_step=lambda step: step):
    return compile_step(
        lambda state, overflowed, finite: rule.update(ScaleState(*state), StepOutcome(overflowed, finite))
    )


def run_rule(rule, outcomes, step=None):
    """Applies the rule to pairs (overflowed, loss_was_finite); returns the states as Python numbers."""
    step = step or step_function(rule)
    state, states = initial_state(rule), []
    for overflowed, loss_was_finite in outcomes:
        state = step(tuple(state), tf.constant(overflowed), tf.constant(loss_was_finite))
        states.append(tuple(t.numpy().item() for t in state))
    return states


ARGUMENTS = [
    {},
    {"initial_scale": 4.0, "min_scale": 1.0, "max_scale": 16.0, "growth_interval": 1},
    {"growth_interval": 2, "hysteresis": 2, "growth_factor": 4.0, "backoff_factor": 0.25},
    {"growth_interval": 3, "hysteresis": 3, "growth_factor": 1.5, "backoff_factor": 0.9, "min_scale": 2.0**-20},
]
COMPILERS = {"eager": lambda step: step, "graph": tf.function, "xla": tf.function(jit_compile=True)}
STEPS = {
    (mode, index): step_function(DynamicScale(**arguments), compile_step)
    for mode, compile_step in COMPILERS.items()
    for index, arguments in enumerate(ARGUMENTS)
}
outcomes_of_steps = st.lists(st.sampled_from([(False, True), (True, True), (True, False)]), max_size=30)


@pytest.mark.parametrize("mode", COMPILERS)
@settings(max_examples=40, deadline=None)
@given(outcomes=outcomes_of_steps, index=st.integers(0, len(ARGUMENTS) - 1))
def test_rule_matches_the_reference_for_any_outcomes(mode, outcomes, index):
    reference = ReferenceRule(**{"initial_scale": 2.0**15} | ARGUMENTS[index])
    expected = [reference.step(overflowed, loss_was_finite) for overflowed, loss_was_finite in outcomes]
    assert run_rule(DynamicScale(**ARGUMENTS[index]), outcomes, STEPS[mode, index]) == expected


@settings(max_examples=40, deadline=None)
@given(outcomes_of_steps, st.integers(1, 4), st.integers(1, 3), st.tuples(powers, powers, powers).map(sorted))
def test_rule_matches_the_reference_for_any_settings(outcomes, interval, hysteresis, bounds):
    names = ("min_scale", "initial_scale", "max_scale", "growth_interval", "hysteresis")
    arguments = dict(zip(names, (*bounds, interval, hysteresis), strict=True))
    reference = ReferenceRule(**arguments)
    expected = [reference.step(overflowed, loss_was_finite) for overflowed, loss_was_finite in outcomes]
    assert run_rule(DynamicScale(**arguments), outcomes) == expected


def test_scale_stays_within_its_bounds():
    rule = DynamicScale(initial_scale=4.0, min_scale=1.0, max_scale=8.0, growth_interval=1)
    assert {scale for scale, *_ in run_rule(rule, [(True, True)] * 9)} == {2.0, 1.0}
    assert {scale for scale, *_ in run_rule(rule, [(False, True)] * 9)} == {8.0}


def test_extreme_factors_keep_the_scale_finite_and_above_zero():
    rule = DynamicScale(growth_factor=2.0**127, backoff_factor=2.0**-140, growth_interval=1, min_scale=2.0**-126)
    scales = [scale for scale, *_ in run_rule(rule, [(False, True), (False, True), (True, True), (True, True)])]
    assert scales == [2.0**127, 2.0**127, 2.0**-126, 2.0**-126]


def test_nonfinite_loss_changes_neither_scale_nor_growth_interval():
    states = run_rule(DynamicScale(growth_interval=3), [(False, True), (True, False), (False, True), (False, True)])
    assert [scale for scale, *_ in states] == [2.0**15, 2.0**15, 2.0**15, 2.0**16]


def test_fixed_scale_is_constant_and_counts_steps():
    states = run_rule(FixedScale(64.0), [(False, True), (True, True), (True, True)])
    assert states == [(64.0, 1, 0), (64.0, 0, 1), (64.0, 0, 2)]


INVALID_NUMBERS = [math.nan, math.inf, -math.inf, 0, -1, -0.5, "1", None, [1], True]


@pytest.mark.parametrize("value", INVALID_NUMBERS)
@pytest.mark.parametrize(
    "name",
    ["initial_scale", "growth_interval", "growth_factor", "backoff_factor", "hysteresis", "min_scale", "max_scale"],
)
def test_invalid_value_raises_with_argument_value_and_range(name, value):
    with pytest.raises((ValueError, TypeError)) as error:
        make_rule(**{name: value})
    message = str(error.value)
    ranges = {
        "growth_interval": "1 to 2",
        "hysteresis": "1 to 2",
        "growth_factor": "above 1",
        "backoff_factor": "0 and 1",
    }
    assert f"`{name}` must be" in message
    assert ranges.get(name, "2^-126 to 2^127") in message
    assert f"{name}={value!r}" in message


@pytest.mark.parametrize(
    ("loaded", "bounded"),
    [(math.inf, 8.0), (0.0, 8.0), (math.nan, 8.0), (-1.0, 8.0), (64.0, 32.0), (1.0, 2.0), (4.0, 4.0)],
)
def test_loaded_scale_is_clipped_to_the_bounds(loaded, bounded):
    rule = DynamicScale(initial_scale=8.0, min_scale=2.0, max_scale=32.0)
    assert float(rule.bounded(tf.constant(loaded))) == bounded
    assert float(FixedScale(16.0).bounded(tf.constant(loaded))) == 16.0


def test_numpy_numbers_are_accepted():
    assert make_rule(initial_scale=np.float32(8), growth_interval=np.int64(3)) == DynamicScale(8.0, 3)
