import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops
from reference import ReferenceRule

from kmp.scaling import DynamicScale, FixedScale, ScaleState, StepOutcome

powers = st.integers(-14, 20).map(lambda exponent: 2.0**exponent)
OUTCOMES = [(False, True), (True, True), (True, False)]  # pairs (overflowed, loss_was_finite)
DTYPES = ["float32", "int64", "int64"]
NAMESPACES = {np: np.asarray, ops: tf.constant}  # of arrays, with what makes one


def states_of(rule, outcomes, xp=ops):
    """Yields the state after each step of pairs (overflowed, loss_was_finite), as numbers."""
    array = NAMESPACES[xp]
    counts = [array(0, "int64")] * 2
    state = ScaleState(array(rule.initial_scale, "float32"), *counts)
    for outcome in outcomes:
        state = rule.update(state, StepOutcome(*map(array, outcome)), xp=xp)
        assert [value.shape for value in state] == [()] * 3
        assert [ops.convert_to_tensor(value).dtype for value in state] == DTYPES
        yield tuple(np.asarray(value).item() for value in state)


def assert_equals_reference(arguments, length, compile_step=lambda step: step):
    """Compares the rule with the reference after each step of every sequence of a length."""
    rule, sequences = DynamicScale(**arguments), list(itertools.product(OUTCOMES, repeat=length))
    references = [ReferenceRule(**{"initial_scale": 2.0**15} | arguments) for _ in sequences]
    state = (
        tf.fill([len(sequences)], rule.initial_scale),
        *[tf.zeros([len(sequences)], tf.int64)] * 2,
    )
    step = compile_step(
        lambda state, *outcome: rule.update(ScaleState(*state), StepOutcome(*outcome), xp=ops)
    )
    for outcomes in zip(*sequences, strict=True):
        state = step(tuple(state), *(tf.constant(flags) for flags in zip(*outcomes, strict=True)))
        expected = [
            reference.step(*outcome)
            for reference, outcome in zip(references, outcomes, strict=True)
        ]
        for actual, values in zip(state, zip(*expected, strict=True), strict=True):
            np.testing.assert_array_equal(actual, values)


ARGUMENTS = [
    {},
    {"initial_scale": 4.0, "min_scale": 1.0, "max_scale": 16.0, "growth_interval": 1},
    {"growth_interval": 2, "hysteresis": 2, "growth_factor": 4.0, "backoff_factor": 0.25},
    {
        "growth_interval": 3,
        "hysteresis": 3,
        "growth_factor": 1.5,
        "backoff_factor": 0.9,
        "min_scale": 2.0**-20,
    },
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_rule_equals_the_reference_on_every_sequence_of_eight_outcomes_under_xla(arguments):
    assert_equals_reference(arguments, 8, tf.function(jit_compile=True))


@pytest.mark.parametrize("xp", NAMESPACES, ids=["numpy", "keras"])
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_rule_equals_the_reference_on_a_long_sequence_of_scalars(arguments, xp):
    # It backs off to the lowest scale, grows several times, and takes mixed outcomes.
    outcomes = [
        *OUTCOMES[1:2] * 32,
        *OUTCOMES[:1] * 13,
        *(OUTCOMES[number * number % 3] for number in range(45, 60)),
    ]
    reference = ReferenceRule(**{"initial_scale": 2.0**15} | arguments)
    expected = [reference.step(*outcome) for outcome in outcomes]
    assert list(states_of(DynamicScale(**arguments), outcomes, xp)) == expected


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.tuples(powers, powers, powers).map(sorted))
def test_rule_equals_the_reference_for_any_settings(interval, hysteresis, bounds):
    names = ("min_scale", "initial_scale", "max_scale", "growth_interval", "hysteresis")
    assert_equals_reference(dict(zip(names, (*bounds, interval, hysteresis), strict=True)), 6)


def test_scale_stays_within_its_bounds_if_factors_have_products_beyond_float32():
    arguments = {
        "growth_factor": 2.0**127,
        "backoff_factor": 2.0**-140,
        "min_scale": 2.0**-126,
        "growth_interval": 1,
    }
    outcomes = [(False, True), (False, True), (True, True), (True, True)]
    scales = [scale for scale, *_ in states_of(DynamicScale(**arguments), outcomes)]
    assert scales == [2.0**127, 2.0**127, 2.0**-126, 2.0**-126]


def test_fixed_scale_is_constant_and_counts_steps():
    states = states_of(FixedScale(64.0), [(False, True), (True, True), (True, True)])
    assert list(states) == [(64.0, 1, 0), (64.0, 0, 1), (64.0, 0, 2)]
