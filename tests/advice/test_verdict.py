"""Verdicts of hand-written records: what they exclude, and what they leave unknown."""

import inspect
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import make_replay, run_of, sample_from

import kmp
from kmp.diagnosis import cure_of
from kmp.records.replay import (
    BatchCheck,
    GradientError,
    LayerError,
    LossyOperation,
    LostWeight,
    NonfiniteOperation,
    Overflow,
    StateError,
)

UNKNOWN = "It is not known whether float16 hurts this run."
GOOD = "float16 does not hurt this run: "
SETTINGS = {
    "rule": "DynamicScale",
    "initial_scale": 2.0**15,
    "growth_interval": 2000,
    "compute_dtypes": ["float16"],
}


def row(step, zeros=0, exponent=-6, **values):
    counts = {"zero": zeros, "first": exponent, "counts": [100], "amax": 2.0**exponent, "norm": 1.0}
    sample = sample_from(step, 2.0**15, {"net/kernel": counts})
    return {
        "step": step,
        "loss_scale": 2.0**15,
        "overflow_count": 0,
        "last_loss": 1.0,
        "sample": sample,
    } | values


def compared(record, output_error=0.001, **values):
    """Adds the comparison of a batch with float32 to a record."""
    replay = make_replay(32, 2.0**15, 1.0, 1.0, True, True, output_error=output_error, **values)
    return record | {"replay": replay}


def advice_of(*rows, **settings):
    return kmp.advise(run_of(*rows, **SETTINGS | settings))


def first_finding(*rows, **settings):
    return advice_of(*rows, **settings)[0]


def test_verdict_is_good_if_everything_is_excluded():
    errors = [GradientError("net", 0.02, 1.0, 1.0, 0.5)]
    verdict = advice_of(
        compared(row(1)), row(50), compared(row(100), 0.003, gradient_errors=errors)
    ).verdict
    assert verdict.startswith(
        f"{GOOD}in 2 batches the outputs differ from float32 by at most 0.30%, and the gradients of"
        " a layer by at most 2.0%; 0 of 100 steps were skipped"
    )
    assert verdict.endswith("in 3 samples.")


@pytest.mark.parametrize(
    ("error", "noise", "normal"),
    [
        (0.05, 1.4, "by at most 5.0%;"),
        (0.2, 1.4, "by at most 20.0% (another batch of this size changes them by 140%);"),
        (0.2, None, "by at most 20.0% (harmful above 25%);"),
        (0.5, 1.4, "by at most 50.0% (another batch of this size changes them by 140%);"),
    ],
)
def test_verdict_says_what_is_normal_beside_gradients_that_differ(error, noise, normal):
    found = [GradientError("net", error, 1.0, 1.0, noise), GradientError("a", 0.04, 1.0, 1.0, 0.1)]
    rows = compared(row(1), gradient_errors=found), row(50), compared(row(100))
    verdict = advice_of(*rows).verdict
    assert verdict.startswith(GOOD)
    assert f"and the gradients of a layer {normal}" in verdict


@pytest.mark.parametrize(
    ("last", "is_known"),
    [
        ({"overflow_count": 3}, True),
        ({"overflow_count": 7}, False),
        ({"overflow_count": 3, "overflows_in_a_row": 1}, False),
    ],
)
def test_few_steps_that_a_falling_scale_skips_need_no_other_reason(last, is_known):
    rows = compared(row(1, overflows_in_a_row=0)), row(8), compared(row(16, **last))
    verdict = advice_of(*rows).verdict
    assert verdict.startswith(GOOD) == is_known
    assert ("why steps overflow" in verdict) != is_known


COMPARED = compared(row(1)), row(50), compared(row(100))
LATER = row(50), row(100)
FLUSHED = make_replay(32, 2.0**15, 1.0, 1.0, True, True, flushed={"net/kernel": 0.6})
NOT_FINITE = make_replay(32, 2.0**15, None, 1.0, False, True)
AGREES = make_replay(32, 2.0**15, 1.0, 1.0, True, True, output_error=0.001)
SLOW = {"names_of_states": ["agent.slow", "agent.slow"]}
RANDOM = make_replay(32, 2.0**15, 1.0, 1.0, True, True)
HARMFUL_GRADIENTS = [GradientError("net/dense", 0.6, 0.5, 1.0, 0.1)]
KERNEL = {"first": -6, "counts": [100], "amax": 2.0**-6, "norm": 1.0}
HALF_ZERO = sample_from(
    100, 2.0**15, {"net/kernel": KERNEL, "net/bias": {"zero": 100, "amax": 0.0, "norm": 0.0}}
)

# What was recorded, what the verdict says was not measured, why, and what measures it, and the
# settings.
OPEN = {
    "nothing compared": (
        [row(1), *LATER],
        (
            "because no batches of the run were compared; to find out: replay=True in"
            " kmp.callbacks.defaults()"
        ),
    ),
    "skipped steps not counted": (
        [
            {key: value for key, value in record.items() if key != "overflow_count"}
            for record in COMPARED
        ],
        "how many steps were skipped; to find out: kmp.callbacks.defaults(), which counts them",
    ),
    "compared once": ([*COMPARED[:2], row(100)], "because only 1 batch of the run was compared"),
    "compared early": (
        [compared(row(1)), compared(row(30)), row(100)],
        "no batch of its second half was compared",
    ),
    "replicas": (
        [row(1), *LATER],
        "(4 replicas); to find out: a run on one replica",
        {"replicas": 4},
    ),
    "nothing captured": (
        [row(1), *LATER],
        "none was captured: kmp sees the training step of a loop only in a `tf.function`",
        {"replay": True},
    ),
    "failed replay": (
        [row(1) | {"replay_error": "ValueError: no"}, *LATER],
        "(none could be replayed: ValueError: no); to find out: a training in float32",
    ),
    "nonfinite replay": (
        [row(1) | {"replay": NOT_FINITE}, *LATER],
        "(the replayed ones were not finite)",
    ),
    "random pass": (
        [row(1) | {"replay": RANDOM}, *LATER],
        "draws random numbers that differ by pass",
    ),
    "forward only": (
        [compared(row(step), is_forward_only=True) for step in (1, 50, 100)],
        (
            "how far gradients are from those in float32, because only the forward pass could be"
            " replayed"
        ),
        {"train_step": "custom"},
    ),
    "forward pass of a loop": (
        [compared(row(step), is_forward_only=True) for step in (1, 50, 100)],
        (
            "and whether the loop scales, clips and unscales them in the right order, because only"
            " the forward pass could be replayed, without the loss; to find out: the same step as"
            " the `train_step` of a model in `fit`"
        ),
        {"train_step": "keras"},
    ),
    "outputs that differ at the start": (
        [compared(row(1), 0.08), row(50), compared(row(100), 0.02)],
        (
            "what the errors of outputs or gradients at step 1, in 1 of 2 comparisons, did to the"
            " training; to find out: a training in float32"
        ),
    ),
    "gradients that differ at the start": (
        [compared(row(1), gradient_errors=HARMFUL_GRADIENTS), row(50), compared(row(100))],
        "what the errors of outputs or gradients at step 1, in 1 of 2 comparisons, did to",
    ),
    "states not measured": (
        [compared(row(1)), compared(row(50), state_errors=None), compared(row(100))],
        (
            "what the updates of states lose that are not trainable, such as moving averages,"
            " because the replayed batch"
        ),
    ),
    "state in float16": (
        [compared(row(1), float16_states=3), row(50), compared(row(100))],
        "what 3 variables in 16 bits lose that the training step assigns beside the weights",
    ),
    "named states in float16": (
        [
            compared(row(1)),
            row(50),
            row(100) | {"replay": replace(AGREES, batch=BatchCheck(states_in_16_bits=3, **SLOW))},
        ],
        "what 3 variables in 16 bits, of agent.slow, lose that the training step assigns",
    ),
    "few steps": (
        [compared(row(1)), compared(row(3))],
        (
            "the gradients of the whole run, because there are only 2 finite samples in 3 steps; to"
            " find out: a longer run"
        ),
    ),
    "early samples": (
        [*map(row, (1, 2, 3)), {"step": 200, "overflow_count": 0, "last_loss": 1.0}],
        (
            "the gradients of the whole run, because its second half has no finite sample; to find"
            " out: a smaller"
        ),
    ),
    "zeros": (
        [row(step, zeros=100) for step in (1, 50, 100)],
        (
            "whether float16 flushed the gradient elements that are exactly zero, 50.0%; to find"
            " out: a replay"
        ),
    ),
    "zero variable": (
        [row(step, sample=HALF_ZERO) for step in (1, 50, 100)],
        "the gradient elements that are exactly zero, 50.0%, including all of net/bias",
    ),
    "flushed layer": (
        [row(1, exponent=14) | {"replay": FLUSHED}, row(50, exponent=14), row(100, exponent=14)],
        "what the layers lose whose gradients are mostly zero in float16, but not in float32",
    ),
    "weights in float16": (
        COMPARED,
        "whether updates change weights in float16",
        {"variable_dtypes": ["float16"]},
    ),
    "skipped steps": (
        [row(1, overflows_in_a_row=0), row(50), row(100, overflow_count=9)],
        "why steps overflow",
    ),
    "no losses": (
        [row(step, last_loss=None) for step in (1, 50, 100)],
        "whether training diverges",
    ),
}


@pytest.mark.parametrize("has_reference", [False, True])
def test_gradients_that_are_zero_in_float32_too_are_measured(has_reference):
    zero = {"net/bias": {"zero": 100, "amax": 0.0, "norm": 0.0}}
    rows = [row(step, sample=sample_from(step, 2.0**15, zero)) for step in (1, 50, 100)]
    for record in (rows[0], rows[2]):
        record["replay"] = make_replay(
            32, 2.0**15, 1.0, 1.0, True, True, output_error=0.001, zero=["net/bias"]
        )
        if has_reference:
            record["reference"] = sample_from(record["step"], 1.0, zero)
    advice = advice_of(*rows)
    assert [finding.cause for finding in advice] == ["dead"]
    assert advice.verdict.startswith(GOOD), advice.verdict


NORM = [LayerError("net/norm", 1.1, 1.0), LayerError("net/head", 1.1, 0.001)]
NOTICED = {
    "gradient_errors": [GradientError("net/head", 0.2, 0.9, 1.0, 0.5)],
    "float32_layers": ["net/norm"],
}
SQUARE = NonfiniteOperation("net/norm/inner", "Square", "float16", "inf", 300.0, 300.0, None, False)
LOST = LostWeight("net/norm/scale", zero=0.5, infinite=0.0)

# What a harmful comparison showed, and how the title of its finding explains it.
BITS = "float16 has too few bits for what it computes"
REASONS = {
    "bits": ({}, BITS),
    "overflow": ({"nonfinite": [SQUARE]}, "it overflows inside"),
    "overflow elsewhere": ({"nonfinite": [replace(SQUARE, layer="net/normal")]}, BITS),
    "underflow": ({"underflows": {"net/norm": 0.7}}, "it underflows"),
    "inputs": (
        {"layer_errors": [LayerError("net/norm", 1.1, 1.0, 0.9)], "underflows": {"net/norm": 0.2}},
        "float16 rounds its inputs too much",
    ),
    "weight": (
        {"lost_weights": [LOST], "nonfinite": [SQUARE]},
        "its weight 'scale' is 0 in float16",
    ),
    "few values of a weight": ({"lost_weights": [replace(LOST, zero=0.01)]}, BITS),
    "infinite weight": (
        {"lost_weights": [LostWeight("net/norm/scale", 0.0, 1.0)]},
        "its weight 'scale' is infinite in float16",
    ),
}


@pytest.mark.parametrize("case", REASONS)
def test_finding_about_outputs_says_where_they_differ_and_why_as_it_was_measured(case):
    measured, reason = REASONS[case]
    (finding,) = advice_of(compared(row(1), 1.1, **{"layer_errors": NORM} | NOTICED | measured))
    assert (finding.cause, finding.location, finding.severity) == (
        "precision_loss",
        "net/norm",
        "error",
    )
    assert finding.title == f"The outputs of layer 'norm' are not those of float32: {reason}."
    differences = "by 110 % of how they vary; in layer 'norm' alone, given float32 inputs, by 100 %"
    assert f"the outputs of the model differ from float32 {differences}" in finding.evidence
    assert finding.change == "kmp.layers.Float32(Layer(..., name='norm'))"


def test_finding_about_outputs_says_what_they_do_to_the_loss():
    """A metric of another output may be as good as in float32."""
    record = compared(row(1), 1.1, layer_errors=NORM, **NOTICED)
    assert "the loss is" not in advice_of(record)[0].evidence
    record["replay"] = replace(record["replay"], loss=0.03, float32_loss=0.002)
    assert "; the loss is 0.03, in float32 0.002" in advice_of(record)[0].evidence


LOSSY = [
    (
        LossyOperation("net/norm/inner", "Sub", "cancellation", "float16", 20480.0, 1.31, 1.0, 9.0),
        "subtracts numbers up to 20480 that differ by about 1.3, of which float16 keeps 11 bits",
    ),
    (
        LossyOperation("net/norm", "Sub", "cancellation", "float16", 1013.0, 0.0, 1.0, 1.0),
        "subtracts numbers up to 1013 that are equal in float16",
    ),
    (
        LossyOperation("net/norm", "Cos", "phase", "bfloat16", 300.0, 0.7, 1.0, 2.0),
        "takes the cosine of numbers up to 300, of which bfloat16 keeps 8 bits",
    ),
    (
        LossyOperation("net/norm", "Sigmoid", "saturation", "float16", 12.0, 1.0, 0.7, 0.7),
        "takes a sigmoid that is exactly 1 in float16, for 70% of its values",
    ),
    (
        LossyOperation("net/norm", "AddV2", "lost_terms", "float16", 512.0, 0.062, 0.9, 0.9),
        "adds terms of about 0.062 to numbers up to 512, of which float16 keeps 11 bits",
    ),
    (
        LossyOperation("net/norm", "Cast", "index", "bfloat16", 1599.0, 800.0, 0.8, 0.8),
        "casts numbers up to 1599 to integers, of which bfloat16 keeps 8 bits",
    ),
]


@pytest.mark.parametrize(("found", "reason"), LOSSY)
def test_finding_says_which_operation_has_too_few_bits(found, reason):
    smaller, elsewhere = replace(found, error=0.1), replace(found, layer="net/head", error=100.0)
    overflow = Overflow(lossy=[elsewhere, replace(smaller, typical=7.0), found])
    record = compared(row(1), 1.1, layer_errors=NORM, **NOTICED)
    record["replay"] = replace(record["replay"], overflow=overflow)
    assert first_finding(record).title == (
        f"The outputs of layer 'norm' are not those of float32: it {reason}."
    )

    record = compared(row(1), gradient_errors=HARMFUL_GRADIENTS, float32_layers=["net/norm"])
    of_loss = Overflow(lossy=[elsewhere, replace(found, layer="the loss function")])
    record["replay"] = replace(record["replay"], loss=0.1, float32_loss=0.3, overflow=of_loss)
    assert first_finding(record).title == (
        f"The loss is not that of float32, though the outputs are: it {reason}."
    )


def test_change_is_of_the_layer_that_a_program_creates_and_the_title_of_the_part_that_fails():
    parts = [LayerError("net/block/attention", 1.1, 1.0)]
    measured = NOTICED | {"float32_layers": ["net/block/attention", "net/block/dense"]}
    finding = first_finding(
        compared(row(1), 1.1, layer_errors=parts, **measured), layers={"net/block": "Decoder"}
    )
    assert finding.title.startswith(
        "The outputs of layer 'net/block/attention' are not those of float32"
    )
    assert finding.change == "kmp.layers.Float32(Decoder(..., name='block'))"


def test_layer_with_a_lost_weight_is_the_origin_of_what_the_next_layers_amplify():
    layers = [LayerError("net/norm", 0.01, 0.01), LayerError("net/head", 1.1, 0.001)]
    record = compared(row(1), 1.1, layer_errors=layers, lost_weights=[LOST], **NOTICED)
    assert first_finding(record).location == "net/norm"


def test_loss_that_differs_where_the_outputs_agree_is_the_origin():
    record = compared(row(1), gradient_errors=HARMFUL_GRADIENTS, float32_layers=["net/norm"])
    record["replay"] = replace(record["replay"], loss=0.1, float32_loss=0.3)
    finding = first_finding(record)
    assert (finding.cause, finding.location, finding.severity) == (
        "precision_loss",
        "the loss function",
        "error",
    )
    assert finding.title.startswith("The loss is not that of float32, though the outputs are")
    assert "the loss is 0.1, in float32 0.3, and the outputs differ by 0.10 %" in finding.evidence
    assert first_finding(record | {"loss_dtype": "float32"}).title == (
        "The loss is not that of float32: it magnifies the rounding of the outputs in float16."
    )


GATE = {"unscaled_by": "net/gate", "is_unscaled": True}


@pytest.mark.parametrize(
    ("train_step", "layer", "measured", "title", "note"),
    [
        (
            "custom",
            "net/aux",
            {},
            "the gradients of layer 'aux' do not grow with it.",
            "self.optimizer.scale_loss",
        ),
        (
            "custom",
            "net",
            {"is_unscaled": True},
            "clips or normalizes scaled gradients.",
            "self.optimizer.unscale(",
        ),
        (
            "keras",
            "net/first",
            {},
            "The gradients of layer 'first' do not grow with the loss scale",
            "clipnorm",
        ),
        (
            "keras",
            "net/first",
            GATE,
            "The backward pass of layer 'gate' does not grow with the loss scale",
            "clipnorm",
        ),
    ],
)
def test_gradients_that_do_not_grow_with_the_loss_scale_are_a_finding(
    train_step, layer, measured, title, note
):
    finding = first_finding(
        compared(row(1), unscaled_layers=[layer], **measured), train_step=train_step
    )
    assert (finding.cause, finding.severity) == ("unscaled_loss", "error")
    assert finding.location == measured.get("unscaled_by", layer)
    assert title in finding.title
    assert note in finding.note


OUTPUTS_DIFFER = {"output_error": 0.6, "layer_errors": [LayerError("net/dense", 0.6, 0.6)]}
GRADIENTS_DIFFER = {"gradient_errors": HARMFUL_GRADIENTS}


@pytest.mark.parametrize(
    ("errors", "other", "layers"),
    [
        (OUTPUTS_DIFFER, {}, ("net/dense",)),
        (OUTPUTS_DIFFER, {"unscaled_layers": ["net/dense"]}, None),
        (GRADIENTS_DIFFER, {}, ("net/dense",)),
        (GRADIENTS_DIFFER, {"unscaled_layers": ["net/dense"]}, None),
    ],
)
def test_no_cure_is_for_errors_that_another_cause_explains(errors, other, layers):
    rows = [
        compared(row(step), float32_layers=["net/dense"], **errors, **other)
        for step in (1, 50, 100)
    ]
    cure = cure_of(run_of(*rows, **SETTINGS))
    assert (cure and cure.layers) == layers


# Of comparisons in the order of their steps, which have harmful errors.
ONE_OF_SIX, LATE_HARM = [0, 0, 0, 0, 0, 1], [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("harmful", "errors", "cause", "layers"),
    [
        (ONE_OF_SIX, GRADIENTS_DIFFER, None, None),
        ([0, 0, 0, 0, 1, 1], GRADIENTS_DIFFER, None, None),
        (LATE_HARM, GRADIENTS_DIFFER, "precision_loss", ("net/dense",)),
        ([1, 1, 0, 1, 0, 1], GRADIENTS_DIFFER, "precision_loss", None),  # a repair needs a row
        ([0, 1], GRADIENTS_DIFFER, "precision_loss", None),
        ([1, 1, 1, 1, 1, 0], GRADIENTS_DIFFER, None, None),  # harm that has passed
        (ONE_OF_SIX, OUTPUTS_DIFFER, "precision_loss", ("net/dense",)),
    ],
)
def test_comparisons_since_the_last_repair_agree_on_harm_before_it_is_a_problem(
    harmful, errors, cause, layers
):
    found = {"float32_layers": ["net/dense"], **errors}
    before = [compared(row(step), **found) for step in (1, 2, 3)]
    repair = row(4, fallback=["net/other"])
    rows = [
        compared(row(step), **(found if is_harmful else {}))
        for step, is_harmful in zip(range(10, 100, 10), harmful, strict=False)
    ]
    run = run_of(*before, repair, *rows, row(rows[-1]["step"] + 1), **SETTINGS)
    advice, cure = kmp.advise(run), cure_of(run)
    assert [finding.cause for finding in advice.problems] == ([cause] if cause else [])
    assert (cure and cure.layers) == layers
    if not cause:
        count = f"in {sum(harmful)} of {len(harmful)} comparisons, did to the training"
        assert advice.verdict.startswith(UNKNOWN)
        assert count in advice.verdict


def test_loss_that_overflows_inside_and_stays_finite_is_found_where_it_overflows():
    errors = [GradientError("net/down", 1.0, 0.0, 1.0, 0.02)]
    found = NonfiniteOperation(
        "net/dice", "Sum", "float16", "inf", 1.0, 0.0, None, is_backward=False
    )
    replay = make_replay(
        *(32, 2.0**15, 1.0, 0.6, True, True),
        **{
            "output_error": 0.01,
            "gradient_errors": errors,
            "nonfinite": [found],
            "float32_layers": ["net/dice"],
        },
        flushed={"net/kernel": 1.0},  # not for want of a loss scale
    )
    finding = first_finding(row(1), row(50), row(100) | {"replay": replay})
    assert (
        finding.title
        == "The loss that layer 'dice' adds is not that of float32: Sum in it returns inf in"
        " float16."
    )
    assert (finding.cause, finding.location) == ("precision_loss", "net/dice")


def test_outputs_that_an_operation_outside_of_the_layers_changes_are_a_finding():
    errors = [GradientError("net", 1.0, 0.0, 1.0, 0.1)]
    layers = [LayerError("net", 0.01, 0.01), LayerError("model", 4.0)]
    values = {"gradient_errors": errors, "layer_errors": layers, "float32_layers": ["net"]}
    finding = first_finding(compared(row(1), 4.0, **values))
    assert (finding.cause, finding.location) == ("precision_loss", "net")
    assert finding.title.endswith("an operation outside of its layers, after layer 'net'.")


def test_state_whose_updates_float16_loses_is_a_finding():
    lost, noisy = StateError("net/mean", 1.0, 0.1, 0.99), StateError("net/other", 1.0, 0.5, 0.99)
    own = StateError("net/last", 1.0, 0.0, 0.0)  # that of the batch itself

    def advice_with(*errors):
        last = compared(row(100), state_errors=list(errors), float32_layers=["net"])
        return advice_of(compared(row(1)), row(50), last, layers={"net": "Running"})

    (finding,) = advice_with(lost, noisy, own)
    assert finding.title.startswith("The state 'mean' of layer 'net' stays behind")
    assert finding.change == "kmp.layers.Float32(Running(..., name='net'))"
    assert advice_with(noisy, own).verdict.startswith(GOOD)


def test_state_in_float16_needs_another_dtype_of_its_variable():
    lost = [
        StateError(f"net/{name}", 1.0, 0.0, next_update, "float16")
        for name, next_update in (("slow/kernel", 0.99), ("slow/bias", 0.99), ("vector", 0.8))
    ]
    last = compared(row(100), state_errors=lost, float32_layers=["net/slow"])
    rows = [compared(row(1)), row(50), last]
    layers = {"net/slow": "Dense", "net": "Sequential"}

    finding = advice_of(*rows, layers=layers)[0]
    assert finding.title.startswith(
        "The state 'kernel' of layer 'slow' stays behind: it is a float16 variable"
    )
    assert "the next step adds 99 % of it again" in finding.evidence
    assert finding.change == "Dense(dtype='float32', name='slow')"

    finding = advice_of(*rows, layers=layers, policy="float16")[0]
    assert finding.change == "kmp.enable(policy='mixed_float16')"
    # A repair of the training does not change the dtype of variables.
    assert cure_of(run_of(*rows, **SETTINGS | {"layers": layers})) is None


@pytest.mark.parametrize("case", OPEN)
def test_verdict_reassures_of_nothing_that_was_not_measured(case):
    rows, unknown, *settings = OPEN[case]
    measured, _, rest = advice_of(*rows, **dict(*settings)).verdict.partition(" Not measured: ")
    assert measured.startswith(f"{UNKNOWN} Measured: ")
    assert unknown in rest
    assert "to find out: " in rest


WITHOUT_SCALE = {"rule": "FixedScale", "initial_scale": 1.0}


def test_verdict_of_float32_says_what_was_seen_and_compares_nothing():
    settings = WITHOUT_SCALE | {"compute_dtypes": ["float32"]}
    rows = compared(row(1), 0.0), row(50, zeros=900), compared(row(100), 0.0)
    assert advice_of(*rows, **settings).verdict == (
        "Nothing is wrong with this float32 run that kmp can see: 0 of 100 steps were skipped, the"
        " norm of the gradients was 1 in 3 samples."
    )
    with_updates = with_update_norms(row(1), 0.5), with_update_norms(row(100), 0.02)
    assert advice_of(*with_updates, **settings).verdict.endswith(
        "in 2 samples, and no update seen was larger than 0.5 times the weights."
    )
    assert advice_of({"step": 100, "overflow_count": 0}, **settings).verdict == (
        "It is not known whether anything is wrong with this float32 run. Measured: 0 of 100 steps"
        " were skipped. Not measured: gradients, because none were sampled; to find out: a run with"
        " kmp.callbacks.defaults() whose steps are finite."
    )


def with_update_norms(record, norm):
    """Adds the norms of the weights, 1, and of their update to the sample of a record."""
    sample = replace(record["sample"], weight_norm=np.array([1.0]), update_norm=np.array([norm]))
    return record | {"sample": sample}


def test_verdict_of_bfloat16_is_about_rounding_and_not_about_its_range():
    settings = WITHOUT_SCALE | {"compute_dtypes": ["bfloat16", "float32"]}
    errors = [GradientError("net", 0.06, 1.0, 1.0, 0.5)]
    # Zeros and gradients of 2^-100 are no underflow, because bfloat16 has float32's range.
    small = [row(step, zeros=900, exponent=-100) for step in (1, 50, 100)]
    first, last = compared(small[0], 0.01), compared(small[2], 0.005, gradient_errors=errors)
    assert advice_of(first, small[1], last, **settings).verdict == (
        "bfloat16 does not hurt this run: in 2 batches the outputs differ from float32 by at most"
        " 1.00%, and the gradients of a layer by at most 6.0%; 0 of 100 steps were skipped."
    )
    verdict = advice_of(first, small[1], small[2], **settings).verdict
    assert verdict.startswith("It is not known whether bfloat16 hurts this run. Measured: in 1")
    assert "only 1 batch of the run was compared" in verdict
    assert "scale" not in verdict


@pytest.mark.parametrize("output_error", [0.001, 0.2])
def test_harmful_gradients_are_a_warning_with_the_loss_scale_that_removes_the_errors(output_error):
    values = {
        "layer_errors": [LayerError("net/head", output_error, output_error)],
        "usable_scale": 2.0**20,
    }
    record = compared(
        row(1), output_error, gradient_errors=HARMFUL_GRADIENTS, float32_layers=[], **values
    )
    (finding,) = advice_of(record, layers={"net": "Functional", "net/dense": "Dense"})
    assert (finding.cause, finding.location, finding.severity) == (
        "precision_loss",
        "net/dense",
        "warning",
    )
    assert finding.change == "kmp.enable(initial_scale=2.0**20)"
    assert (
        "differ by 60 % of their norm, and keep 50 % of it; another batch of this size changes"
        " them by 10 %" in finding.evidence
    )


def test_verdict_does_not_count_the_gradients_of_a_training_that_has_converged():
    errors = [GradientError("net", 1.9, -0.5, 1e-4, 0.2, largest_norm=1.0)]
    first = compared(row(1), gradient_errors=[GradientError("net", 0.02, 1.0, 1.0)])
    verdict = advice_of(first, row(50), compared(row(100), gradient_errors=errors)).verdict
    assert verdict.startswith(GOOD)
    assert (
        "the gradients of a layer by at most 2.0% until they nearly vanish; 0 of 100 steps"
        in verdict
    )


def test_zeros_that_are_zero_in_float32_too_are_known():
    reference = replace(row(1, zeros=100)["sample"], loss_scale=1.0)
    first, last = (compared(row(step, zeros=100), zero=["net/kernel"]) for step in (1, 100))
    advice = advice_of(first | {"reference": reference}, row(50, zeros=100), last)
    assert advice.verdict.startswith(GOOD)


def test_documented_causes_are_those_of_the_rules():
    page = Path(__file__).parents[2] / "docs" / "advice.md"
    first_cells = [
        line.split("|")[1]
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    described = [cause for cell in first_cells for cause in re.findall("`(.*?)`", cell)]
    documented = re.findall(
        '`"([a-z0-9_]+)"`', inspect.getdoc(kmp.advice.Finding).partition("severity:")[0]
    )
    assert sorted(described) == sorted(documented)
