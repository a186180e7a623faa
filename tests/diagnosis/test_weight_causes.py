"""Causes in the weights: divisions by epsilon, divergence, and weights that are not finite."""

import math

import pytest
from built_runs import (
    BFLOAT16,
    FLOAT32,
    edits_of,
    failed_backward,
    failed_in_float32,
    gradient,
    names,
    problem,
    problems,
    sample_from,
    skipped,
    stuck,
    training,
    updated,
)

from kmp.diagnosis import ERROR, Observations, cure_of, thresholds
from kmp.diagnosis.causes.backward_overflow import BackwardOverflow
from kmp.diagnosis.causes.division_by_epsilon import DivisionByEpsilon
from kmp.diagnosis.causes.exploding import Exploding
from kmp.diagnosis.causes.lost_squares import LostSquares
from kmp.diagnosis.causes.nonfinite_weights import NonfiniteWeights
from kmp.records import Record

NAN_WEIGHTS = failed_in_float32(nonfinite_variables=["net/a/kernel"])


# The epsilon of an optimizer.


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_epsilon_of_zero_is_reported_for_weights_of_any_dtype(dtype):
    record = skipped(50, nonfinite=50, replay=NAN_WEIGHTS)
    settings = {"epsilon": 0.0, "optimizer": "Adam", "variable_dtypes": [dtype]}
    cause = problem(training(record, **settings))
    assert isinstance(cause, DivisionByEpsilon)
    assert (cause.name, cause.severity) == ("optimizer_state", ERROR)
    assert (cause.location, cause.epsilon) == ("net/a/kernel", 0.0)
    assert (cause.is_float16, cause.is_cured_by_float32) == (dtype == "float16", False)
    in_float32 = ["kmp.enable(policy='mixed_float16')"] if cause.is_float16 else []
    assert edits_of(cause) == [*in_float32, "keras.optimizers.Adam(epsilon=1e-7)"]


@pytest.mark.parametrize(
    ("epsilon", "dtype", "is_cause"),
    [
        (2.0**-25, "float16", True),  # rounds to 0
        (2.0**-24, "float16", False),
        (1e-7, "float32", False),
        (1e-39, "float32", True),  # subnormal
        (1e-37, "float32", False),
    ],
)
def test_epsilon_is_zero_in_the_dtype_of_the_state(epsilon, dtype, is_cause):
    record = skipped(50, nonfinite=50, replay=NAN_WEIGHTS)
    cause = problem(training(record, epsilon=epsilon, variable_dtypes=[dtype]))
    assert isinstance(cause, DivisionByEpsilon if is_cause else NonfiniteWeights)


ADAM = {"epsilon": 1e-7, "optimizer": "Adam", "learning_rate": 1e-3, "variable_dtypes": ["float16"]}


def adam_step(norm, exponent=-11):
    """Returns a step that changes four weights; the squares of the gradients are 0 in float16."""
    return updated(50, norm, **gradient(exponent, 4))


def test_squares_that_adam_loses_in_float16_are_reported_by_the_steps_that_it_takes():
    cause = problems(training(adam_step(1.0), policy="float16", **ADAM))[0]
    assert isinstance(cause, LostSquares)
    assert (cause.name, cause.severity, cause.location) == ("optimizer_state", ERROR, "epsilon")
    assert (cause.step, cause.path, cause.epsilon) == (50, "net/kernel", 1e-7)
    assert cause.times == pytest.approx(500.0)  # 1 / sqrt(4) / 1e-3
    assert cause.highest == -8
    assert edits_of(cause) == ["kmp.enable(policy='mixed_float16')"]


@pytest.mark.parametrize(
    ("settings", "edit"),
    [
        (
            {"policy": "mixed_float16", "own_dtype_variables": ["net/kernel"]},
            "self.add_weight(dtype='float32', name='kernel')",
        ),
        (  # as of a model that was saved with them
            {"policy": "float16", "policy_in_force": "mixed_float16"},
            "model = kmp.convert(kmp.to_float32(model), 'mixed_float16')",
        ),
    ],
)
def test_weights_in_float16_are_changed_where_they_are_created(settings, edit):
    assert edits_of(problems(training(adam_step(1.0), **ADAM | settings))[0]) == [edit]


@pytest.mark.parametrize(
    ("step", "settings", "is_cause"),
    [
        (adam_step(0.0201), {}, True),  # a root mean square of 10 times the learning rate
        (adam_step(0.0199), {}, False),
        (updated(50, 1.0), {}, False),  # large gradients: a constraint changes weights by more
        (adam_step(1.0, exponent=-30), {}, False),  # the epsilon is larger than these anyway
        (adam_step(0.65), {"steps_per_execution": 32}, True),
        (adam_step(0.63), {"steps_per_execution": 32}, False),
        (adam_step(1.0), {"optimizer": "RMSprop"}, False),  # its epsilon is inside the root
        (adam_step(1.0), {"variable_dtypes": ["float32"]}, False),
        (
            adam_step(1.0),
            {
                "variable_dtypes": ["float16", "float32"],
                "float32_variables": ["net/kernel"],
            },
            False,
        ),
        (adam_step(1.0), {"learning_rate": None}, False),
    ],
)
def test_squares_are_lost_if_adam_takes_large_steps_for_small_gradients(step, settings, is_cause):
    found = problems(training(step, **ADAM | settings))
    assert any(isinstance(cause, LostSquares) for cause in found) == is_cause


# Weights that are not finite.


@pytest.mark.parametrize("is_first", [True, False])
def test_weights_that_are_not_finite_before_the_first_update_are_not_a_matter_of_the_rate(is_first):
    streak = 100 if is_first else 99
    last = {"in_a_row": streak, "nonfinite_losses_in_a_row": streak, "replay": NAN_WEIGHTS}
    start = skipped(1, 1, nonfinite=1, in_a_row=int(is_first))
    run = training(start, skipped(50, nonfinite=50, **last), optimizer="Adam")
    cause = problem(run)
    assert isinstance(cause, NonfiniteWeights)
    assert (cause.name, cause.severity, cause.location) == ("loss", ERROR, "net/a/kernel")
    assert (cause.variables, cause.is_from_start) == (["net/a/kernel"], is_first)
    assert not cause.is_cured_by_float32
    rate = "keras.optimizers.Adam(learning_rate=0.1 * learning_rate)"
    assert edits_of(cause) == ([] if is_first else [rate])


# Updates that are too large.

ALL_LOSSES_NONFINITE = {"nonfinite": 59, "in_a_row": 59, "nonfinite_losses_in_a_row": 59}
# Scattered non-finite losses, and a streak of overflows of gradients.
MIXED = {"nonfinite": 15, "in_a_row": 15, "nonfinite_losses_in_a_row": 0}
ROSE = Record(step=60, last_loss=3e4, highest_loss=7e4)
NOISY = [Record(step=60, last_loss=0.9, highest_loss=3.2), updated(50, 0.41)]


def losses(highest, last):
    return Record(step=60, last_loss=last, highest_loss=highest)


def epochs(*values):
    steps = range(15 * (5 - len(values)), 75, 15)
    return [Record(step=at, metrics={"loss": loss}) for at, loss in zip(steps, values, strict=True)]


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([ROSE], ["exploding"]),
        ([losses(101.0, 101.0)], ["exploding"]),
        ([losses(99.0, 99.0)], []),
        ([ROSE, updated(50, 1e-5)], []),  # a high loss with small updates
        ([ROSE, updated(50, 0.049)], []),
        ([ROSE, updated(50, 0.051)], ["exploding"]),
        ([skipped(59, 60, **ALL_LOSSES_NONFINITE)], ["loss"]),
        ([skipped(59, 60, highest_loss=9e4, **ALL_LOSSES_NONFINITE)], ["exploding"]),
        ([skipped(30, 60, highest_loss=9e4, **MIXED)], ["loss"]),
        (NOISY, ["exploding"]),
        ([losses(3.2, 0.9), updated(50, 0.19)], []),
        ([losses(1.9, 0.9), updated(50, 0.41)], []),
        ([losses(3.2, 0.4), updated(50, 0.41)], []),  # it has fallen again
        ([*NOISY, *epochs(1.3, 1.1)], []),  # noisy batches, while the loss of the epochs falls
        ([*NOISY, *epochs(1.3, 1.1, 1.1, 1.1)], ["exploding"]),
        ([skipped(7, 60), updated(50, 0.51)], ["exploding"]),  # with many skipped steps
        ([skipped(7, 60), updated(50, 0.49)], []),
        ([skipped(6, 60), updated(50, 0.51)], []),
    ],
)
def test_explosion_is_a_loss_that_rose_with_large_updates(records, expected):
    found = problems(training(*records))
    assert [each.name for each in found] == expected
    if expected == ["exploding"]:
        assert isinstance(found[0], Exploding)
        assert (found[0].severity, found[0].is_cured_by_float32) == (ERROR, False)


@pytest.mark.parametrize("settings", [BFLOAT16, FLOAT32])
def test_updates_that_are_too_large_are_reported_in_every_format(settings):
    assert isinstance(problem(training(ROSE, **settings)), Exploding)


def test_growth_of_weights_between_samples_is_an_update():
    records = [updated(1, 1e-3), updated(21, 1e-3, weight_norm=41.0), losses(7e4, 0.9)]
    cause = problem(training(*records, learning_rate=3.0))
    assert (cause.step, cause.ratio) == (21, pytest.approx(2.0))
    assert (cause.first_loss, cause.highest_loss) == (1.0, 7e4)
    assert (cause.has_large_updates, cause.has_risen) == (True, True)
    assert edits_of(cause) == ["keras.optimizers.Adam(learning_rate=0.01)"]


@pytest.mark.parametrize(
    ("samples", "rates", "rate"),
    [
        ([{"update_norm": 0.2}], (), "0.02"),
        ([{"update_norm": math.nan}, {"update_norm": 0.2}], (), "0.02"),
        ([{"update_norm": 0.02}, {"update_norm": 0.2}], (), "0.02"),
        ([{"update_norm": 0.2}], (0.4, 0.1), "0.02"),  # a rate that falls
        ([{"update_norm": 0.2}], (0.4, 0.8), "0.0002"),  # one that rises
        ([{"update_norm": 0.02}, {"update_norm": 2.0, "weight_norm": 9.0}], (), "0.0001"),
    ],
)
def test_smaller_rate_follows_from_the_first_large_update_of_weights_that_have_not_grown(
    samples, rates, rate
):
    early = [updated(step, **each) for step, each in enumerate(samples, 1)]
    of_epochs = [
        Record(step=step, metrics={"learning_rate": each}) for step, each in enumerate(rates, 60)
    ]
    run = training(*early, updated(50, 40.0), losses(7e4, 0.9), *of_epochs, learning_rate=0.4)
    cause = problem(run)
    assert (cause.step, cause.ratio) == (50, pytest.approx(40.0))
    assert edits_of(cause) == [f"keras.optimizers.Adam(learning_rate={rate})"]


@pytest.mark.parametrize(("optimizer", "name"), [("Lion", "Lion"), ("exec('x') or Adam", "Adam")])
def test_optimizer_that_is_no_name_is_not_part_of_the_edit(optimizer, name):
    (edit,) = problem(training(losses(1e9, 1e9), optimizer=optimizer)).change.edits
    assert edit.call == f"keras.optimizers.{name}"


def sgd_run(largest_input=1.0, norm=1e6, **settings):
    """Returns a run of skipped steps; SGD's first update would be 1000 times the weights."""
    known = {"optimizer": "SGD", "learning_rate": 0.01}
    replay = failed_backward(of_activations={"net/a": 2.0}, largest_input=largest_input)
    variables = {"net/a/kernel": gradient(15, norm=norm, weight_norm=10.0)}
    samples = {
        "sample": sample_from(2, 2.0**3, variables),
        "reference": sample_from(2, 1.0, variables),
    }
    return training(stuck(replay=replay, **samples), **known | settings)


def test_update_that_sgd_would_make_is_a_divergence_and_no_reason_for_a_repair():
    cause = problem(sgd_run())
    assert isinstance(cause, Exploding)
    assert (cause.is_estimated, cause.step, cause.ratio) == (True, 41, pytest.approx(1000.0))
    assert edits_of(cause) == ["keras.optimizers.SGD(learning_rate=1e-07)"]
    assert cure_of(Observations(sgd_run())) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "Adam"},
        {"clips": True},
        {"learning_rate": 1e-5},
        {"norm": 1e4},  # an estimate of 10
    ],
)
def test_update_that_is_not_known_to_be_too_large_is_no_divergence(settings):
    assert isinstance(problems(sgd_run(**settings))[0], BackwardOverflow)
    assert cure_of(Observations(sgd_run(**settings))).layers == ("net/a",)


@pytest.mark.parametrize(
    ("largest_input", "is_large"), [(thresholds.LARGE_INPUT, False), (301.0, True)]
)
def test_inputs_far_from_unit_scale_are_normalized_in_a_training_that_diverges(
    largest_input, is_large
):
    cause = problem(sgd_run(largest_input))
    rate = "keras.optimizers.SGD(learning_rate=1e-07)"
    normalized = "x = (x - x.mean(axis=0)) / (x.std(axis=0) + 1e-6)"
    assert edits_of(cause) == [normalized if is_large else rate]
    assert (cause.location, cause.large_input) == (("x", "x") if is_large else ("", ""))
    assert cause.largest_input == (largest_input if is_large else 0.0)


def test_weights_that_begin_at_zero_have_no_size_before_they_have_grown():
    first = updated(1, 1.0, weight_norm=0.0)
    grown = updated(2, 1.0, weight_norm=2.0), updated(102, 0.1, weight_norm=20.0)
    assert names(training(first, *grown, losses(3.2, 0.9))) == []
