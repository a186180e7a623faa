"""Causes in the forward pass and the loss: what is NaN or Inf in 16 bits, and in float32 too."""

from dataclasses import replace

import pytest
from built_runs import (
    BFLOAT16,
    FLOAT32,
    backward,
    edits_of,
    failed,
    failed_backward,
    failed_in_float32,
    make_replay,
    names,
    operation,
    problem,
    skipped,
    stuck,
    training,
)

from kmp.diagnosis import ERROR, WARNING, thresholds
from kmp.diagnosis.causes.growing_activations import GrowingActivations
from kmp.diagnosis.causes.loss_in_float16 import LossInFloat16
from kmp.diagnosis.causes.nonfinite_forward import NonfiniteForward
from kmp.diagnosis.causes.nonfinite_gradients import NonfiniteGradients
from kmp.diagnosis.causes.nonfinite_in_float32 import NonfiniteInFloat32
from kmp.diagnosis.causes.rounded_before import RoundedBefore
from kmp.diagnosis.causes.unexplained_loss import UnexplainedLoss
from kmp.records.replay import (
    LOSS_FUNCTION,
    LayerSearch,
    NonfinitePart,
    RoundedConstant,
    RoundedConstants,
)
from kmp.records.step_facts import CodeLine, StepFacts

IN_LAYER_A = ["kmp.layers.Float32(Dense(..., name='a'))"]
ROOT = operation("Sqrt", has_negative_input=True)


def with_failed(replay, **settings):
    """Returns a run in which half of the losses were not finite."""
    return training(skipped(50, nonfinite=50, replay=replay), **settings)


# Operations that 16 bits make NaN or Inf.


@pytest.mark.parametrize(
    ("found", "lost", "name", "constant"),
    [
        (ROOT, [], "rounding", None),
        (operation("Log", has_negative_input=True), [], "rounding", None),
        (operation("Log", "inf"), [], "forward_underflow", None),
        (operation("Pow", "inf"), [], "forward_overflow", None),
        (operation("Pow", "inf", "twins/b"), [], "loss_overflow", None),
        (operation("Pow", "inf", LOSS_FUNCTION), [], "loss_overflow", None),
        (operation("Mul", "inf", "net"), [], "forward_overflow", None),
        (operation("Cast", "inf", constant=-1e9), [], "constant", -1e9),
        (operation("Cast", "inf", constant=-6e4), [], "forward_overflow", None),
        (operation("Add", has_infinite_constant=True), [1e9], "constant", 1e9),
        (operation("Mul"), [1e9], "constant", 1e9),
        (operation("Mul", "inf"), [1e9], "forward_overflow", None),
        (operation("Mul"), [1e4], "forward_overflow", None),
    ],
)
def test_operation_tells_the_cause(found, lost, name, constant):
    constants = {found.layer: lost} if lost else {}
    replay = failed(found, outputs=["net/a", "net"], lost_constants=constants)
    layers = {"net/a": "Dense", "net/b": "Dense", "twins/b": "Dense"}
    cause = problem(with_failed(replay, model="net", layers=layers))
    assert isinstance(cause, NonfiniteForward)
    assert (cause.name, cause.severity, cause.location) == (name, ERROR, found.layer)
    assert (cause.operation, cause.constant, cause.is_division) == (found, constant, False)
    assert cause.is_cured_by_float32
    assert edits_of(cause) == IN_LAYER_A


@pytest.mark.parametrize(
    ("settings", "lost", "constant"),
    [
        ({}, [1e-12], 1e-12),
        ({}, [1e-4], None),
        ({}, [], None),
        (BFLOAT16, [1e-12], None),
        (BFLOAT16, [1e-45], 1e-45),
    ],
)
def test_constant_of_a_divisor_is_lost_in_the_format_of_the_run(settings, lost, constant):
    found = operation("RealDiv", "inf", smallest_input=0.0)
    replay = failed(found, lost_constants={"net/a": lost})
    cause = problem(with_failed(replay, **settings))
    assert (cause.name, cause.is_division, cause.constant) == ("constant", True, constant)


def test_step_that_only_xla_makes_infinite_overflows_in_a_layer_of_the_cure():
    cause = problem(with_failed(failed(outputs=["net/a"])))
    assert isinstance(cause, NonfiniteForward)
    assert (cause.name, cause.location) == ("forward_overflow", "net/a")
    assert (cause.operation, edits_of(cause)) == (None, IN_LAYER_A)


def test_operation_of_a_layer_of_the_cure_comes_before_masks():
    mask, found = operation("Mul", "inf", "net/mask"), operation("Exp", "inf")
    assert problem(with_failed(failed(mask, found))).operation == found
    assert problem(with_failed(failed(mask, found, float32_layers=None))).operation == mask


@pytest.mark.parametrize(
    ("is_sound", "policy"), [(True, "mixed_bfloat16"), (False, "float32"), (None, "float32")]
)
def test_batch_that_only_bfloat16_bears_is_advised_in_bfloat16(is_sound, policy):
    search = LayerSearch(is_found=False, is_sound_in_bfloat16=is_sound)
    cause = problem(with_failed(failed(ROOT, search=search)))
    assert edits_of(cause) == [f"kmp.enable(policy='{policy}')"]
    assert cause.change.tried.startswith("not in a replay") == (not is_sound)


def hidden(*found):
    """Returns a replay with a finite loss: only the gradients show an operation's Inf."""
    return failed_backward(*found, backward("Mul", "nan"), of_activations={"net/a": 1.0})


NAN_IN_LOSS = failed(ROOT)
NAN_IN_BATCH = failed_in_float32(ROOT, nonfinite=NonfinitePart("the batch's x"))


@pytest.mark.parametrize(
    ("replay", "name", "location"),
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
    replay, name, location
):
    cause = problem(training(stuck(replay=replay)))
    assert (cause.name, cause.location) == (name, location)


def test_nan_of_a_replay_is_no_cause_if_a_scale_that_falls_at_the_start_explains_skipped_steps():
    start = skipped(1, 1, in_a_row=1, scale=2.0**14, replay=NAN_IN_LOSS)
    settled, last = skipped(2, 3, scale=2.0**13), skipped(2, 400, scale=2.0**13)
    assert names(training(start, settled, last)) == []


# Constants that were rounded before the step.

USE = CodeLine("GatherV2", "float16", "train.py", 7)
ZERO = RoundedConstant("float16", [], 0.0, 0.0, USE)
DIVISION = operation(
    "RealDiv", smallest_input=0.0, code=CodeLine("RealDiv", "float16", "train.py", 9)
)


@pytest.mark.parametrize("found", [DIVISION, None])
@pytest.mark.parametrize("is_of_gradients", [False, True])
def test_constant_that_was_rounded_before_the_step_has_no_cure_in_it(is_of_gradients, found):
    rounded = RoundedConstants([ZERO], found)
    replay = failed_in_float32(operation("Exp", "inf"), rounded=rounded)
    run = with_failed(replay)
    if is_of_gradients:
        run = training(stuck(replay=replace(replay, loss=1.0, float32_loss=1.0)))
    cause = problem(run)
    assert isinstance(cause, RoundedBefore)
    assert (cause.name, cause.severity, edits_of(cause)) == ("constant", ERROR, [])
    assert (cause.rounded, cause.location) == (rounded, "net/a" if found else "")
    assert cause.code == (found.code if found else None)
    assert not cause.is_cured_by_float32


@pytest.mark.parametrize(("count", "severity"), [(90, WARNING), (91, ERROR)])
def test_rare_gradients_of_a_rounded_constant_are_a_warning(count, severity):
    replay = failed_in_float32(loss=1.0, float32_loss=1.0, rounded=RoundedConstants([ZERO]))
    assert problem(training(skipped(count, 9000, replay=replay))).severity == severity


# What float32 does not cure.


@pytest.mark.parametrize("settings", [{}, FLOAT32])
def test_operation_that_is_not_finite_in_float32_is_named_with_its_layer(settings):
    found = operation("Log", "inf", dtype="float32", code=USE)
    cause = problem(with_failed(failed_in_float32(found), **settings))
    assert isinstance(cause, NonfiniteInFloat32)
    assert (cause.name, cause.severity, cause.location) == ("loss", ERROR, "net/a")
    assert (cause.operation, cause.code, edits_of(cause)) == (found, USE, [])
    assert not cause.is_cured_by_float32
    cause = problem(with_failed(failed_in_float32(), **settings))
    assert (cause.operation, cause.location) == (None, "")


@pytest.mark.parametrize("is_backward", [True, False])
def test_numbers_that_the_program_itself_casts_to_float16_are_not_cured_by_layers(is_backward):
    found = operation("Reciprocal", "inf", is_backward=is_backward)
    loss = 1.0 if is_backward else None
    replay = failed_in_float32(found, loss=loss, float32_loss=loss)
    cause = problem(training(stuck(replay=replay, nonfinite=0 if is_backward else 40)))
    assert isinstance(cause, NonfiniteGradients if is_backward else NonfiniteInFloat32)
    assert cause.operation.dtype == "float16"
    assert not cause.is_cured_by_float32


GROWN = [3.0**power for power in range(1, 25)]


@pytest.mark.parametrize(
    ("magnitudes", "values", "is_cause"),
    [
        (GROWN, {}, True),
        (GROWN, {"float32_loss": None, "is_finite_in_float32": False}, True),
        (GROWN, {"float32_layers": ["net/a"]}, False),
        ([*GROWN, 4.0], {}, False),  # a normalization follows
        ([1.0, 1e12, 2e12], {}, False),  # one layer makes it
        ([1e3, thresholds.GROWN_OUTPUTS], {}, False),
        ([1e3, 0.9e5, 1.1e6], {}, True),
        (GROWN, {"largest_input": 1e6}, False),
    ],
)
def test_activations_that_grow_from_layer_to_layer_are_no_matter_of_a_format(
    magnitudes, values, is_cause
):
    by_path = {f"net/{index}": each for index, each in enumerate(magnitudes)}
    values = {"largest_input": 0.5, "float32_layers": None, "float32_loss": 1e9} | values
    found = operation("MatMul", "inf", "net/conv")
    replay = failed(found, outputs=["net/conv"], magnitudes=by_path, **values)
    cause = problem(with_failed(replay))
    assert isinstance(cause, GrowingActivations) == is_cause
    if not is_cause:
        assert cause.name == "forward_overflow"
        return
    assert (cause.name, cause.severity, edits_of(cause)) == ("exploding", ERROR, [])
    assert (cause.largest, cause.largest_input) == (magnitudes[-1], 1.0)
    assert cause.layers == len(magnitudes)
    assert cause.factor == pytest.approx(magnitudes[-1] ** (1 / cause.layers))
    assert (cause.is_from_start, cause.is_cured_by_float32) == (False, False)


# A loss that no replay shows.

IN_FLOAT16 = [CodeLine("Sub", "float16", "train.py", 7), CodeLine("Exp", "float16", "train.py", 8)]


@pytest.mark.parametrize(
    ("facts", "dtype", "operations"),
    [
        (StepFacts("right", operations_in_16_bits=IN_FLOAT16), "float32", ["Exp", "Sub"]),
        (None, "float16", []),
    ],
)
def test_the_steepest_operation_of_a_loss_in_float16_is_named_first(facts, dtype, operations):
    settings = {"layers": {"net/out": "Dense"}, "output_layers": ["net/out"]}
    record = skipped(3, 4, nonfinite=3, loss_dtype=dtype)
    cause = problem(training(record, step_facts=facts, **settings))
    assert isinstance(cause, LossInFloat16)
    assert (cause.name, cause.severity) == ("loss_overflow", ERROR)
    assert cause.location == LOSS_FUNCTION
    assert [each.operation for each in cause.operations] == operations
    assert cause.code == (IN_FLOAT16[1] if operations else None)
    assert cause.is_cured_by_float32
    assert edits_of(cause) == ["kmp.layers.Float32(Dense(..., name='out'))"]


@pytest.mark.parametrize("is_forward_only", [False, True])
@pytest.mark.parametrize("settings", [{}, BFLOAT16, FLOAT32])
def test_loss_that_no_replay_explains_is_that_of_the_loss_function_if_outputs_are_finite(
    settings, is_forward_only
):
    values = {}
    if is_forward_only:
        values["replay"] = make_replay(loss=None, float32_loss=None, is_forward_only=True)
    cause = problem(training(skipped(40, nonfinite=40, **values), **settings))
    assert isinstance(cause, UnexplainedLoss)
    assert (cause.name, cause.severity, edits_of(cause)) == ("loss", ERROR, [])
    assert cause.has_finite_outputs == is_forward_only
    assert cause.location == (LOSS_FUNCTION if is_forward_only else "")
    assert not cause.is_cured_by_float32


@pytest.mark.parametrize("loss", [None, 1.0])  # of the forward pass, and of the backward pass
def test_overflow_that_no_few_layers_cure_is_cured_by_float32_for_all(loss):
    found = operation("Mul", "inf", is_backward=loss is not None)
    replay = failed(found, loss=loss, float32_layers=None, usable_scale=8.0)
    origin = "net/a/kernel"
    run = with_failed(replay)
    if loss is not None:
        run = training(stuck(2.0**-14, replay=replay, origin=origin))
    cause = problem(run)
    assert edits_of(cause) == ["kmp.enable(policy='float32')"]
    assert cause.change.tried.startswith("not in a replay; ")
    assert cause.is_cured_by_float32
