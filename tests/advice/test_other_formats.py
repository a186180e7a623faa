"""Advice on runs in bfloat16 and float32, from hand-written records."""

from dataclasses import replace

import pytest
from conftest import make_replay, run_of, sample_from

import kmp
from kmp.diagnosis import ERROR, INFO, WARNING, cure_of
from kmp.records.replay import GradientError, LayerError, NonfiniteOperation, Overflow

WITHOUT_SCALE = {"rule": "FixedScale", "initial_scale": 1.0, "settings_call": "kmp.enable"}
BFLOAT16 = WITHOUT_SCALE | {"compute_dtypes": ["bfloat16", "float32"]}
FLOAT32 = WITHOUT_SCALE | {"compute_dtypes": ["float32"]}
LAYERS = {"net/a": "Dense"}
# Steps with a finite loss whose gradients were not.
NONFINITE_GRADIENTS = {
    "step": 100,
    "overflow_count": 20,
    "nonfinite_loss_count": 0,
    "loss_scale": 1.0,
    "overflow_origins_by_variable": {"net/a/kernel": 20},
}


def advice_of(settings, *rows):
    first = {"step": 1, "overflow_count": 0, "last_loss": 1.0, "highest_loss": 1.0}
    return kmp.advise(run_of(first, *rows, **{"layers": LAYERS} | settings))


def backward_replay(*operations, is_finite_in_float32=True, **values):
    """Returns a replay of a finite loss with gradients that are not finite."""
    replay = make_replay(8, 1.0, 1.0, 1.0, False, is_finite_in_float32, **values)
    return replace(replay, overflow=Overflow(list(operations)))


def operation(name, value="inf", **values):
    found = NonfiniteOperation("net/a", name, "bfloat16", value, 1.0, 0.5, None, True)
    return replace(found, **values)


def row(step, **variables):
    samples = {"net/a/kernel": {"first": -6, "counts": [100], "amax": 0.02, "norm": 1.0}}
    return {"step": step, "sample": sample_from(step, 1.0, samples | variables)}


@pytest.mark.parametrize("settings", [BFLOAT16, FLOAT32])
def test_gradients_that_are_not_finite_are_no_matter_of_a_scale_of_1(settings):
    (finding,) = advice_of(settings, NONFINITE_GRADIENTS)
    assert (finding.cause, finding.severity) == ("backward_overflow", ERROR)
    assert finding.location == "net/a/kernel"
    assert finding.title == (
        "Gradients near net/a/kernel are NaN or Inf, although the loss is finite."
    )
    assert finding.evidence == (
        "20 of 100 steps (20.0%) were skipped with a finite loss; net/a/kernel was the origin in"
        " 100% of them"
    )
    assert finding.note.startswith("kmp.callbacks.defaults() replays such a batch")
    assert finding.edits == ()
    (rare,) = advice_of(settings, NONFINITE_GRADIENTS | {"step": 5000})
    assert rare.severity == WARNING


def test_float32_is_checked_by_tensorflow_where_no_replay_shows_the_operation():
    record = NONFINITE_GRADIENTS | {"replay_error": "the step cannot be replayed"}
    (finding,) = advice_of(FLOAT32, record)
    assert finding.note.startswith("tf.debugging.enable_check_numerics(), called before the")
    (finding,) = advice_of(BFLOAT16, record)
    assert finding.note.endswith("train in float32, to know whether bfloat16 is the cause")


def test_backward_pass_that_only_bfloat16_makes_infinite_is_cured_by_float32():
    replay = backward_replay(
        operation("SqrtGrad"), float32_layers=["net/a"], activation_gradients={"net/a": 0.1}
    )
    record = NONFINITE_GRADIENTS | {"replay": replay}
    (finding,) = advice_of(BFLOAT16, record)
    assert finding.title == (
        "The backward pass of layer 'a' returns NaN or Inf in bfloat16, but not in float32."
    )
    assert "SqrtGrad in the backward pass of layer 'a' is the first to return inf" in (
        finding.evidence
    )
    assert finding.change == "kmp.layers.Float32(Dense(..., name='a'))"
    assert cure_of(run_of(record, layers=LAYERS, **BFLOAT16)).layers == ("net/a",)

    # 1e-12 is 0 in float16 and not in bfloat16; 1e-40 is 0 in both.
    for lost, reason in (
        (1e-12, "in bfloat16 the divisor is 0"),
        (1e-45, "bfloat16 rounds the constant 1e-45 to 0"),
    ):
        found = Overflow(
            [operation("RealDiv", smallest_input=0.0)], lost_constants={"net/a": [lost]}
        )
        divides = NONFINITE_GRADIENTS | {"replay": replace(replay, overflow=found)}
        title = advice_of(BFLOAT16, divides)[0].title
        assert title == f"The backward pass of layer 'a' divides by 0: {reason}."


def test_operation_whose_gradients_are_not_finite_in_float32_is_named():
    root = operation("SqrtGrad", dtype="float32")
    replay = backward_replay(root, is_finite_in_float32=False)
    record = NONFINITE_GRADIENTS | {"replay": replay}
    (finding,) = advice_of(FLOAT32, record)
    slope = "the slope of a root or a norm is infinite at 0."
    assert finding.title == f"The backward pass of layer 'a' divides by 0: {slope}"
    (finding,) = advice_of(BFLOAT16, record)
    assert finding.title == f"The backward pass of layer 'a' divides by 0, in float32 too: {slope}"
    exponential = operation("ExpGrad", dtype="float32")
    record["replay"] = backward_replay(exponential, is_finite_in_float32=False)
    for run_format, too in ((FLOAT32, ""), (BFLOAT16, ", in float32 too")):
        (finding,) = advice_of(run_format, record)
        assert finding.title == f"NaN or Inf in the backward pass of layer 'a'{too}."
        assert "ExpGrad is the first to return inf" in finding.evidence


def test_operation_whose_loss_is_not_finite_is_named_with_its_layer():
    replay = replace(
        make_replay(8, 1.0, None, None, False, False),
        overflow=Overflow([operation("Log", is_backward=False)]),
    )
    record = {"step": 100, "overflow_count": 20, "nonfinite_loss_count": 20, "replay": replay}
    (finding,) = advice_of(FLOAT32, record)
    assert finding.title == "The loss is NaN or Inf: Log in layer 'a' is the first to return inf."
    assert finding.evidence == (
        "in 20 of 100 steps (20.0%) the loss was NaN or Inf; replayed, it is not finite either"
    )
    del record["replay"]
    (finding,) = advice_of(FLOAT32, record)
    assert finding.title == "The loss is NaN or Inf."


@pytest.mark.parametrize(("settings", "name"), [(BFLOAT16, "bfloat16"), (FLOAT32, "float32")])
def test_loss_scale_that_someone_sets_is_named_where_it_overflows(settings, name):
    own = settings | {"initial_scale": 2.0**126, "settings_call": "kmp.wrap"}
    (finding,) = advice_of(own, NONFINITE_GRADIENTS | {"loss_scale": 2.0**126})
    assert finding.cause == "scale_too_large"
    assert finding.title == (
        f"The loss scale of 2^126 makes gradients overflow, and {name} needs none."
    )
    assert finding.change == "kmp.wrap(loss_scale=1.0)"


@pytest.mark.parametrize(
    ("settings", "is_finite_in_float32"), [(BFLOAT16, False), (BFLOAT16, True), (FLOAT32, False)]
)
def test_inputs_are_too_large_only_if_float32_overflows_with_them(settings, is_finite_in_float32):
    square = NonfiniteOperation("net/a", "Square", "float32", "inf", 9e36, 1.0, None, False)
    replay = make_replay(
        *(8, 1.0, None, 1.0 if is_finite_in_float32 else None, False, is_finite_in_float32),
        **{"nonfinite_part": "the batch's x", "is_part_finite": True, "nonfinite": [square]},
    )
    record = {"step": 100, "overflow_count": 20, "nonfinite_loss_count": 20, "replay": replay}
    finding = advice_of(settings, record)[0]
    assert (finding.cause == "data") == (not is_finite_in_float32)
    if finding.cause == "data":
        assert finding.title == (
            "The batch's x contains values beyond 1e+09, whose products overflow float32."
        )
        assert "np.abs(x) <= 1e+09" in finding.change


def test_gradients_that_are_zero_in_float32_need_no_replay():
    dead = {"net/b/kernel": {"zero": 100, "amax": 0.0, "norm": 0.0}}
    advice = advice_of(FLOAT32, *(row(step, **dead) for step in (1, 50, 100)))
    (finding,) = advice
    assert (finding.cause, finding.severity) == ("dead", INFO)
    assert finding.title == "The gradient of net/b/kernel is zero."
    assert finding.evidence == "1 variable has a gradient that is all zero in 3 samples"
    assert advice.verdict.startswith(
        "Nothing else is wrong with this float32 run that kmp can see:"
    )
    assert not advice_of(BFLOAT16, *(row(step, **dead) for step in (1, 50, 100)))
    # A training in which most gradients are zero is broken.
    most = dead | {"net/c/kernel": dead["net/b/kernel"]}
    advice = advice_of(FLOAT32, *(row(step, **most) for step in (1, 50, 100)))
    assert advice.problems[0].severity == WARNING
    assert advice.verdict == "The gradient of net/b/kernel, net/c/kernel is zero."


@pytest.mark.parametrize("settings", [BFLOAT16, FLOAT32])
def test_updates_that_are_too_large_are_reported_in_every_format(settings):
    rose = {"step": 100, "last_loss": 3e4, "highest_loss": 7e4}
    (finding,) = advice_of(settings, rose)
    assert finding.cause == "exploding"
    assert finding.title == "Training diverges: the updates are too large in any number format."


def compared(step, output_error, gradient_error, examples=32, **values):
    """Returns a record with the comparison of a batch with float32."""
    values |= {
        "output_error": output_error,
        "layer_errors": [LayerError("net/a", output_error, output_error)],
        "gradient_errors": [GradientError("net/a", gradient_error, 1.0, 1.0, 0.5)],
        "float32_layers": ["net/a"],
    }
    return row(step) | {"replay": make_replay(examples, 1.0, 1.0, 1.0, True, True, **values)}


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_outputs_that_bfloat16_rounds_are_harmful_at_a_larger_error_than_in_float16(name):
    settings = BFLOAT16 | {"compute_dtypes": [name]}
    rounded = [compared(1, 0.1, 0.15), row(50), compared(100, 0.1, 0.15)]
    advice = advice_of(settings, *rounded)
    assert [finding.cause for finding in advice if finding.severity == ERROR] == (
        ["precision_loss"] if name == "float16" else []
    )
    ruined = [compared(1, 0.5, 0.15), row(50), compared(100, 0.5, 0.15)]
    finding = advice_of(settings, *ruined)[0]
    assert finding.title == (
        f"The outputs of layer 'a' are not those of float32: {name} has too few bits for what it"
        " computes."
    )
    assert finding.change == "kmp.layers.Float32(Dense(..., name='a'))"


def test_verdict_does_not_reassure_where_rounded_outputs_differ_by_more_than_5_percent():
    verdict = advice_of(BFLOAT16, compared(1, 0.1, 0.15), row(50), compared(100, 0.1, 0.15)).verdict
    assert verdict.startswith("It is not known whether bfloat16 hurts this run. Measured: in 2")
    assert (
        "Not measured: what the errors of outputs or gradients at step 100, in 2 of 2 comparisons,"
    ) in verdict


def test_few_examples_do_not_show_that_bfloat16_is_harmful():
    for output_error, gradient_error in ((0.5, 0.3), (0.01, 2.0)):
        rows = [compared(step, output_error, gradient_error, examples=2) for step in (1, 50, 100)]
        advice = advice_of(BFLOAT16, *rows)
        assert not advice
        assert advice.verdict.startswith("It is not known whether bfloat16 hurts this run.")
        assert "Not measured: what the errors of" in advice.verdict
        many = [compared(step, output_error, gradient_error) for step in (1, 50, 100)]
        assert advice_of(BFLOAT16, *many)[0].cause == "precision_loss"
