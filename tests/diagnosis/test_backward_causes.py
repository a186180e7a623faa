"""Causes in the backward pass: gradients of a finite loss that are NaN or Inf."""

import pytest
from built_runs import (
    ALL_ZERO,
    BFLOAT16,
    FLOAT32,
    backward,
    edits_of,
    failed_backward,
    gradient,
    names,
    operation,
    problem,
    problems,
    sample_from,
    sampled,
    skipped,
    stuck,
    training,
)

from kmp.diagnosis import ERROR, WARNING, Observations, cure_of
from kmp.diagnosis.causes.backward_overflow import BackwardOverflow
from kmp.diagnosis.causes.nonfinite_gradients import NonfiniteGradients
from kmp.records import Record
from kmp.records.replay import LayerSearch

IN_LAYER_A = ["kmp.layers.Float32(Dense(..., name='a'))"]
MINIMUM = 2.0**-14


def in_float32_too(*operations):
    """Returns a replay whose gradients were not finite in float32 either."""
    return failed_backward(*operations, is_finite_in_float32=False, float32_layers=[])


# What 16 bits make NaN or Inf at every scale.


def test_overflows_at_every_loss_scale_are_reported_with_their_origin():
    origins = {"net/a/kernel": 38, "net/b/kernel": 2}
    cause = problem(training(stuck(MINIMUM, origin="", overflow_origins_by_variable=origins)))
    assert isinstance(cause, BackwardOverflow)
    assert (cause.name, cause.severity) == ("backward_overflow", ERROR)
    assert (cause.location, cause.origin) == ("net/a/kernel", "net/a/kernel")
    assert (cause.origin_share, cause.lowest_scale) == (0.95, MINIMUM)
    assert (cause.replay, cause.layer, edits_of(cause)) == (None, "", [])
    assert cause.is_cured_by_float32


def test_overflows_without_an_origin_have_no_cause():
    assert names(training(stuck(MINIMUM, origin=""))) == []
    unknown = skipped(40, 50, in_a_row=20, overflow_origins_by_variable={"a/kernel": 0})
    assert names(training(unknown)) == []


@pytest.mark.parametrize(
    ("values", "lowest_scale"),
    [
        ({"scale": MINIMUM}, MINIMUM),
        ({"scale": 2.0**3}, 2.0**4),  # the scale of the next step has not been tried
        ({"scale": 0.5, "in_a_row": 0}, None),  # the run goes on
    ],
)
def test_lowest_scale_is_the_last_that_was_tried(values, lowest_scale):
    search = LayerSearch(is_found=True, layers=["net/a"], loss_scale=2.0**9)
    replay = failed_backward(backward("Mul"), of_activations={"net/a": 2.0}, search=search)
    cause = problem(training(stuck(**values, replay=replay)))
    assert cause.lowest_scale == lowest_scale
    assert (cause.location, edits_of(cause)) == ("net/a", IN_LAYER_A)


@pytest.mark.parametrize(("in_a_row", "is_cause"), [(11, False), (12, True)])
def test_run_is_stuck_after_as_many_skipped_steps_as_lead_to_a_small_scale(in_a_row, is_cause):
    record = skipped(in_a_row, 400, in_a_row=in_a_row, origin="net/a/kernel")
    run = training(record)
    assert any(isinstance(each, BackwardOverflow) for each in problems(run)) == is_cause


@pytest.mark.parametrize(
    ("variables", "is_cause"),
    [
        ({"net/a/kernel": gradient(0), "net/b/kernel": ALL_ZERO}, True),
        ({"net/a/kernel": gradient(0), "net/b/kernel": gradient(0)}, False),
    ],
)
def test_scale_that_has_fallen_below_1_loses_other_gradients(variables, is_cause):
    record = skipped(9, 400, origin="net/a/kernel", scale=0.25)
    run = training(sampled(300, variables, scale=0.25), record)
    assert any(isinstance(each, BackwardOverflow) for each in problems(run)) == is_cause


def test_fixed_scale_with_headroom_overflows_in_a_layer():
    settings = {"rule": "FixedScale", "initial_scale": 8.0}
    record = skipped(20, origin="net/a/kernel", scale=8.0)
    cause = problems(training(sampled(50, scale=8.0), record, **settings))[0]
    assert isinstance(cause, BackwardOverflow)
    assert cause.lowest_scale == 8.0
    near_overflow = sampled(50, {"net/kernel": gradient(15)}, scale=8.0)
    assert names(training(near_overflow, record, **settings))[0] == "scale_too_large"


def test_overflows_of_a_loss_that_no_replay_has_are_not_laid_to_a_layer():
    record = stuck(MINIMUM, replay=failed_backward(is_finite=True, is_forward_only=True, loss=None))
    cause = problem(training(record, train_step="custom"))
    assert isinstance(cause, BackwardOverflow)
    assert (cause.is_of_own_loss, cause.location, edits_of(cause)) == (True, "", [])


@pytest.mark.parametrize(
    ("found", "lost", "is_division", "constant"),
    [
        (backward("SqrtGrad"), [1e-12], True, 1e-12),
        (backward("SqrtGrad"), [], False, None),  # a large gradient of a root is no division by 0
        (backward("SqrtGrad"), [1e9], False, None),
        (backward("RealDiv", smallest_input=0.0), [], True, None),
        (backward("RealDiv", smallest_input=1e-3), [1e-12], False, None),
        (backward("Mul", "nan"), [1e-12], False, None),
    ],
)
def test_backward_pass_that_divides_by_0_has_its_operation_and_the_lost_constant(
    found, lost, is_division, constant
):
    lost = {"net/a": lost} if lost else {}
    replay = failed_backward(found, lost_constants=lost, of_activations={"net/a": 0.02})
    cause = problem(training(stuck(replay=replay)))
    assert isinstance(cause, BackwardOverflow)
    assert (cause.is_division, cause.constant) == (is_division, constant)
    assert cause.operation == (found if is_division else None)
    assert (cause.location, cause.layer) == ("net/a", "net/a")
    assert edits_of(cause) == IN_LAYER_A


@pytest.mark.parametrize("layers", [["net/c"], None])
def test_overflow_that_would_cost_a_branch_is_cured_at_the_scale_of_the_branch(layers):
    search = LayerSearch(layers is not None, layers or [], loss_scale=2.0**9, branch=["net/b"])
    reference = {"net/b/kernel": gradient(-30), "net/c/kernel": gradient(9)}
    values = {"replay": failed_backward(search=search), "in_a_row": 0}
    record = stuck(0.5, reference=sample_from(40, 1.0, reference), **values)
    cause = problem(training(record, layers={"net/b": "Dense", "net/c": "Dense"}))
    assert isinstance(cause, BackwardOverflow)
    in_c = ["kmp.layers.Float32(Dense(..., name='c'))"]
    assert edits_of(cause) == (in_c if layers else ["kmp.enable(policy='float32')"])
    assert cause.change.tried.startswith("not in a replay; ") == (layers is None)


# bfloat16 and float32, which need no scale.

OF_20 = {"origin": "net/a/kernel", "scale": 1.0}


@pytest.mark.parametrize("settings", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize(
    ("steps", "severity"), [(100, ERROR), (1999, ERROR), (2000, WARNING), (5000, WARNING)]
)
def test_gradients_that_are_not_finite_are_no_matter_of_a_scale_of_1(settings, steps, severity):
    cause = problem(training(skipped(20, steps, **OF_20), **settings))
    assert isinstance(cause, BackwardOverflow)
    assert (cause.name, cause.severity) == ("backward_overflow", severity)
    assert (cause.location, cause.origin_share) == ("net/a/kernel", 1.0)
    assert (cause.replay, edits_of(cause)) == (None, [])
    assert cause.is_cured_by_float32 is False


def test_backward_pass_that_only_bfloat16_makes_infinite_is_cured_by_float32():
    found = backward("SqrtGrad", dtype="bfloat16")
    replay = failed_backward(found, of_activations={"net/a": 0.1})
    run = training(skipped(20, replay=replay, **OF_20), **BFLOAT16)
    cause = problem(run)
    assert (cause.operation, cause.is_division, cause.layer) == (found, False, "net/a")
    assert cause.is_cured_by_float32
    assert edits_of(cause) == IN_LAYER_A
    assert cure_of(Observations(run)).layers == ("net/a",)


@pytest.mark.parametrize(
    ("lost", "constant"),
    [(1e-12, None), (1e-45, 1e-45)],  # 0 in float16 and not in bfloat16; 0 in both
)
def test_constant_of_a_divisor_is_lost_in_bfloat16_if_it_is_subnormal_in_float32(lost, constant):
    found = backward("RealDiv", dtype="bfloat16", smallest_input=0.0)
    replay = failed_backward(found, lost_constants={"net/a": [lost]})
    cause = problem(training(skipped(20, replay=replay, **OF_20), **BFLOAT16))
    assert (cause.is_division, cause.constant) == (True, constant)


# What float32 does not cure.


@pytest.mark.parametrize(
    ("found", "is_slope"),
    [
        (backward("SqrtGrad", dtype="float32"), True),
        (backward("RsqrtGrad", dtype="float32"), True),
        (backward("Mul", "nan", dtype="float32"), False),
    ],
)
@pytest.mark.parametrize(
    "settings", [{}, {"rule": "FixedScale"}, {"growth_interval": 20}, BFLOAT16, FLOAT32]
)
def test_gradients_that_float32_does_not_survive_either_are_no_matter_of_the_scale(
    settings, found, is_slope
):
    replay = in_float32_too(found)
    start = skipped(1, 1, in_a_row=1, scale=2.0**14)
    clean = stuck(in_a_row=0, replay=replay)
    for records in ([stuck(replay=replay)], [start, clean]):
        cause = problem(training(*records, **settings))
        assert isinstance(cause, NonfiniteGradients)
        assert (cause.name, cause.location) == ("backward_overflow", "net/a")
        assert (cause.severity, edits_of(cause)) == (ERROR, [])
        assert (cause.operation, cause.is_slope) == (found, is_slope)
        assert not cause.is_cured_by_float32
    rare = skipped(13, 2000, origin="net/a/kernel", replay=replay)
    assert problems(training(start, rare, **settings))[0].severity == WARNING


def test_gradients_without_an_operation_are_located_at_their_origin():
    cause = problem(training(stuck(replay=in_float32_too())))
    assert isinstance(cause, NonfiniteGradients)
    assert (cause.operation, cause.origin) == (None, "net/conv/kernel")
    assert cause.location == "net/conv/kernel"


def test_forward_operation_of_the_loss_is_not_the_one_of_the_gradients():
    root, slope = operation("Sqrt", "inf"), backward("SqrtGrad", dtype="float32")
    assert problem(training(stuck(replay=in_float32_too(root, slope)))).operation == slope


def test_few_skipped_steps_of_a_long_run_are_not_reported():
    last = Record(step=20_000, overflow_count=9, overflows_in_a_row=0, loss_scale=2.0**18)
    assert names(training(last)) == []
