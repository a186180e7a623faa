"""Verdicts: what is sound, and what is not known. Their sentences stand in `sentences.md`."""

import pytest
from built_runs import (
    ALL_ZERO,
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    compared,
    gradient,
    healthy,
    make_replay,
    run_of,
    sample_from,
    sampled,
    training,
    wrong,
)

from kmp.diagnosis import INFO, Observations, causes_of, thresholds, verdict_of
from kmp.diagnosis.unknowns import unknowns
from kmp.records import Record, Run
from kmp.records.replay import GradientError, StateError
from kmp.records.step_facts import StepFacts

GOOD = "float16 does not hurt this run: "
UNKNOWN = "It is not known whether float16 hurts this run."


def text_of(*records, **settings):
    """Returns the verdict of a run in float16, unless the settings say otherwise."""
    run = Observations(run_of(*records, **FLOAT16 | settings))
    causes = list(causes_of(run))
    assert all(cause.severity == INFO for cause in causes), causes
    return verdict_of(run, causes).text


def not_known(*records, **settings):
    """Returns the number of things that the records of a run leave unknown."""
    return len(list(unknowns(Observations(run_of(*records, **FLOAT16 | settings)))))


def three(*replays, steps=(1, 50, 100), variables=None, **values):
    """Returns the records of three steps, with these replays, or two comparisons."""
    replays = replays or (compared(), None, compared())
    records = [healthy(step, variables, **values) for step in steps]
    for record, replay in zip(records, replays, strict=False):
        if replay:
            record.replay = replay
    return records


def zero_kernel(zeros=100):
    return {"net/kernel": gradient(-6, zero=zeros)}


def test_empty_run_and_a_run_with_a_problem_have_a_verdict_without_reassurance():
    assert verdict_of(Observations(Run()), []).text == "The run is empty: nothing was recorded."
    run = Observations(training(Record(step=60, last_loss=3e4, highest_loss=7e4)))
    (cause,) = causes_of(run)
    assert verdict_of(run, [cause]).text == cause.title


def test_verdict_is_good_if_everything_is_excluded():
    assert not_known(*three()) == 0
    assert text_of(*three()).startswith(GOOD)


def test_verdict_after_a_repair_is_about_the_run_since_then():
    repair = healthy(1, fallback=["net/a"], fallback_reason="It overflows.")
    records = three(steps=(2, 50, 100))
    assert text_of(repair, *records).startswith("Since step 1, with layer 'a' in float32, ")


@pytest.mark.parametrize("has_reference", [False, True])
@pytest.mark.parametrize("variables", [{"net/bias": ALL_ZERO}, zero_kernel()])
def test_gradients_that_are_zero_in_float32_too_are_measured(variables, has_reference):
    replay = compared(zero=[*variables])
    records = three(replay, None, replay, variables=variables)
    if has_reference:
        for record in records[::2]:
            record.reference = sample_from(record.step, 1.0, variables)
    assert text_of(*records).startswith(GOOD)


def test_gradients_of_a_training_that_has_converged_do_not_count():
    first = GradientError("net", 0.02, 1.0, 1.0)
    last = GradientError("net", 1.9, -0.5, 1e-4, 0.2, largest_norm=1.0)
    replays = [compared(gradient_errors=[each]) for each in (first, last)]
    assert text_of(*three(replays[0], None, replays[1])).startswith(GOOD)


def test_states_that_are_those_of_the_batch_or_noisy_are_sound():
    errors = [StateError("net/other", 1.0, 0.5, 0.99), StateError("net/last", 1.0, 0.0, 0.0)]
    assert text_of(*three(compared(), None, compared(state_errors=errors))).startswith(GOOD)


FLUSHED = compared(flushed={"net/kernel": 0.6})
HARMFUL = compared(gradient_errors=[wrong("net/dense")])
FORWARD = compared(is_forward_only=True)
NEAR_OVERFLOW = {"net/kernel": gradient(14)}
HALF_ZERO = {"net/kernel": gradient(-6), "net/bias": ALL_ZERO}
UNKNOWN_CALL = compared(), None, None

# What was recorded, with its settings, and a part of what is not known.
OPEN = {
    "nothing compared": (three(None), {}, "no batches of the run were compared"),
    "compared once": (three(*UNKNOWN_CALL), {}, "only 1 batch"),
    "compared early": (
        three(compared(), compared(), steps=(1, 30, 100)),
        {},
        "no batch of its second half",
    ),
    "replicas": (three(None), {"replicas": 4}, "4 replicas"),
    "nothing captured": (three(None), {"replay": True}, "none was captured"),
    "failed replay": (
        [healthy(1, replay_error="ValueError: no"), *three(None)[1:]],
        {},
        "ValueError: no",
    ),
    "nonfinite replay": (three(make_replay(loss=None, is_finite=False)), {}, "not finite"),
    "random pass": (three(make_replay()), {}, "random numbers"),
    "forward only": (three(*[FORWARD] * 3), {"train_step": "custom"}, "how far gradients are"),
    "forward pass of a loop": (three(*[FORWARD] * 3), {"train_step": "keras"}, "the loop scales"),
    "outputs that differ at the start": (
        three(compared(0.08), None, compared(0.02)),
        {},
        "at step 1, in 1 of 2 comparisons",
    ),
    "gradients that differ at the start": (
        three(HARMFUL, None, compared()),
        {},
        "at step 1, in 1 of 2 comparisons",
    ),
    "states not measured": (
        three(compared(), compared(state_errors=None), compared()),
        {},
        "the updates of states",
    ),
    "state in float16": (
        three(compared(states_in_16_bits=3), None, compared()),
        {},
        "3 variables in 16 bits",
    ),
    "few steps": (
        [healthy(1, replay=compared()), healthy(3, replay=compared())],
        {},
        "2 finite samples in 3 steps",
    ),
    "early samples": (
        [*three(steps=(1, 2, 3)), Record(step=200, replay=compared(), overflow_count=0)],
        {},
        "its second half has no finite sample",
    ),
    "zeros": (three(variables=zero_kernel()), {}, "exactly zero, 50.0%"),
    "zero variable": (three(variables=HALF_ZERO), {}, "including all of net/bias"),
    "flushed layer": (
        three(compared(), None, FLUSHED, variables=NEAR_OVERFLOW),
        {},
        "mostly zero in float16",
    ),
    "weights in float16": (three(), {"variable_dtypes": ["float16"]}, "change weights in float16"),
    "skipped steps": (
        [*three(overflows_in_a_row=0), Record(step=100, overflow_count=9)],
        {},
        "why steps overflow",
    ),
    "skipped steps not counted": (
        three(overflow_count=None),
        {},
        "how many steps were skipped",
    ),
    "no losses": (three(last_loss=None), {}, "whether training diverges"),
}


@pytest.mark.parametrize("case", OPEN)
def test_verdict_reassures_of_nothing_that_was_not_measured(case):
    records, settings, part = OPEN[case]
    assert not_known(*records, **settings) == 1
    measured, _, unknown = text_of(*records, **settings).partition(" Not measured: ")
    assert measured.startswith(UNKNOWN)
    assert part in unknown


def test_loop_whose_graph_shows_that_it_scales_right_leaves_only_gradients_unknown():
    settings = {"train_step": "keras", "step_facts": StepFacts("right")}
    assert not_known(*three(*[FORWARD] * 3), **settings) == 1
    assert "the loop scales" not in text_of(*three(*[FORWARD] * 3), **settings)


@pytest.mark.parametrize(
    ("share", "is_open"), [(thresholds.MANY_FLUSHED, False), (thresholds.MANY_FLUSHED + 0.01, True)]
)
def test_zeros_without_a_reference_are_open_if_they_are_many(share, is_open):
    zeros = round(100 * share / (1 - share))
    assert not_known(*three(variables=zero_kernel(zeros))) == int(is_open)


@pytest.mark.parametrize(("lost", "is_open"), [(200_000, False), (400_000, True)])
def test_zeros_with_a_reference_are_open_if_their_norm_may_matter(lost, is_open):
    records = three(variables=zero_kernel(lost))
    in_float32 = gradient(-60, counts=[lost] + [0] * 38 + [100], amax=2.0**-21)
    records[0].reference = sample_from(1, 1.0, {"net/kernel": in_float32})
    assert not_known(*records) == int(is_open)


@pytest.mark.parametrize(
    ("last", "is_known"),
    [
        ({"overflow_count": 3}, True),
        ({"overflow_count": 6}, True),
        ({"overflow_count": 7}, False),
        ({"overflow_count": 3, "overflows_in_a_row": 1}, False),
    ],
)
def test_few_steps_that_a_falling_scale_skips_need_no_other_reason(last, is_known):
    records = three(steps=(1, 8, 16), overflows_in_a_row=0)
    last = healthy(16, replay=compared(), **{"overflows_in_a_row": 0} | last)
    assert text_of(*records[:2], last).startswith(GOOD) == is_known


def test_float32_is_compared_with_nothing():
    records = three(compared(0.0), None, compared(0.0), variables=zero_kernel(900))
    nothing = "Nothing is wrong with this float32 run that kmp can see: "
    assert text_of(*records, **FLOAT32).startswith(nothing)
    dead = {"net/kernel": gradient(-6), "net/bias": ALL_ZERO}
    beside_a_note = text_of(*three(variables=dead), **FLOAT32)
    assert beside_a_note.startswith("Nothing else is wrong")
    uncertain = text_of(Record(step=100, overflow_count=0), **FLOAT32)
    assert uncertain.startswith("It is not known whether anything is wrong")


def test_bfloat16_is_judged_by_rounding_and_not_by_its_range():
    # Zeros and gradients of 2^-100 are no underflow, because bfloat16 has float32's range.
    small = {"net/kernel": gradient(-100, zero=900)}
    errors = [wrong("net", 0.06, 1.0, 0.5)]
    replays = compared(0.01), None, compared(0.005, gradient_errors=errors)
    sound = text_of(*three(*replays, variables=small), **BFLOAT16)
    assert sound.startswith("bfloat16 does not hurt this run: ")
    uncertain = text_of(*three(*UNKNOWN_CALL, variables=small), **BFLOAT16)
    assert uncertain.startswith("It is not known whether bfloat16 hurts this run.")
    assert "scale" not in sound + uncertain


def test_verdict_does_not_reassure_where_rounded_outputs_differ_by_more_than_those_of_float16():
    rounded = compared(0.1, gradient_errors=[wrong("net/a", 0.15, 1.0, 0.5)])
    for replay, is_good in ((rounded, False), (compared(0.05), True)):
        found = text_of(*three(replay, None, replay), **BFLOAT16)
        assert found.startswith("bfloat16 does not hurt this run: ") == is_good


INF = sampled(50, {"net/kernel": {"inf": 4, "norm": 1.0}})
REFERENCE = Record(step=50, reference=sample_from(50, 1.0, {"net/kernel": gradient(-6)}))


@pytest.mark.parametrize(
    ("records", "part"),
    [
        ([INF], "no sampled step was finite"),
        ([INF, REFERENCE], "no sampled step was finite"),
        ([Record(step=50)], "none were sampled"),
    ],
)
def test_run_without_finite_samples_is_not_judged(records, part):
    found = text_of(*records)
    assert found.startswith(UNKNOWN)
    assert part in found
