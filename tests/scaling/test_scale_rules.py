import itertools
import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ReferenceRule

from kmp.scaling import DynamicScale, FixedScale, ScaleState, StepOutcome

powers = st.integers(-14, 20).map(lambda exponent: 2.0**exponent)
OUTCOMES = [(False, True), (True, True), (True, False)]  # pairs (overflowed, loss_was_finite)


def run_rule(rule, outcomes, compile_step=lambda step: step):
    """Applies the rule to steps of pairs (overflowed, loss_was_finite); returns the states as Python numbers."""
    states = run_rule_on_sequences(rule, [outcomes], compile_step)
    return [tuple(values[0].item() for values in state) for state in states]


def run_rule_on_sequences(rule, sequences, compile_step=lambda step: step):
    """As `run_rule` for several sequences of equal length at once; returns for each step the states as three arrays."""
    step = compile_step(
        lambda state, overflowed, finite: rule.update(ScaleState(*state), StepOutcome(overflowed, finite))
    )
    count = len(sequences)
    state, states = (tf.fill([count], rule.initial_scale), *[tf.zeros([count], tf.int64)] * 2), []
    for outcomes in zip(*sequences, strict=True):
        state = step(tuple(state), *(tf.constant(flags) for flags in zip(*outcomes, strict=True)))
        states.append([tensor.numpy() for tensor in state])
    return states


def assert_equals_reference(arguments, length, compile_step=lambda step: step):
    """Compares the rule with the reference after each step of every sequence of outcomes of a length."""
    sequences = list(itertools.product(OUTCOMES, repeat=length))
    references = [ReferenceRule(**{"initial_scale": 2.0**15} | arguments) for _ in sequences]
    states = run_rule_on_sequences(DynamicScale(**arguments), sequences, compile_step)
    for number, state in enumerate(states):
        expected = [
            reference.step(*outcomes[number]) for reference, outcomes in zip(references, sequences, strict=True)
        ]
        for actual, values in zip(state, zip(*expected, strict=True), strict=True):
            np.testing.assert_array_equal(actual, values)


ARGUMENTS = [
    {},
    {"initial_scale": 4.0, "min_scale": 1.0, "max_scale": 16.0, "growth_interval": 1},
    {"growth_interval": 2, "hysteresis": 2, "growth_factor": 4.0, "backoff_factor": 0.25},
    {"growth_interval": 3, "hysteresis": 3, "growth_factor": 1.5, "backoff_factor": 0.9, "min_scale": 2.0**-20},
]
COMPILERS = {"eager": lambda step: step, "graph": tf.function, "xla": tf.function(jit_compile=True)}


@pytest.mark.parametrize("mode", COMPILERS)
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_rule_equals_the_reference_on_every_sequence_of_eight_outcomes(arguments, mode):
    assert_equals_reference(arguments, 8, COMPILERS[mode])


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_rule_equals_the_reference_on_a_long_sequence_of_scalars(arguments):
    rule, reference = DynamicScale(**arguments), ReferenceRule(**{"initial_scale": 2.0**15} | arguments)
    state = ScaleState(tf.constant(rule.initial_scale), *[tf.constant(0, tf.int64)] * 2)
    for number in range(60):  # backs off to the lowest scale, grows several times, and takes mixed outcomes
        outcome = OUTCOMES[1] if number < 32 else OUTCOMES[0] if number < 45 else OUTCOMES[number * number % 3]
        state = rule.update(state, StepOutcome(*map(tf.constant, outcome)))
        assert [tensor.shape for tensor in state] == [()] * 3
        assert tuple(tensor.numpy().item() for tensor in state) == reference.step(*outcome)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.tuples(powers, powers, powers).map(sorted))
def test_rule_equals_the_reference_for_any_settings(interval, hysteresis, bounds):
    names = ("min_scale", "initial_scale", "max_scale", "growth_interval", "hysteresis")
    assert_equals_reference(dict(zip(names, (*bounds, interval, hysteresis), strict=True)), 6)


@pytest.mark.parametrize(
    ("arguments", "overflows", "expected"),
    [
        ({"initial_scale": 4.0, "min_scale": 1.0}, [True] * 4, [2.0, 1.0, 1.0, 1.0]),
        ({"initial_scale": 4.0, "max_scale": 16.0}, [False] * 4, [8.0, 16.0, 16.0, 16.0]),
        # Factors whose products are beyond float32.
        (
            {"growth_factor": 2.0**127, "backoff_factor": 2.0**-140, "min_scale": 2.0**-126},
            [False, False, True, True],
            [2.0**127, 2.0**127, 2.0**-126, 2.0**-126],
        ),
    ],
)
def test_scale_stays_within_its_bounds(arguments, overflows, expected):
    states = run_rule(DynamicScale(**arguments, growth_interval=1), [(overflowed, True) for overflowed in overflows])
    assert [scale for scale, *_ in states] == expected


def test_nonfinite_loss_changes_neither_scale_nor_growth_interval():
    states = run_rule(DynamicScale(growth_interval=3), [(False, True), (True, False), (False, True), (False, True)])
    assert [scale for scale, *_ in states] == [2.0**15, 2.0**15, 2.0**15, 2.0**16]


def test_fixed_scale_is_constant_and_counts_steps():
    states = run_rule(FixedScale(64.0), [(False, True), (True, True), (True, True)])
    assert states == [(64.0, 1, 0), (64.0, 0, 1), (64.0, 0, 2)]


@pytest.mark.parametrize(
    ("loaded", "bounded"),
    [(math.inf, 8.0), (0.0, 8.0), (math.nan, 8.0), (-1.0, 8.0), (64.0, 32.0), (1.0, 2.0), (4.0, 4.0)],
)
def test_loaded_scale_is_clipped_to_the_bounds(loaded, bounded):
    rule = DynamicScale(initial_scale=8.0, min_scale=2.0, max_scale=32.0)
    assert float(rule.bounded(tf.constant(loaded))) == bounded
    assert float(FixedScale(16.0).bounded(tf.constant(loaded))) == 16.0
