"""Diagnoses hand-written records. The programs in `faults` are diagnosed after their trainings."""

import copy
import math
import pickle
from dataclasses import replace

import keras
import msgspec
import numpy as np
import pytest
from conftest import make_replay, run_of, sample_from, without_replays

import kmp
from kmp.diagnosis import ERROR, INFO, WARNING, SetArguments, cure_of
from kmp.records import Header, Run
from kmp.records.replay import (
    BatchCheck,
    InvalidTargets,
    LayerSearch,
    NonfiniteOperation,
    Overflow,
    RoundedConstant,
    RoundedConstants,
)
from kmp.records.step_facts import CodeLine

DYNAMIC = {
    "rule": "DynamicScale",
    "initial_scale": 2.0**15,
    "growth_interval": 2000,
    "compute_dtypes": ["float16"],
}
LAYERS = {"net/conv": "Conv2D", "net/a": "Dense"}


def advice_of(*rows, **settings):
    """Returns the advice for these records and a first one.

    The scale is dynamic unless `settings` say otherwise.
    """
    first = {"step": 1, "overflow_count": 0, "last_loss": 1.0, "highest_loss": 1.0}
    return kmp.advise(run_of(first, *rows, **DYNAMIC | settings))


def causes(*rows, **settings):
    return [finding.cause for finding in advice_of(*rows, **settings)]


def gradient(exponent, **values):
    return {"first": exponent, "counts": [100], "amax": 2.0**exponent, "norm": 1.0} | values


ALL_ZERO = {"zero": 100, "amax": 0.0, "norm": 0.0}


def row_of(step, scale, exponent=-6, zeros=0, **others):
    variables = {"net/kernel": gradient(exponent, zero=zeros)} | others
    return {"step": step, "loss_scale": scale, "sample": sample_from(step, scale, variables)}


def sample_with_update(update_norm, step=50, **values):
    entry = {"first": -3, "counts": [4], "amax": 0.2, "norm": 0.4, "weight_norm": 1.0, "updates": 4}
    variables = {"net/kernel": entry | {"update_norm": update_norm} | values}
    return {"step": step, "sample": sample_from(step, 1.0, variables)}


def replay_of(**values):
    return make_replay(
        **{"examples": 8, "loss_scale": 1.0, "loss": None, "float32_loss": None, "is_finite": False}
        | values
    )


def overflow_of_gradients(**values):
    """Returns a replay with a finite loss, and gradients that are finite in float32 only."""
    return replay_of(loss=1.0, float32_loss=1.0, is_finite_in_float32=True, **values)


def clean_replay(scale, **values):
    return make_replay(8, scale, 1.0, 1.0, True, True, **values)


def overflow_row(replay, **values):
    counts = {"step": 100, "overflow_count": 50, "nonfinite_loss_count": 50, "loss_scale": 1.0}
    return counts | {"replay": replay} | values


def operation(name, value="nan", layer="net/a", **values):
    return replace(
        NonfiniteOperation(layer, name, "float16", value, 1.0, 0.5, None, False), **values
    )


STUCK = {
    **{
        "step": 40,
        "overflow_count": 40,
        "overflows_in_a_row": 40,
        "nonfinite_loss_count": 0,
        "loss_scale": 2.0**3,
    },
    "overflow_origins_by_variable": {"net/conv/kernel": 40},
}


def test_advice_is_printed_with_evidence_and_the_line_to_change_and_can_be_copied():
    advice = advice_of({"step": 50, "last_loss": 7e4, "highest_loss": 7e4})
    assert str(advice).splitlines() == [
        "Training diverges: the updates are too large in any number format.",
        "1. Training diverges: the updates are too large in any number format.",
        "  Evidence: the loss rose from 1 to 7e+04",
        "  Change: keras.optimizers.Adam(learning_rate=0.1 * learning_rate)",
    ]
    for copied in (copy.copy(advice), copy.deepcopy(advice), pickle.loads(pickle.dumps(advice))):
        assert copied == advice
        assert str(copied) == str(advice)


def test_printed_findings_are_printable():
    edit = SetArguments("e\x1b", {"f": "1"})
    finding = kmp.advice.Finding("loss", ERROR, "a\x1bb", "c\u202ed", [edit], "h\u2028i")
    lines = [
        "g\\u200bh",
        "1. a\\x1bb",
        "  Evidence: c\\u202ed",
        "  Change: e\\x1b(f=1)",
        "  Note: h\\u2028i",
    ]
    assert str(kmp.advice.Advice([finding], "g\u200bh")).splitlines() == lines


def test_path_of_a_run_is_an_error_and_an_empty_run_has_a_verdict_and_no_finding():
    for function in (kmp.advise, kmp.what_if):
        with pytest.raises(
            TypeError, match=r"`run` must be a kmp.records.Run, such as kmp.load_run.*'runs/first'"
        ):
            function("runs/first")
    assert list(kmp.advise(Run())) == []
    assert kmp.advise(Run()).verdict == "The run is empty: nothing was recorded."


def test_underflow_at_a_lower_scale_is_not_attributed_to_the_scale_in_use():
    rows = [row_of(step, 2.0**-2, -20, zeros=300) for step in (2, 3)]
    advice = advice_of(*rows, row_of(50, 2.0**12), {"step": 60, "loss_scale": None})
    assert list(advice) == []
    assert "at the loss scale in use, 2^12, 0.0% of the nonzero gradient elements" in advice.verdict
    finding = advice_of(*rows)[0]
    assert finding.cause == "scale_too_small"
    assert finding.evidence.startswith("100.0% of the nonzero sampled gradient elements")


def test_nonfinite_samples_and_references_are_not_used():
    nonfinite = {"net/kernel": ALL_ZERO | {"zero": 0, "nan": 100}}
    reference = {"step": 50, "reference": sample_from(50, 1.0, nonfinite)}
    assert causes(row_of(50, 2.0**12, zeros=150), reference) == []
    overflowed = row_of(50, 2.0**12, **{"net/kernel": ALL_ZERO | {"inf": 100}})
    finite = {"step": 50, "reference": sample_from(50, 1.0, {"net/kernel": gradient(-6)})}
    counts = {"step": 60, "overflow_count": 1}
    for rows in ([overflowed], [overflowed, finite], [sample_with_update(0.0, nan=1), counts]):
        assert "no sampled step was finite" in advice_of(*rows).verdict
    unknown = (
        "gradients, because none were sampled; to find out: a run with kmp.callbacks.defaults()"
    )
    assert unknown in advice_of(counts).verdict


def test_gradient_without_elements_is_unused_and_one_always_zero_in_float32_too_is_dead():
    others = {"unused/kernel": {"amax": 0.0, "norm": 0.0}, "dead/kernel": ALL_ZERO}
    rows = [row_of(step, 2.0**12, zeros=3, **others) for step in (1, 50)]
    rows.append(row_of(100, 2.0**12, zeros=3, **others | {"dead/bias": ALL_ZERO}))
    rows[0]["replay"] = clean_replay(2.0**12, zero=["net/kernel", *others, "dead/bias"])
    dead, unused = advice_of(*rows)
    assert (dead.cause, dead.severity, unused.cause, unused.severity) == (
        "dead",
        INFO,
        "unused",
        INFO,
    )
    assert dead.title == "The gradient of dead/kernel is zero, in float32 too."
    assert (
        "1 variable has a gradient that is all zero in 3 samples, and for 8 examples in float32"
        in dead.evidence
    )
    assert unused.title == "The loss does not depend on unused/kernel."
    unused = advice_of(*rows, train_step="custom")[1]
    assert unused.title == "The optimizer gets no gradient of unused/kernel."


def test_tiny_gradients_of_a_float32_layer_are_not_reported():
    dense = keras.layers.Dense
    with kmp.enable(loss_scale=1.0):
        inputs = keras.Input((4,))
        tiny = kmp.layers.Float32(dense(8))(inputs)
        model = keras.Model(inputs, [dense(1, dtype="float32")(dense(4)(inputs)), tiny])
        model.compile(
            keras.optimizers.SGD(0.0), ["mse", "mse"], loss_weights=[1.0, 1e-5], run_eagerly=True
        )
        callbacks = without_replays(every_n_steps=1)
        model.fit(
            np.ones((64, 4)), [np.ones((64, 1)), np.ones((64, 8))], callbacks=callbacks, verbose=0
        )
    run = callbacks[0].run
    assert len(run.settings.float32_variables) == 4
    assert list(kmp.advise(run)) == []
    without_float32 = Run(
        run.rows, Header(settings=msgspec.structs.replace(run.settings, float32_variables=[]))
    )
    finding = kmp.advise(without_float32)[0]
    assert finding.cause == "scale_too_small"
    assert finding.title.startswith("The loss scale of 1 is")


def test_backward_pass_that_divides_by_0_is_named_by_its_operation_and_the_lost_constant():
    slope = operation("SqrtGrad", "inf", is_backward=True)
    replay = overflow_of_gradients(float32_layers=["net/a"], activation_gradients={"net/a": 0.02})
    found = Overflow([slope], lost_constants={"net/a": [1e-12]})
    finding = advice_of(STUCK | {"replay": replace(replay, overflow=found)}, layers=LAYERS)[0]
    assert finding.title == (
        "The backward pass of layer 'a' divides by 0: float16 rounds the constant 1e-12 to 0."
    )
    assert "SqrtGrad in the backward pass of layer 'a' is the first to return inf" in (
        finding.evidence
    )
    assert finding.change == "kmp.layers.Float32(Dense(..., name='a'))"
    # A large gradient of a root is no division by 0.
    kept = replace(replay, overflow=Overflow([slope]))
    title = advice_of(STUCK | {"replay": kept}, layers=LAYERS)[0].title
    assert title == "The backward pass of layer 'a' overflows float16 at loss scales down to 2^4."


def sgd_run(largest_input=1.0, **settings):
    """Returns records of skipped steps; SGD's first update would be 1000 times the weights."""
    sample = sample_from(2, 2.0**3, {"net/a/kernel": gradient(15, norm=1e6, weight_norm=10.0)})
    reference = sample_from(2, 1.0, {"net/a/kernel": gradient(15, norm=1e6)})
    replay = overflow_of_gradients(float32_layers=["net/a"], activation_gradients={"net/a": 2.0})
    replay = replace(replay, batch=BatchCheck(largest_input=largest_input))
    row = STUCK | {"sample": sample, "replay": replay, "reference": reference}
    known = {"optimizer": "SGD", "learning_rate": 0.01, "layers": LAYERS}
    return run_of(row, **DYNAMIC | known | settings)


def test_update_that_sgd_would_make_is_a_divergence_and_no_reason_for_a_repair():
    finding = kmp.advise(sgd_run())[0]
    assert (finding.cause, finding.change) == (
        "exploding",
        "keras.optimizers.SGD(learning_rate=1e-07)",
    )
    assert "the next update would be 1e+03 times as large as the weights" in finding.evidence
    assert cure_of(sgd_run()) is None
    for other in ({"optimizer": "Adam"}, {"clips": True}, {"learning_rate": 1e-5}):
        assert kmp.advise(sgd_run(**other))[0].cause == "backward_overflow"
        assert cure_of(sgd_run(**other)).layers == ("net/a",)


def test_inputs_far_from_unit_scale_are_normalized_in_a_training_that_diverges():
    finding = kmp.advise(sgd_run(largest_input=2960.0))[0]
    assert finding.title.startswith("Training diverges: the inputs are far from unit scale")
    assert "x has values up to 2960" in finding.evidence
    assert finding.change == "x = (x - x.mean(axis=0)) / (x.std(axis=0) + 1e-6)"
    assert "or keras.optimizers.SGD(learning_rate=1e-07); not tried" in finding.note


def test_batch_that_only_bfloat16_bears_is_advised_in_bfloat16():
    replay = replay_of(is_finite_in_float32=True, **IN_LOSS)
    for is_sound, policy in ((True, "mixed_bfloat16"), (False, "float32"), (None, "float32")):
        search = LayerSearch(is_found=False, is_sound_in_bfloat16=is_sound)
        finding = advice_of(overflow_row(replace(replay, search=search)))[0]
        assert finding.change == f"kmp.enable(policy='{policy}')"


def test_overflows_at_every_loss_scale_are_reported_with_their_origin():
    origins = {"net/a/kernel": 38, "net/b/kernel": 1}
    finding = advice_of(STUCK | {"loss_scale": 2.0**-14, "overflow_origins_by_variable": origins})[
        0
    ]
    assert finding.cause == "backward_overflow"
    assert finding.title == "Gradients near net/a/kernel overflow at loss scales down to 2^-14."
    assert "net/a/kernel was the overflow origin in 97%" in finding.evidence
    assert "down to a loss scale of 2^-14" in finding.evidence
    assert (finding.edits, finding.note.partition(":")[0]) == ((), "no batch was replayed")
    unknown = {"step": 50, "overflow_count": 40, "overflows_in_a_row": 20}
    assert causes(unknown | {"overflow_origins_by_variable": {"a/kernel": 0}}) == []


def test_overflows_of_a_loss_that_no_replay_has_are_not_laid_to_a_layer():
    row = STUCK | {"loss_scale": 2.0**-14, "overflow_origins_by_variable": {"net/a/kernel": 38}}
    forward = replay_of(is_finite_in_float32=True, is_finite=True, is_forward_only=True)
    advice = advice_of(row | {"replay": forward}, train_step="custom", layers=LAYERS)
    finding = advice[0]
    assert (finding.cause, finding.location, finding.edits) == ("backward_overflow", "", ())
    assert advice.verdict == (
        "Gradients overflow at loss scales down to 2^-14; those of the loss of the training loop"
        " were not compared with float32."
    )
    assert "no replay has this loss" in finding.note


def test_initial_scale_that_skipped_many_steps_is_reported():
    record = {
        "overflow_count": 12,
        "overflows_in_a_row": 0,
        "loss_scale": 8.0,
        "nonfinite_loss_count": 0,
    }
    advice = advice_of({"step": 100} | record, {"step": 1000} | record)
    assert [finding.cause for finding in advice] == ["initial_scale"]
    assert advice[0].change == "kmp.enable(initial_scale=2.0**3)"
    assert advice[0].evidence.startswith("12 of the first 100 steps were skipped")
    # A record without a count of the overflows is not the first after an applied step.
    rows = [{"step": 1, "overflows_in_a_row": 0, "loss_scale": 8.0}, {"step": 30} | record]
    assert kmp.advise(run_of(*rows, **DYNAMIC))[0].evidence.startswith("12 of the first 30 steps")


def test_initial_scale_at_which_all_steps_were_skipped_has_not_dropped_to_the_one_of_the_replay():
    replay = overflow_of_gradients(float32_layers=[], usable_scale=2.0**4)
    record = {"overflow_count": 8, "overflows_in_a_row": 8, "loss_scale": 2.0**7}
    (finding,) = advice_of({"step": 8, "replay": replay} | record, initial_scale=2.0**15)
    assert finding.cause == "initial_scale"
    assert finding.evidence == (
        "8 of the first 8 steps were skipped with a finite loss, and none trained; replayed, the"
        " gradients are finite at a loss scale of 2^4"
    )


SHORT = {"step": 20, "overflows_in_a_row": 0, "loss_scale": 2.0**15}
BAD_BATCH = replay_of(is_finite_in_float32=False, nonfinite_part="the batch's x")


@pytest.mark.parametrize("overflows", [1, 2])
@pytest.mark.parametrize(
    ("records", "settings", "cause"),
    [
        ({}, {"rule": "FixedScale"}, "scale_too_large"),
        ({}, {"growth_interval": 10}, "growth_interval_too_small"),
        ({}, {"growth_interval": 20}, None),  # it has not grown
        ({}, {"compute_dtypes": ["bfloat16"]}, "scale_too_large"),
        ({"nonfinite_loss_count": True, "replay": BAD_BATCH}, {}, "data"),
    ],
)
def test_one_skipped_step_of_a_short_run_is_no_pattern(overflows, records, settings, cause):
    start = {"step": 1, "overflow_count": 0, "overflows_in_a_row": 0, "loss_scale": 2.0**15}
    counts = {"overflow_count": overflows}
    if "nonfinite_loss_count" in records:
        counts["nonfinite_loss_count"] = overflows
    advice = advice_of(start, SHORT | records | counts, **settings)
    found = [(finding.cause, finding.severity) for finding in advice]
    severity = WARNING if cause == "growth_interval_too_small" else ERROR
    if overflows == 2 and cause:
        assert found[0] == (cause, severity)
    else:
        assert (cause, severity) not in found


def stuck_at(scale, step=40, usable=None):
    """Returns the record of a scale that overflows, and of a replay.

    A replay only if a smaller scale is usable without a change.
    """
    replay = (
        {"replay": overflow_of_gradients(float32_layers=[], usable_scale=usable)} if usable else {}
    )
    return [STUCK | {"step": step, "loss_scale": scale} | replay]


def flushed_at(scale, usable=None, **values):
    """Returns records whose samples are all zero, because float16 flushed them."""
    rows = [row_of(step, scale, **{"net/kernel": ALL_ZERO}) for step in (1, 50, 100)]
    rows[0] |= {
        "replay": clean_replay(scale, flushed={"net/kernel": 1.0}, usable_scale=usable)
    } | values
    return rows


AT_LIMITS = {"initial_scale": 2.0**-14, "max_scale": 2.0**-14}
REFERENCE = row_of(1, 1.0, -12)["sample"]


@pytest.mark.parametrize(
    ("rows", "settings", "cause", "change"),
    [
        (stuck_at(2.0**15, step=100), {"hysteresis": 1000}, "hysteresis_too_large", "hysteresis=1"),
        (
            stuck_at(2.0**60, usable=2.0**10),
            {"initial_scale": 2.0**90},
            "initial_scale",
            "initial_scale=2.0**10",
        ),
        (flushed_at(2.0**15, usable=2.0**45), {}, "scale_too_small", "initial_scale=2.0**45"),
        (flushed_at(2.0**15), {}, "scale_too_small", None),  # the scale in use is not advised
        (
            *(flushed_at(2.0**-14, reference=REFERENCE), AT_LIMITS),
            *("scale_too_small", "initial_scale=2.0**26, max_scale=2.0**127"),
        ),
        (
            *(stuck_at(2.0**10, usable=2.0**3), {"min_scale": 2.0**10}),  # no step was applied
            *("scale_too_large", "min_scale=2.0**-14, initial_scale=2.0**3"),
        ),
        (
            stuck_at(2.0**10, 60, 2.0**3),
            {"min_scale": 2.0**10},
            "scale_too_large",
            "min_scale=2.0**-14",
        ),
    ],
)
def test_setting_that_keeps_an_unsuitable_scale_is_changed(rows, settings, cause, change):
    finding = advice_of(*rows, **settings)[0]
    assert (finding.cause, finding.severity) == (cause, ERROR)
    assert finding.change == (f"kmp.enable({change})" if change else "")


def test_hysteresis_is_not_the_cause_if_a_layer_overflows_and_few_skipped_steps_are_not_reported():
    replay = {"replay": overflow_of_gradients(float32_layers=["net/conv"])}
    assert (
        advice_of(stuck_at(2.0**15, step=100)[0] | replay, hysteresis=1000)[0].cause
        == "backward_overflow"
    )
    assert (
        causes(
            {"step": 20_000, "overflow_count": 9, "overflows_in_a_row": 0, "loss_scale": 2.0**18}
        )
        == []
    )


def test_skipped_steps_after_a_fallback_are_a_share_of_the_steps_after_it():
    before = {
        "step": 1000,
        "overflow_count": 4,
        "fallback": ["net"],
        "fallback_reason": "The layer overflows.",
    }
    after = {"step": 1050, "loss_scale": 2.0**15, "overflow_count": 14, "nonfinite_loss_count": 0}
    (finding,) = advice_of(before, after, rule="FixedScale").problems
    assert finding.cause == "scale_too_large"
    assert finding.evidence.startswith("10 of 50 steps (20.0%) overflowed")


def test_variable_that_keeps_the_scale_too_low_for_the_others_is_reported():
    small = {"net/small/kernel": gradient(-18, counts=[300])}
    finding = advice_of(*(row_of(step, 16.0, 14, **small) for step in (1, 50, 100)))[0]
    assert (finding.cause, finding.location, finding.edits) == ("range", "net/kernel", ())
    assert (
        "net/kernel has the largest gradients, and net/small/kernel underflows most"
        in finding.evidence
    )
    assert (
        "no change was replayed: try a smaller loss weight for that part, or float32 for net"
        in finding.note
    )


def test_head_that_is_flushed_beside_one_that_keeps_the_scale_low_has_no_change_that_was_replayed():
    # The layer nearest the input is alive too, so that this is no underflow on the way there.
    variables = {"first/kernel": gradient(15), "a/kernel": ALL_ZERO, "b/kernel": gradient(15)}
    rows = [
        {"step": n, "loss_scale": 2.0**12, "sample": sample_from(n, 2.0**12, variables)}
        for n in (1, 50, 100)
    ]
    rows[0]["replay"] = clean_replay(2.0**12, flushed={"a/kernel": 1.0})
    finding = advice_of(*rows, layers={"a": "Dense", "b": "Dense"})[0]
    assert (finding.cause, finding.location) == ("branch_underflow", "a")
    assert finding.edits == ()
    assert finding.note.startswith(
        "a larger loss scale would overflow, and no change was replayed:"
    )


BRANCHES = {"a": ["b"], "b": ["head_b"], "c": ["head_c"], "head_b": [], "head_c": []}
CHAIN = {"a": ["b"], "b": ["c"], "c": ["head"], "head": []}


@pytest.mark.parametrize(
    ("next_layers", "expected"), [(BRANCHES, ["branch_underflow"]), (CHAIN, []), ({}, [])]
)
def test_flushed_layers_are_a_branch_if_no_layer_that_follows_them_keeps_its_gradients(
    next_layers, expected
):
    variables = {"a/kernel": ALL_ZERO, "b/kernel": ALL_ZERO, "c/kernel": gradient(15)}
    rows = [
        {"step": n, "loss_scale": 2.0**12, "sample": sample_from(n, 2.0**12, variables)}
        for n in (1, 50, 100)
    ]
    rows[0]["replay"] = clean_replay(2.0**12, flushed={"a/kernel": 1.0, "b/kernel": 1.0})
    small = gradient(-40)
    rows[0]["reference"] = sample_from(1, 1.0, variables | {"a/kernel": small, "b/kernel": small})
    advice = advice_of(*rows, next_layers=next_layers)
    assert [finding.cause for finding in advice] == expected, str(advice)
    if expected:
        assert advice[0].title.startswith("The gradients of 'a', 'b' are mostly zero in float16")
        assert advice[0].evidence.endswith(
            "in float32 half of their gradients are below 2^-39, and that of c/kernel reaches 2^15:"
            " no loss scale serves both"
        )
        assert "bring the terms of the loss closer together, with `loss_weights`" in advice[0].note


def test_branch_that_has_learned_is_not_reported():
    variables = {"c/kernel": gradient(-6), "b/kernel": ALL_ZERO}
    rows = [
        {"step": n, "loss_scale": 1.0, "sample": sample_from(n, 1.0, variables)}
        for n in (1, 50, 100)
    ]
    references = [variables | {"b/kernel": gradient(-9, norm=norm)} for norm in (1.0, 1e-5)]
    for row, reference in zip(rows[::2], references, strict=True):
        row["replay"] = clean_replay(1.0, flushed={"b/kernel": 1.0})
        row["reference"] = sample_from(row["step"], 1.0, reference)
    assert [each.cause for each in advice_of(*rows, next_layers=BRANCHES).problems] != [
        "branch_underflow"
    ]
    rows[2]["reference"] = rows[0]["reference"]
    assert advice_of(*rows, next_layers=BRANCHES)[0].cause == "branch_underflow"


@pytest.mark.parametrize(
    ("layers", "found"), [(["c"], "with these layers in float32"), (None, "no few layers")]
)
def test_overflow_that_would_cost_a_branch_names_the_terms_of_the_loss(layers, found):
    search = LayerSearch(layers is not None, layers or [], loss_scale=2.0**9, branch=["b"])
    row = STUCK | {"replay": replace(overflow_of_gradients(), search=search), "loss_scale": 0.5}
    row["reference"] = sample_from(40, 1.0, {"b/kernel": gradient(-30), "c/kernel": gradient(9)})
    finding = advice_of(row | {"overflows_in_a_row": 0}, next_layers=BRANCHES)[0]
    assert finding.cause == "backward_overflow"
    assert finding.note.startswith(found)
    assert "finite at 2^9, which those of 'b' need" in finding.note
    assert "half of their gradients are below 2^-29, and that of c/kernel reaches 2^9" in str(
        finding
    )
    assert finding.note.endswith("or the factors in the loss")


def test_variables_that_no_optimizer_gets_are_named():
    (finding,) = advice_of({"step": 50}, untrained_variables=["net/a/kernel", "net/a/bias"])
    assert (finding.cause, finding.severity) == ("untrained", INFO)
    assert finding.title == (
        "The training does not pass net/a/kernel, net/a/bias to the optimizer."
    )


ALL_LOSSES_NONFINITE = {
    **{"step": 60, "overflow_count": 59, "overflows_in_a_row": 59},
    **{"nonfinite_loss_count": 59, "nonfinite_losses_in_a_row": 59},
}
MIXED_OVERFLOWS = {"overflow_count": 30, "overflows_in_a_row": 15, "nonfinite_loss_count": 15}
ROSE = {"step": 60, "last_loss": 3e4, "highest_loss": 7e4}
NOISY = [{"step": 60, "last_loss": 0.9, "highest_loss": 3.2}, sample_with_update(0.41)]


def epochs(*losses):
    return [
        {"step": 15 * number, "metrics": {"loss": loss}}
        for number, loss in enumerate(losses, 5 - len(losses))
    ]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([ROSE], ["exploding"]),
        ([ROSE, sample_with_update(1e-5)], []),  # a high loss with small updates
        ([ROSE, sample_with_update(0.2)], ["exploding"]),
        ([ALL_LOSSES_NONFINITE], ["loss"]),
        ([ALL_LOSSES_NONFINITE | {"highest_loss": 9e4}], ["exploding"]),
        # Scattered non-finite losses, and a streak of overflows of gradients.
        (
            [{"step": 60, "highest_loss": 9e4, "nonfinite_losses_in_a_row": 0} | MIXED_OVERFLOWS],
            ["loss"],
        ),
        (NOISY, ["exploding"]),
        ([*NOISY, *epochs(1.3, 1.1)], []),  # noisy batches, while the loss of the epochs falls
        ([*NOISY, *epochs(1.3, 1.1, 1.1, 1.1)], ["exploding"]),
    ],
)
def test_explosion_is_a_loss_that_rose_with_large_updates(rows, expected):
    advice = advice_of(*rows)
    assert [finding.cause for finding in advice] == expected, str(advice)
    assert "the last 15" not in str(advice)


def test_growth_of_weights_between_samples_is_an_update():
    rows = [sample_with_update(1e-3, step=1), sample_with_update(1e-3, step=21, weight_norm=41.0)]
    finding = advice_of(
        *rows, {"step": 60, "last_loss": 0.9, "highest_loss": 7e4}, learning_rate=3.0
    )[0]
    assert finding.cause == "exploding"
    assert "in step 21 the update was 2 times as large as the weights" in finding.evidence
    assert "the loss rose from 1 to 7e+04" in finding.evidence
    assert finding.change == "keras.optimizers.Adam(learning_rate=0.01)"


@pytest.mark.parametrize(
    ("samples", "rates", "change"),
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
    samples, rates, change
):
    early = [sample_with_update(step=step, **each) for step, each in enumerate(samples, 1)]
    loss = {"step": 60, "last_loss": 0.9, "highest_loss": 7e4}
    epochs = [
        {"step": 60 + number, "metrics": {"learning_rate": rate}}
        for number, rate in enumerate(rates)
    ]
    later = sample_with_update(40.0, weight_norm=1.0)
    finding = advice_of(*early, later, loss, *epochs, learning_rate=0.4)[0]
    assert "in step 50 the update was 40 times as large as the weights" in finding.evidence
    assert finding.change == f"keras.optimizers.Adam(learning_rate={change})"


@pytest.mark.parametrize(("optimizer", "name"), [("Lion", "Lion"), ("exec('x') or Adam", "Adam")])
def test_optimizer_that_is_no_name_is_not_part_of_the_change(optimizer, name):
    (finding,) = advice_of({"step": 50, "highest_loss": 1e9, "last_loss": 1e9}, optimizer=optimizer)
    assert finding.change.partition("(")[0] == f"keras.optimizers.{name}"


ADAM = {"epsilon": 1e-7, "optimizer": "Adam", "learning_rate": 1e-3, "variable_dtypes": ["float16"]}
# Gradients whose squares are 0 in float16.
SMALL = {"first": -11, "amax": 2.0**-11, "norm": 2.0**-10}


@pytest.mark.parametrize(
    ("norm", "gradients", "settings"),
    [
        # The root mean square of four weights is 0.005: five times the learning rate.
        (0.01, SMALL, {}),
        (1.0, {}, {}),  # a constraint changes weights by more
        # The epsilon is larger than these anyway.
        (1.0, {"first": -30, "amax": 2.0**-30, "norm": 2.0**-29}, {}),
        (0.5, SMALL, {"steps_per_execution": 32}),
        (1.0, SMALL, {"optimizer": "RMSprop"}),  # its epsilon is inside the root
        (1.0, SMALL, {"variable_dtypes": ["float32"]}),
        (
            1.0,
            SMALL,
            {"variable_dtypes": ["float16", "float32"], "float32_variables": ["net/kernel"]},
        ),
    ],
)
def test_steps_of_adam_that_are_not_too_large_because_of_float16_are_not_reported(
    norm, gradients, settings
):
    assert "optimizer_state" not in causes(sample_with_update(norm, **gradients), **ADAM | settings)


def test_squares_that_adam_loses_in_float16_are_reported_by_the_steps_that_it_takes():
    row = sample_with_update(1.0, **SMALL)
    finding = advice_of(row, policy="float16", **ADAM)[0]
    assert finding.cause == "optimizer_state"
    assert "it divides by its epsilon of 1e-07 alone" in finding.title
    assert "in step 50, net/kernel changed by 500 times the learning rate" in finding.evidence
    assert "a gradient below 2^-8 adds" in finding.evidence
    assert finding.change == "kmp.enable(policy='mixed_float16')"
    own = {"policy": "mixed_float16", "own_dtype_variables": ["net/kernel"]}
    finding = advice_of(row, **ADAM | own)[0]
    assert (finding.cause, finding.change) == (
        "optimizer_state",
        "self.add_weight(dtype='float32', name='kernel')",
    )


def test_float16_weights_that_enable_does_not_change_are_converted():
    """As those of a model that was saved with them."""
    row = sample_with_update(1.0, **SMALL)
    in_force = {"policy": "float16", "policy_in_force": "mixed_float16"}
    finding = advice_of(row, **ADAM | in_force)[0]
    assert finding.change == "model = kmp.convert(kmp.to_float32(model), 'mixed_float16')"


@pytest.mark.parametrize("is_first", [True, False])
def test_weights_that_are_not_finite_before_the_first_update_are_not_a_matter_of_the_rate(is_first):
    replay = replay_of(is_finite_in_float32=False, nonfinite_variables=["net/a/kernel"])
    row = overflow_row(replay)
    start = row | {"step": 1, "overflows_in_a_row": int(is_first)}
    streak = row["step"] if is_first else row["step"] - 1
    rows = start, row | {"overflows_in_a_row": streak, "nonfinite_losses_in_a_row": streak}
    (finding,) = advice_of(*rows, optimizer="Adam")
    assert (finding.cause, finding.location) == ("loss", "net/a/kernel")
    assert ("before training begins" in finding.title) == is_first
    assert ("np.isfinite" in finding.note) == is_first
    assert bool(finding.change) != is_first


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_epsilon_of_zero_is_reported_for_weights_of_any_dtype(dtype):
    row = overflow_row(replay_of(is_finite_in_float32=False, nonfinite_variables=["net/a/kernel"]))
    settings = {"epsilon": 0.0, "optimizer": "Adam", "variable_dtypes": [dtype]}
    (finding,) = advice_of(row, **settings)
    assert (finding.cause, finding.location) == ("optimizer_state", "net/a/kernel")
    assert finding.change.splitlines()[-1] == "keras.optimizers.Adam(epsilon=1e-7)"
    assert ("kmp.enable(policy='mixed_float16')" in finding.change) == (dtype == "float16")
    assert causes(row, **settings | {"epsilon": 1e-7, "variable_dtypes": ["float32"]}) == ["loss"]


@pytest.mark.parametrize(
    ("settings", "weights", "limit", "change"),
    [
        (
            {"variable_dtypes": ["bfloat16"]},
            "weights are in bfloat16",
            "2^-9",
            "keras.config.set_dtype_policy(policy='mixed_bfloat16')",
        ),
        (
            {
                "variable_dtypes": ["bfloat16", "float32"],
                "policy": "mixed_bfloat16",
                "layers": {"net": "Embedding"},
            },
            "weights of 'net' are in bfloat16",
            "2^-9",
            # Its outputs are its weights, so that "mixed_bfloat16" would round these.
            "keras.layers.Embedding(dtype='float32', name='net')",
        ),
        (
            {
                "variable_dtypes": ["float16", "float32"],
                "policy": "mixed_float16",
                "layers": {"net": "Embedding"},
            },
            *(
                "weights of 'net' are in float16",
                "2^-12",
                "keras.layers.Embedding(dtype='mixed_float16', name='net')",
            ),
        ),
    ],
)
def test_updates_that_weights_in_16_bits_lose_are_reported(settings, weights, limit, change):
    finding = advice_of(sample_with_update(1e-5, updates=0), **settings)[0]
    assert (
        finding.title
        == f"Updates are lost: the {weights}, and many steps are too small to change them."
    )
    assert f"by less than {limit} of its magnitude" in finding.evidence
    assert finding.change == change


@pytest.mark.parametrize(
    ("part", "cause"), [("x", "data"), ("y", "targets"), ("sample_weight", "data")]
)
def test_nonfinite_data_are_reported_with_the_part_to_correct(part, cause):
    replay = replay_of(
        is_finite_in_float32=False,
        nonfinite_part=f"the batch's {part}",
        has_sample_weight=part == "y",
    )
    (finding,) = advice_of(
        {"step": 1000, "overflow_count": 2, "nonfinite_loss_count": 2, "replay": replay}
    )
    assert (finding.cause, finding.severity, finding.location) == (
        cause,
        WARNING,
        f"the batch's {part}",
    )
    assert ("np.abs(x) <= 65504" if part == "x" else f"np.isfinite({part})") in finding.change
    arrays = "x, y" if part == "x" else "x, y, sample_weight"
    assert finding.change.endswith(
        f"{arrays} = keras.tree.map_structure(lambda a: a[keep], ({arrays}))"
    )


HUGE = NonfiniteOperation("net/a", "Square", "float32", "inf", 9.97e36, 1.0, None, False)


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ({"nonfinite": [HUGE]}, "data"),
        ({"nonfinite": [operation("Sqrt", has_negative_input=True)]}, "loss"),
        ({"nonfinite": [HUGE], "nonfinite_variables": ["net/kernel"]}, "loss"),
    ],
)
def test_large_inputs_are_the_cause_only_if_float32_overflows_with_them(values, cause):
    replay = replay_of(
        is_finite_in_float32=False, nonfinite_part="the batch's x", is_part_finite=True, **values
    )
    assert causes(overflow_row(replay)) == [cause]


@pytest.mark.parametrize(
    ("targets", "change", "note"),
    [
        (InvalidTargets(-1, 2, 3, only_invalid=-1), "keep = (y >= 0).reshape", "ignore_class=-1"),
        (
            InvalidTargets(0, 255, 3, only_invalid=255, per_example=64, from_logits=True),
            (
                "model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True,"
                " ignore_class=255))"
            ),
            "if 255 means that a target is missing",
        ),
        (
            InvalidTargets(1, 3, 3, only_invalid=3),
            "keras.layers.Conv2D(filters=4, name='head')",
            "y = y - 1",
        ),
        (InvalidTargets(0, 255, 2, is_binary=True), "y = (y - 0) / (255 - 0)", "in training"),
    ],
)
def test_change_of_targets_depends_on_what_is_invalid(targets, change, note):
    row = overflow_row(replay_of(is_finite_in_float32=False, invalid_targets=targets))
    finding = advice_of(row, output_layers=["net/head"], layers={"net/head": "Conv2D"})[0]
    assert finding.cause == "targets"
    assert change in finding.change
    assert note in finding.note


def test_targets_of_a_binary_cross_entropy_are_a_problem_of_finite_losses_too():
    replay = replay_of(
        loss=1.0,
        is_finite_in_float32=True,
        invalid_targets=InvalidTargets(0, 255, 2, is_binary=True),
    )
    finding, *_ = advice_of({"step": 9, "replay": replay})
    assert (
        finding.title
        == "The targets y are from 0 to 255, but binary cross-entropy takes numbers from 0 to 1."
    )


@pytest.mark.parametrize(
    ("found", "cause", "title"),
    [
        (
            operation("Sqrt", has_negative_input=True),
            "rounding",
            "Layer 'a' takes the root of a number",
        ),
        (
            operation("Log", has_negative_input=True),
            "rounding",
            "Layer 'a' takes the logarithm of a number",
        ),
        (
            operation("Log", "inf"),
            "forward_underflow",
            "Layer 'a' takes the logarithm of a number that is 0",
        ),
        (operation("Pow", "inf"), "forward_overflow", "The output of layer 'a' overflows"),
        (
            operation("Pow", "inf", "twins/b"),
            "loss_overflow",
            "The loss that layer 'twins/b' adds overflows",
        ),
        (
            operation("Mul", "inf", "net"),
            "forward_overflow",
            "The output of model 'net' outside its layers overflows",
        ),
    ],
)
def test_operation_tells_the_cause(found, cause, title):
    values = {
        "nonfinite": [found],
        "nonfinite_outputs": ["net/a", "net"],
        "float32_layers": ["net/a"],
    }
    replay = replay_of(float32_loss=1.0, is_finite_in_float32=True, **values)
    layers = {"net/a": "Dense", "net/b": "Dense", "twins/b": "Dense"}
    finding = advice_of(overflow_row(replay), model="net", layers=layers)[0]
    assert (finding.cause, finding.location) == (cause, found.layer)
    assert finding.title.startswith(title)


USE = CodeLine("GatherV2", "float16", "train.py", 7)
DIVIDED_AT = CodeLine("RealDiv", "float16", "train.py", 9)
SCHEDULE = RoundedConstant("float16", [1000], 0.001, 1.0, USE, name="net.kept")
ZERO = RoundedConstant("float16", [], 0.0, 0.0, USE)
INFINITE = RoundedConstant("float16", [4], 2.0, 2.0, USE, nonfinite="Inf")
MADE = "in float16, before the training step gets"


@pytest.mark.parametrize(
    ("constants", "found", "title", "shown"),
    [
        (
            [SCHEDULE],
            operation("RealDiv", smallest_input=0.0, code=DIVIDED_AT),
            "RealDiv in train.py, line 9, divides by 0: the program makes the constant 'net.kept'"
            f" {MADE} it.",
            "GatherV2 in train.py, line 7, gets the constant 'net.kept' (shape (1000,), 0.001 to 1)"
            ", and with other numbers that float16 rounds to the same ones in its place",
        ),
        (
            [ZERO, SCHEDULE],
            operation("Log", "inf", smallest_input=0.0),
            "Log in layer 'a' takes the logarithm of 0: the program makes a constant and 1 other"
            f" {MADE} them.",
            "gets a constant and 1 other (a scalar, 0), and with other numbers that float16 rounds"
            " to the same ones in their place",
        ),
        (
            [SCHEDULE],
            operation("Sqrt", has_negative_input=True),
            "Sqrt in layer 'a' takes the root of a negative number: ",
            "Sqrt in layer 'a' is the first to return nan",
        ),
        (
            [ZERO],
            operation("SqrtGrad", "inf", is_backward=True),
            "SqrtGrad in layer 'a' returns Inf: ",
            "SqrtGrad in layer 'a' is the first to return inf",
        ),
        (
            [INFINITE],
            None,
            f"GatherV2 in train.py, line 7, gets Inf: the program makes a constant {MADE} it.",
            "gets a constant (shape (4,), 2, Inf), and with finite numbers in its place",
        ),
        (
            [ZERO],
            None,
            f"The training step returns NaN or Inf: the program makes a constant {MADE} it.",
            "it is not finite either; GatherV2 in train.py, line 7, gets a constant",
        ),
    ],
)
def test_constant_that_was_rounded_before_the_step_is_named_with_its_use(
    constants, found, title, shown
):
    overflow = Overflow([operation("Exp", "inf")], rounded=RoundedConstants(constants, found))
    failed = replace(replay_of(is_finite_in_float32=False), overflow=overflow)
    of_gradients = replace(failed, loss=1.0, float32_loss=1.0)
    for row in (overflow_row(failed), STUCK | {"replay": of_gradients}):
        finding = advice_of(row, layers=LAYERS)[0]
        assert (finding.cause, finding.severity, finding.edits) == ("constant", ERROR, ())
        assert finding.location == ("net/a" if found else "")
        assert finding.title.startswith(title)
        assert shown in finding.evidence
        assert "dtype='float32' from the beginning" in finding.note
    rare = overflow_row(of_gradients, step=9000, overflow_count=3, nonfinite_loss_count=0)
    assert advice_of(rare, layers=LAYERS)[0].severity == WARNING


@pytest.mark.parametrize("settings", [{}, {"rule": "FixedScale"}, {"growth_interval": 20}])
def test_root_of_zero_that_float32_does_not_survive_either_is_no_matter_of_the_scale(settings):
    found = [operation("SqrtGrad", "inf", is_backward=True, dtype="float32")]
    replay = replay_of(
        loss=1.0, float32_loss=1.0, is_finite_in_float32=False, nonfinite=found, float32_layers=[]
    )
    start = {"step": 1, "overflow_count": 1, "overflows_in_a_row": 1, "loss_scale": 2.0**14}
    clean = STUCK | {"overflow_count": 12, "overflows_in_a_row": 0, "replay": replay}
    for rows in (
        [STUCK | {"replay": replay}],
        [start, clean, clean | {"step": 80, "overflow_count": 20}],
    ):
        (finding,) = advice_of(*rows, layers=LAYERS, **settings)
        assert (finding.cause, finding.location) == ("backward_overflow", "net/a")
        assert (finding.severity, finding.edits) == (ERROR, ())
        title = "The backward pass of layer 'a' divides by 0, in float32 too: the slope of a root"
        assert finding.title.startswith(title)
        assert "ops.sqrt(ops.maximum(x, 1e-4))" in finding.note
        assert finding.note.endswith("not tried")
    rare = clean | {"step": 2000, "overflow_count": 13}
    assert advice_of(start, clean, rare, **settings).problems[0].severity == WARNING


def test_numbers_that_the_program_itself_casts_to_float16_are_a_matter_of_precision():
    for is_backward in (True, False):
        found = [operation("Reciprocal", "inf", is_backward=is_backward)]
        loss = 1.0 if is_backward else None
        replay = replay_of(
            loss=loss, float32_loss=loss, is_finite_in_float32=False, nonfinite=found
        )
        row = STUCK | {"replay": replay, "nonfinite_loss_count": 0 if is_backward else 40}
        finding = advice_of(row, layers=LAYERS)[0]
        assert "in float16 whatever the dtypes of the layers are" in finding.title
        assert "the program computes in float16 there, as after a cast" in finding.note
        finding = advice_of(row, layers=LAYERS, floatx="float16")[0]
        assert "keras.config.set_floatx('float16')" in finding.note


def test_gradients_that_float32_makes_nan_without_a_root_are_named_without_a_cure():
    found = [operation("Mul", "nan", is_backward=True, dtype="float32")]
    replay = replay_of(
        loss=1.0, float32_loss=1.0, is_finite_in_float32=False, nonfinite=found, float32_layers=[]
    )
    (finding,) = advice_of(STUCK | {"replay": replay}, layers=LAYERS)
    assert finding.title == "NaN or Inf in the backward pass of layer 'a', in float32 too."
    assert "sqrt" not in finding.note


@pytest.mark.parametrize(
    ("settings", "edits"),
    [
        ({"growth_interval": 20}, {"growth_interval": "2000"}),
        ({"backoff_factor": 0.999}, {"backoff_factor": "0.5"}),
        (
            {"growth_interval": 4, "growth_factor": 8.0, "backoff_factor": 0.97},
            {"growth_interval": "2000", "growth_factor": "2.0", "backoff_factor": "0.5"},
        ),
        ({"growth_interval": 1000}, None),
        ({"hysteresis": 2}, None),
    ],
)
def test_scale_that_grows_more_than_it_backs_off_is_reported_with_what_is_not_the_default(
    settings, edits
):
    rows = [{"step": 1, "overflow_count": 0, "overflows_in_a_row": 0, "loss_scale": 2.0**15}]
    rows.append(
        {
            "step": 200,
            "overflow_count": 100,
            "overflows_in_a_row": 20 if edits and len(edits) > 1 else 1,
        }
    )
    never = [{"step": 200, "overflow_count": 200, "overflows_in_a_row": 200}]
    rare = [rows[0], rows[1] | {"overflow_count": 2, "overflows_in_a_row": 0}]
    for others in (never, rare):
        assert "growth_interval_too_small" not in causes(*others, **settings)
    findings = {finding.cause: finding for finding in advice_of(*rows, **settings)}
    assert ("growth_interval_too_small" in findings) == (edits is not None)
    if edits:
        finding = findings["growth_interval_too_small"]
        assert (finding.edits[0].arguments, finding.location) == (edits, next(iter(edits)))


@pytest.mark.parametrize("loss", [None, 1.0])  # of the forward pass, and of the backward pass
def test_overflow_that_no_few_layers_cure_is_cured_by_float32_which_was_replayed(loss):
    found = operation("Mul", "inf", is_backward=loss is not None)
    values = {"nonfinite": [found], "float32_layers": None, "usable_scale": 8.0}
    replay = replay_of(loss=loss, float32_loss=1.0, is_finite_in_float32=True, **values)
    row = (
        overflow_row(replay) if loss is None else STUCK | {"replay": replay, "loss_scale": 2.0**-14}
    )
    finding = advice_of(
        row | {"overflow_origins_by_variable": {"net/a/kernel": 50}}, layers=LAYERS
    )[0]
    assert finding.change == "kmp.enable(policy='float32')"
    assert finding.note.startswith("no few layers were found with")


GROWN = [3.0**power for power in range(1, 25)]


@pytest.mark.parametrize(
    ("magnitudes", "values", "cause"),
    [
        (GROWN, {}, "exploding"),
        (GROWN, {"float32_loss": None, "is_finite_in_float32": False}, "exploding"),
        (GROWN, {"float32_layers": ["net/a"]}, "forward_overflow"),
        ([*GROWN, 4.0], {}, "forward_overflow"),  # a normalization follows
        ([1.0, 1e12, 2e12], {}, "forward_overflow"),  # one layer makes it
        ([each / 1e6 for each in GROWN], {}, "forward_overflow"),
        (GROWN, {"largest_input": 1e6}, "forward_overflow"),
    ],
)
def test_activations_that_grow_from_layer_to_layer_are_no_matter_of_a_format(
    magnitudes, values, cause
):
    found = [operation("MatMul", "inf", layer="net/conv")]
    replay = replay_of(
        **{"float32_loss": 1e9, "is_finite_in_float32": True, "float32_layers": None}
        | {"nonfinite": found, "nonfinite_outputs": ["net/conv"]}
        | {key: value for key, value in values.items() if key != "largest_input"}
    )
    by_path = {f"net/{index}": each for index, each in enumerate(magnitudes)}
    batch = BatchCheck(largest_input=values.get("largest_input", 0.5))
    overflow = replace(replay.overflow, magnitudes=by_path)
    finding = advice_of(
        overflow_row(replace(replay, overflow=overflow, batch=batch)), layers=LAYERS
    )[0]
    assert finding.cause == cause
    if cause == "exploding":
        assert finding.title.endswith("and reach 2.8e+11 in float32 too.")
        assert "24 layers enlarge inputs up to 1, by 3 times on average" in finding.evidence
        assert finding.edits == ()


def hidden(found):
    """Returns a replay with a finite loss: only the gradients show an operation's Inf."""
    values = {"nonfinite": [found, operation("Mul", is_backward=True)], "float32_layers": ["net/a"]}
    return overflow_of_gradients(activation_gradients={"net/a": 1.0}, **values)


ROOT = [operation("Sqrt", has_negative_input=True)]
IN_LOSS = {"float32_loss": 1.0, "nonfinite": ROOT, "float32_layers": ["net/a"]}
NAN_IN_LOSS = replay_of(is_finite_in_float32=True, **IN_LOSS)
NAN_IN_BATCH = replay_of(is_finite_in_float32=False, nonfinite_part="the batch's x", **IN_LOSS)


@pytest.mark.parametrize(
    ("replay", "cause", "location"),
    [
        (NAN_IN_LOSS, "rounding", "net/a"),  # a kernel of the training swallowed it
        (NAN_IN_BATCH, "data", "the batch's x"),
        (hidden(operation("Log", "inf")), "forward_underflow", "net/a"),
        (hidden(operation("RealDiv", "inf", smallest_input=0.0)), "constant", "net/a"),
        # Of a mask.
        (hidden(operation("Cast", "inf", constant=-1e9)), "backward_overflow", "net/a"),
    ],
)
def test_nan_or_inf_that_the_losses_of_the_training_do_not_show_is_the_cause(
    replay, cause, location
):
    (finding,) = advice_of(STUCK | {"replay": replay}, layers=LAYERS)
    assert (finding.cause, finding.location) == (cause, location)


def test_nan_of_a_replay_is_no_cause_if_a_scale_that_falls_at_the_start_explains_skipped_steps():
    start = {"step": 1, "overflow_count": 1, "overflows_in_a_row": 1, "loss_scale": 2.0**14}
    settled = {"step": 3, "overflow_count": 2, "overflows_in_a_row": 0, "loss_scale": 2.0**13}
    assert causes(start | {"replay": NAN_IN_LOSS}, settled, settled | {"step": 400}) == []
