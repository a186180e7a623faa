"""Causes in the loss scale: settings that overflow or underflow, and branches that underflow."""

import pytest
from built_runs import (
    ALL_ZERO,
    BFLOAT16,
    DEFAULT_SCALE,
    FLOAT16,
    FLOAT32,
    compared,
    edits_of,
    failed_backward,
    failed_in_float32,
    gradient,
    make_replay,
    names,
    problem,
    problems,
    run_of,
    sample_from,
    sampled,
    skipped,
    stuck,
    training,
    wrong,
)

from kmp.diagnosis import ERROR, INFO, WARNING, Observations, causes_of
from kmp.diagnosis.causes.backward_overflow import BackwardOverflow
from kmp.diagnosis.causes.flushed_branch import FlushedBranch
from kmp.diagnosis.causes.rule_overflows import RuleOverflows
from kmp.diagnosis.causes.scale_too_large import ScaleTooLarge
from kmp.diagnosis.causes.scale_too_small import ScaleTooSmall
from kmp.records import Record
from kmp.records.replay import NonfinitePart

STARTED = Record(step=1, overflow_count=0, overflows_in_a_row=0, loss_scale=DEFAULT_SCALE)


def usable_at(scale, **values):
    """Returns a replay whose gradients are finite at this scale, without a change of layers."""
    return failed_backward(float32_layers=[], usable_scale=scale, **values)


def causes(run):
    """Returns all causes, also what is no problem."""
    return list(causes_of(Observations(run)))


# An initial scale that is too large.


@pytest.mark.parametrize(
    ("count", "steps", "severity"),
    [(6, 1000, None), (7, 1000, INFO), (100, 1000, INFO), (101, 1000, WARNING), (11, 50, WARNING)],
)
def test_initial_scale_that_skipped_many_steps_is_reported(count, steps, severity):
    scale = DEFAULT_SCALE * 2.0**-count
    records = [skipped(count, each, scale=scale) for each in (count + 1, steps)]
    found = [each for each in causes(training(*records)) if isinstance(each, ScaleTooLarge)]
    assert [each.severity for each in found] == ([severity] if severity else [])
    for cause in found:
        assert (cause.name, cause.location) == ("initial_scale", "initial_scale")
        assert (cause.scale, cause.suitable) == (DEFAULT_SCALE, scale)
        assert (cause.skipped, cause.first_steps) == (count, count + 1)
        assert (cause.is_replayed, cause.is_cured_by_float32) == (False, False)
        assert edits_of(cause) == [f"kmp.enable(initial_scale=2.0**{15 - count})"]


def test_record_without_a_count_of_overflows_is_not_the_first_after_an_applied_step():
    uncounted = Record(step=1, overflows_in_a_row=0, loss_scale=8.0)
    (cause,) = causes(run_of(uncounted, skipped(12, 30, scale=8.0), **FLOAT16))
    assert cause.first_steps == 30


def test_initial_scale_at_which_all_steps_were_skipped_has_not_dropped_to_the_one_of_the_replay():
    record = stuck(2.0**7, 8, origin="", replay=usable_at(2.0**4))
    cause = problem(training(record))
    assert (cause.name, cause.severity) == ("initial_scale", ERROR)
    assert (cause.suitable, cause.is_replayed) == (2.0**4, True)
    assert (cause.skipped, cause.first_steps) == (8, 8)


def test_scale_that_has_grown_since_the_start_is_not_an_initial_one():
    records = [skipped(8, each, scale=2.0**9) for each in (9, 1000)]
    assert causes(training(*records)) == []


# Fixed and minimum scales, and formats that need none.


@pytest.mark.parametrize("overflows", [1, 2])
@pytest.mark.parametrize(
    ("settings", "kind", "severity"),
    [
        ({"rule": "FixedScale"}, ScaleTooLarge, ERROR),
        ({"growth_interval": 10}, RuleOverflows, WARNING),
        ({"growth_interval": 20}, None, None),  # it has not grown
        ({"compute_dtypes": ["bfloat16"]}, ScaleTooLarge, ERROR),
    ],
)
def test_one_skipped_step_of_a_short_run_is_no_pattern(overflows, settings, kind, severity):
    found = problems(training(STARTED, skipped(overflows, 20), **settings))
    is_found = bool(found) and isinstance(found[0], kind or ())
    assert is_found == (overflows == 2 and kind is not None)
    if is_found:
        assert found[0].severity == severity


@pytest.mark.parametrize(("exponent", "suitable"), [(14, None), (15, None), (16, 2.0**14)])
def test_fixed_scale_names_the_one_that_the_samples_allow(exponent, suitable):
    # One bit of headroom: a gradient of 2^15 at the scale of 2^15 bears 2^14.
    settings = {"rule": "FixedScale", "initial_scale": DEFAULT_SCALE}
    records = [sampled(50, {"net/kernel": gradient(exponent - 1)}), skipped(20)]
    cause = problem(training(*records, **settings))
    assert (cause.name, cause.location) == ("scale_too_large", "loss_scale")
    assert (cause.scale, cause.skipped, cause.suitable) == (DEFAULT_SCALE, 20, suitable)
    assert edits_of(cause) == ["kmp.enable(loss_scale='dynamic')"]


def test_skipped_steps_after_a_repair_are_a_share_of_the_steps_after_it():
    before = Record(step=1000, overflow_count=4, fallback=["net"], fallback_reason="It overflows.")
    cause = problem(training(before, skipped(14, 1050), rule="FixedScale"))
    assert isinstance(cause, ScaleTooLarge)
    assert (cause.skipped, cause.run.skipped.steps) == (10, 50)


@pytest.mark.parametrize(
    ("record", "settings", "suitable", "edit"),
    [
        (  # no step was applied
            stuck(2.0**10, replay=usable_at(2.0**3)),
            {"min_scale": 2.0**10},
            2.0**3,
            "min_scale=2.0**-14, initial_scale=2.0**3",
        ),
        (
            stuck(2.0**10, 60, in_a_row=40, replay=usable_at(2.0**-10)),
            {"min_scale": 2.0**10},
            2.0**-10,
            "min_scale=2.0**-16, initial_scale=2.0**-10",
        ),
        (
            skipped(40, 60, in_a_row=40, scale=2.0**10, replay=usable_at(2.0**3)),
            {"min_scale": 2.0**10},
            2.0**3,
            "min_scale=2.0**-14",
        ),
    ],
)
def test_minimum_that_keeps_an_unsuitable_scale_is_lowered(record, settings, suitable, edit):
    cause = problem(training(record, **settings))
    assert (cause.name, cause.severity, cause.location) == ("scale_too_large", ERROR, "min_scale")
    assert (cause.scale, cause.suitable) == (settings["min_scale"], suitable)
    assert cause.is_replayed
    assert edits_of(cause) == [f"kmp.enable({edit})"]


@pytest.mark.parametrize(("count", "is_cause"), [(5, False), (6, True)])
def test_minimum_overflows_in_many_steps(count, is_cause):
    record = skipped(count, scale=2.0**10, replay=usable_at(2.0**3))
    assert bool(names(training(record, min_scale=2.0**10))) == is_cause


def test_scale_that_falls_to_that_of_the_replay_is_an_initial_one():
    run = training(stuck(2.0**60, replay=usable_at(2.0**10)), initial_scale=2.0**90)
    cause = problem(run)
    assert (cause.name, cause.severity) == ("initial_scale", ERROR)
    assert edits_of(cause) == ["kmp.enable(initial_scale=2.0**10)"]


@pytest.mark.parametrize("settings", [BFLOAT16, FLOAT32])
def test_loss_scale_that_someone_sets_is_named_where_it_overflows(settings):
    own = settings | {"initial_scale": 2.0**126, "settings_call": "kmp.wrap"}
    record = skipped(20, origin="net/a/kernel", scale=2.0**126)
    cause = problem(training(record, **own))
    assert isinstance(cause, ScaleTooLarge)
    assert (cause.is_needless, cause.scale, cause.location) == (True, 2.0**126, "loss_scale")
    assert edits_of(cause) == ["kmp.wrap(loss_scale=1.0)"]


# Rules with which the scale overflows again and again.


@pytest.mark.parametrize(
    ("settings", "in_a_row", "arguments"),
    [
        ({"growth_interval": 20}, 1, {"growth_interval": "2000"}),
        ({"growth_interval": 100}, 1, {"growth_interval": "2000"}),
        ({"growth_interval": 101}, 1, None),
        ({"backoff_factor": 0.999}, 1, {"backoff_factor": "0.5"}),
        (
            {"growth_interval": 4, "growth_factor": 8.0, "backoff_factor": 0.97},
            20,
            {"growth_interval": "2000", "growth_factor": "2.0", "backoff_factor": "0.5"},
        ),
        (
            {"growth_interval": 20, "hysteresis": 2},
            1,
            {"growth_interval": "2000", "hysteresis": "1"},
        ),
        ({"growth_interval": 1000}, 1, None),
        ({"hysteresis": 2}, 1, None),
        ({"growth_interval": 20}, 12, None),  # a longer streak than these settings cause
    ],
)
def test_scale_that_grows_more_than_it_backs_off_is_reported_with_what_is_not_the_default(
    settings, in_a_row, arguments
):
    found = problems(training(STARTED, skipped(100, 200, in_a_row=in_a_row), **settings))
    found = [each for each in found if isinstance(each, RuleOverflows)]
    assert bool(found) == (arguments is not None)
    for cause in found:
        assert (cause.name, cause.severity) == ("growth_interval_too_small", WARNING)
        assert cause.change.edits[0].arguments == arguments
        assert (cause.arguments, cause.location) == ([*arguments], next(iter(arguments)))
        assert (cause.overflows, cause.is_stuck) == (100, False)
        assert not cause.is_cured_by_float32


@pytest.mark.parametrize(
    ("record", "is_cause"),
    [
        (skipped(200, 200, in_a_row=200), False),  # never applied
        (skipped(4, 200), False),
        (skipped(5, 200), True),
    ],
)
def test_growth_that_costs_few_steps_is_not_reported(record, is_cause):
    run = training(STARTED, record, growth_interval=20)
    assert ("growth_interval_too_small" in names(run)) == is_cause


@pytest.mark.parametrize(("hysteresis", "is_cause"), [(1000, True), (100, False)])
def test_hysteresis_keeps_a_scale_that_overflows(hysteresis, is_cause):
    found = problems(training(stuck(DEFAULT_SCALE, 100), hysteresis=hysteresis))
    assert isinstance(found[0], RuleOverflows) == is_cause
    if is_cause:
        (cause,) = found
        assert (cause.name, cause.severity) == ("hysteresis_too_large", ERROR)
        assert (cause.location, cause.is_stuck, cause.overflows) == ("hysteresis", True, 100)
        assert edits_of(cause) == ["kmp.enable(hysteresis=1)"]


def test_hysteresis_is_not_the_cause_if_a_layer_overflows():
    record = stuck(DEFAULT_SCALE, 100, replay=failed_backward(float32_layers=["net/conv"]))
    assert isinstance(problem(training(record, hysteresis=1000)), BackwardOverflow)


def test_bad_batches_of_a_short_run_are_not_a_matter_of_the_rule():
    replay = failed_in_float32(nonfinite=NonfinitePart("the batch's x"))
    record = skipped(2, 20, nonfinite=2, replay=replay)
    assert names(training(STARTED, record, growth_interval=10)) == ["data"]


# A scale at which gradients underflow.


def sampled_at(scale, variables, **values):
    """Returns the records of three samples of the same variables."""
    records = [sampled(step, variables, scale=scale) for step in (1, 50, 100)]
    for key, value in values.items():
        setattr(records[0], key, value)
    return records


def flushed_at(scale, usable=None, **values):
    """Returns records whose samples are all zero, because float16 flushed them."""
    replay = make_replay(loss_scale=scale, flushed={"net/kernel": 1.0}, usable_scale=usable)
    return sampled_at(scale, {"net/kernel": ALL_ZERO}, replay=replay, **values)


REFERENCE = sample_from(1, 1.0, {"net/kernel": gradient(-12)})


@pytest.mark.parametrize(
    ("records", "settings", "edits"),
    [
        (flushed_at(DEFAULT_SCALE, 2.0**45), {}, ["kmp.enable(initial_scale=2.0**45)"]),
        (flushed_at(DEFAULT_SCALE), {}, []),  # the scale in use is not advised
        (
            flushed_at(2.0**-14, reference=REFERENCE),
            {"initial_scale": 2.0**-14, "max_scale": 2.0**-14},
            ["kmp.enable(initial_scale=2.0**26, max_scale=2.0**127)"],
        ),
        (
            flushed_at(4.0),
            {"rule": "FixedScale", "initial_scale": 4.0},
            ["kmp.enable(loss_scale='dynamic')"],
        ),
    ],
)
def test_scale_that_flushes_gradients_is_raised(records, settings, edits):
    cause = problem(training(*records, **settings))
    assert isinstance(cause, ScaleTooSmall)
    assert (cause.name, cause.severity) == ("scale_too_small", ERROR)
    fixed = settings.get("rule") == "FixedScale"
    assert cause.location == ("loss_scale" if fixed else "initial_scale")
    assert (cause.flushed_share, cause.largest, edits_of(cause)) == (1.0, "", edits)
    assert not cause.is_cured_by_float32


def spread(small, largest_exponent=0):
    """Returns a gradient with as many subnormal elements of 100, and large ones."""
    counts = [0] * (largest_exponent + 21)
    counts[0], counts[-1] = small, 100 - small
    return gradient(-20, counts=counts, amax=2.0**largest_exponent)


@pytest.mark.parametrize(("small", "is_cause"), [(25, False), (26, True)])
def test_many_subnormal_gradients_ask_for_a_larger_scale(small, is_cause):
    run = training(*sampled_at(DEFAULT_SCALE, {"net/kernel": spread(small)}))
    assert names(run) == (["scale_too_small"] if is_cause else [])
    if is_cause:
        assert problem(run).subnormal_share == small / 100


@pytest.mark.parametrize(("share", "is_cause"), [(0.05, False), (0.06, True)])
def test_many_flushed_gradients_ask_for_a_larger_scale(share, is_cause):
    replay = make_replay(flushed={"net/kernel": share})
    run = training(*sampled_at(DEFAULT_SCALE, {"net/kernel": gradient(-6)}, replay=replay))
    assert names(run) == (["scale_too_small"] if is_cause else [])


@pytest.mark.parametrize(
    ("reference", "flushed", "is_cause"),
    [
        ({"net/kernel": gradient(-15), "net/bias": gradient(-42)}, "net/bias", False),
        ({"net/kernel": gradient(-17), "net/bias": gradient(-42)}, "net/bias", True),
        ({"other/kernel": gradient(-15), "net/bias": gradient(-42)}, "net/bias", True),
        # Other elements of the same variable say nothing: a sum of small terms is exact.
        ({"net/kernel": gradient(-15), "net/bias": gradient(-42)}, "net/kernel", True),
    ],
    ids=["noise", "larger than noise", "another layer", "the variable itself"],
)
def test_what_is_below_the_rounding_error_beside_it_is_not_flushed(reference, flushed, is_cause):
    records = sampled_at(
        DEFAULT_SCALE,
        {"net/kernel": gradient(0), "net/bias": ALL_ZERO},
        replay=make_replay(flushed={flushed: 0.6}),
        reference=sample_from(1, 1.0, reference),
    )
    assert names(training(*records)) == (["scale_too_small"] if is_cause else [])


def test_subnormal_gradients_that_agree_with_float32_are_no_problem():
    records = sampled_at(DEFAULT_SCALE, {"net/kernel": spread(60)})
    for record, error in zip((records[0], records[2]), (0.01, 0.05), strict=True):
        record.replay = compared(gradient_errors=[wrong("net", error)])
    (cause,) = causes(training(*records))
    assert (cause.name, cause.severity) == ("scale_too_small", INFO)
    records[2].replay = compared(gradient_errors=[wrong("net", 0.11)])
    assert problem(training(*records)).severity == ERROR


@pytest.mark.parametrize("overflows", [1, 2])
def test_scale_that_overflows_too_is_not_too_small(overflows):
    records = sampled_at(DEFAULT_SCALE, {"net/kernel": spread(60)})
    found = names(training(*records, skipped(overflows, 150)))
    assert ("scale_too_small" in found) == (overflows == 1)


def test_underflow_at_a_lower_scale_is_not_attributed_to_the_scale_in_use():
    low = [sampled(step, {"net/kernel": gradient(-20)}, scale=0.25) for step in (2, 3)]
    later = [sampled(50, scale=2.0**12), Record(step=60, loss_scale=None)]
    assert names(training(*low, *later)) == []
    cause = problems(training(*low))[0]
    assert (cause.name, cause.subnormal_share) == ("scale_too_small", 1.0)


def test_nonfinite_samples_and_references_are_not_used():
    nan = {"net/kernel": {"nan": 100, "norm": 1.0}}
    reference = Record(step=50, reference=sample_from(50, 1.0, nan))
    zeros = {"net/kernel": gradient(-6, zero=150)}
    assert causes(training(sampled(50, zeros, scale=2.0**12), reference)) == []


# A part of the model whose gradients underflow.


@pytest.mark.parametrize(
    ("small", "largest_exponent", "is_cause"), [(50, 10, False), (51, 10, True), (60, 9, False)]
)
def test_variable_that_keeps_the_scale_too_low_for_the_others_is_reported(
    small, largest_exponent, is_cause
):
    variables = {
        "net/kernel": gradient(largest_exponent, 100 - small),
        "net/small/kernel": gradient(-20, small),
    }
    found = problems(training(*sampled_at(16.0, variables)))
    assert ([each.name for each in found] == ["range"]) == is_cause
    if is_cause:
        (cause,) = found
        assert (cause.severity, cause.location, edits_of(cause)) == (WARNING, "net/kernel", [])
        assert (cause.largest, cause.smallest) == ("net/kernel", "net/small/kernel")
        assert cause.subnormal_share == small / 100


BRANCHES = {"a": ["b"], "b": ["head_b"], "c": ["head_c"], "head_b": [], "head_c": []}
CHAIN = {"a": ["b"], "b": ["c"], "c": ["head"], "head": []}
DENSE = {"layers": dict.fromkeys("abc", "Dense")}


@pytest.mark.parametrize(
    ("next_layers", "is_cause"), [(BRANCHES, True), (CHAIN, False), ({}, False)]
)
def test_flushed_layers_are_a_branch_if_no_layer_that_follows_them_keeps_its_gradients(
    next_layers, is_cause
):
    variables = {"a/kernel": ALL_ZERO, "b/kernel": ALL_ZERO, "c/kernel": gradient(15)}
    replay = make_replay(loss_scale=2.0**12, flushed={"a/kernel": 1.0, "b/kernel": 1.0})
    small = {"a/kernel": gradient(-40), "b/kernel": gradient(-40)}
    reference = sample_from(1, 1.0, variables | small)
    records = sampled_at(2.0**12, variables, replay=replay, reference=reference)
    run = training(*records, next_layers=next_layers, **DENSE)
    assert names(run) == (["branch_underflow"] if is_cause else [])
    if is_cause:
        cause = problem(run)
        assert isinstance(cause, FlushedBranch)
        assert (cause.severity, cause.location, cause.layers) == (ERROR, "a", ["a", "b"])
        assert (cause.flushed, cause.alive, cause.loss_scale) == (2, 1, 2.0**12)
        assert (cause.gap.largest, cause.gap.largest_exponent) == ("c/kernel", 15)
        assert cause.gap.median_exponent == -40
        assert not cause.is_cured_by_float32


@pytest.mark.parametrize(("exponent", "has_headroom"), [(10, False), (9, True)])
def test_head_that_is_flushed_beside_one_that_keeps_the_scale_low_has_no_edit(
    exponent, has_headroom
):
    # The layer nearest the input is alive too, so that this is no underflow on the way there.
    alive = gradient(exponent)
    variables = {"first/kernel": alive, "a/kernel": ALL_ZERO, "b/kernel": alive}
    replay = make_replay(loss_scale=2.0**12, flushed={"a/kernel": 1.0})
    records = sampled_at(2.0**12, variables, replay=replay)
    cause = problems(training(*records, **DENSE))[0]
    assert (cause.name, cause.location) == ("branch_underflow", "a")
    assert cause.has_headroom == has_headroom
    assert edits_of(cause) == (["kmp.enable(initial_scale=2.0**17)"] if has_headroom else [])


@pytest.mark.parametrize(("share", "is_cause"), [(0.5, False), (0.51, True)])
def test_branch_is_flushed_for_the_most_part(share, is_cause):
    variables = {"c/kernel": gradient(-6), "b/kernel": ALL_ZERO}
    records = sampled_at(
        1.0, variables, replay=make_replay(loss_scale=1.0, flushed={"b/kernel": share})
    )
    run = training(*records, next_layers=BRANCHES, **DENSE)
    assert any(isinstance(each, FlushedBranch) for each in problems(run)) == is_cause


@pytest.mark.parametrize(("norm", "is_cause"), [(1.0, True), (1e-5, False)])
def test_branch_that_has_learned_is_not_reported(norm, is_cause):
    variables = {"c/kernel": gradient(-6), "b/kernel": ALL_ZERO}
    records = sampled_at(1.0, variables)
    for record, each in zip(records[::2], (1.0, norm), strict=True):
        record.replay = make_replay(loss_scale=1.0, flushed={"b/kernel": 1.0})
        in_float32 = variables | {"b/kernel": gradient(-9, norm=each)}
        record.reference = sample_from(record.step, 1.0, in_float32)
    found = problems(training(*records, next_layers=BRANCHES, **DENSE))
    assert any(isinstance(each, FlushedBranch) for each in found) == is_cause
