"""Causes in the precision: outputs, gradients, states and updates that are not those of float32."""

from dataclasses import replace

import pytest
from built_runs import (
    BFLOAT16,
    FLOAT16,
    compared,
    edits_of,
    healthy,
    names,
    operation,
    problem,
    problems,
    run_of,
    training,
    updated,
    wrong,
)

from kmp.diagnosis import ERROR, WARNING, Observations, cure_of
from kmp.diagnosis.causes.lost_updates import LostUpdates
from kmp.diagnosis.causes.stale_state import StaleState
from kmp.diagnosis.causes.wrong_gradients import WrongGradients
from kmp.diagnosis.causes.wrong_outputs import WrongOutputs
from kmp.records.replay import (
    LOSS_FUNCTION,
    GradientError,
    LayerError,
    LossyOperation,
    LostWeight,
    StateError,
    UnscaledGradients,
)

NORM = [LayerError("net/norm", 1.1, 1.0), LayerError("net/head", 1.1, 0.001)]
NOTICED = wrong("net/head", 0.2, 0.9, 0.5)
IN_NORM = {"layer_errors": NORM, "gradient_errors": [NOTICED], "float32_layers": ["net/norm"]}
LAYERS = {"layers": {"net/norm": "Norm", "net/head": "Dense"}}


def comparing(*replays, **settings):
    """Returns a run with a comparison at each hundredth step."""
    records = [
        healthy(100 * number, replay=replay) if replay else healthy(100 * number)
        for number, replay in enumerate(replays, 1)
    ]
    return training(*records, **LAYERS | settings)


def cured_layers(run):
    """Returns the layers that a repair sets to float32; `None` without one."""
    cure = cure_of(Observations(run))
    return cure and cure.layers


# Outputs.


def test_outputs_that_differ_are_those_of_the_layer_that_adds_most():
    cause = problem(comparing(compared(1.1, **IN_NORM)))
    assert isinstance(cause, WrongOutputs)
    assert (cause.name, cause.severity, cause.location) == ("precision_loss", ERROR, "net/norm")
    assert cause.origin == NORM[0]
    assert cause.is_cured_by_float32
    assert edits_of(cause) == ["kmp.layers.Float32(Norm(..., name='norm'))"]


@pytest.mark.parametrize(
    ("settings", "output_error", "noticed", "is_cause"),
    [
        ({}, 0.06, 0.11, True),
        ({}, 0.05, 0.11, False),
        ({}, 0.06, 0.10, False),
        ({}, 0.26, None, True),  # without gradients
        ({}, 0.25, None, False),
        (BFLOAT16, 0.26, 0.15, True),
        (BFLOAT16, 0.25, 0.15, False),
    ],
)
def test_outputs_that_gradients_notice_are_harmful(settings, output_error, noticed, is_cause):
    values = {"gradient_errors": [] if noticed is None else [wrong("net/head", noticed, 1.0)]}
    layers = [LayerError("net/norm", output_error, output_error)]
    replay = compared(output_error, layer_errors=layers, float32_layers=["net/norm"], **values)
    run = comparing(replay, **settings)
    assert names(run) == (["precision_loss"] if is_cause else [])
    if is_cause:
        assert isinstance(problem(run), WrongOutputs)


def test_layer_with_a_lost_weight_is_the_origin_of_what_the_next_layers_amplify():
    layers = [LayerError("net/norm", 0.01, 0.01), LayerError("net/head", 1.1, 0.001)]
    lost = [LostWeight("net/norm/scale", zero=0.5, infinite=0.0)]
    replay = compared(1.1, **IN_NORM | {"layer_errors": layers}, lost_weights=lost)
    assert problem(comparing(replay)).location == "net/norm"


def test_edit_is_of_the_layer_that_a_program_creates_and_the_place_of_the_part_that_fails():
    parts = [LayerError("net/block/attention", 1.1, 1.0)]
    layers = ["net/block/attention", "net/block/dense"]
    replay = compared(1.1, **IN_NORM | {"layer_errors": parts, "float32_layers": layers})
    cause = problem(comparing(replay, layers={"net/block": "Decoder"}))
    assert cause.location == "net/block/attention"
    assert edits_of(cause) == ["kmp.layers.Float32(Decoder(..., name='block'))"]


@pytest.mark.parametrize(("output_error", "is_cause"), [(0.25, False), (0.26, True)])
def test_outputs_that_an_operation_outside_of_the_layers_changes_have_no_origin(
    output_error, is_cause
):
    replay = compared(
        output_error,
        layer_errors=[LayerError("net", 0.01, 0.01), LayerError("model", output_error)],
        gradient_errors=[wrong("net", 1.0)],
        float32_layers=["net"],
    )
    cause = problem(comparing(replay))
    assert isinstance(cause, WrongOutputs if is_cause else WrongGradients)
    if is_cause:
        assert (cause.origin, cause.location) == (None, "net")


SQUARE = operation("Square", "inf", "net/norm/inner")
SUBTRACTION = LossyOperation("net/norm", "Sub", "cancellation", "float16", 20480.0, 1.31, 1.0, 9.0)


def lost_weight(zero=0.0, infinite=0.0):
    return {"lost_weights": [LostWeight("net/norm/scale", zero, infinite)]}


@pytest.mark.parametrize(
    ("measured", "is_reason"),
    [
        ({"operations": [SQUARE]}, True),
        ({"operations": [replace(SQUARE, layer="net/normal")]}, False),
        (lost_weight(zero=0.06), True),
        (lost_weight(zero=0.05), False),
        (lost_weight(infinite=0.06), True),
        ({"layer_errors": [LayerError("net/norm", 1.1, 1.0, 0.51)]}, True),
        ({"layer_errors": [LayerError("net/norm", 1.1, 1.0, 0.5)]}, False),
        ({"underflows": {"net/norm": 0.51}}, True),
        ({"underflows": {"net/norm": 0.5}}, False),
        ({"underflows": {"net/head": 0.7}}, False),
        ({"lossy": [replace(SUBTRACTION, error=0.051)]}, True),
        ({"lossy": [replace(SUBTRACTION, error=0.05)]}, False),
        ({"lossy": [replace(SUBTRACTION, layer="net/head")]}, False),
    ],
)
def test_reason_is_what_was_measured_in_the_layer(measured, is_reason):
    cause, plain = (
        problem(comparing(compared(1.1, **IN_NORM | values))) for values in (measured, {})
    )
    assert (cause.title != plain.title) == is_reason


def test_worst_operation_in_a_layer_is_the_reason():
    smaller, elsewhere = (
        replace(SUBTRACTION, error=0.1, typical=7.0),
        replace(SUBTRACTION, layer="net/head", error=100.0),
    )
    several, alone = (
        problem(comparing(compared(1.1, **IN_NORM, lossy=operations)))
        for operations in ([elsewhere, smaller, SUBTRACTION], [SUBTRACTION])
    )
    assert several.title == alone.title


# Gradients.


@pytest.mark.parametrize(
    ("error", "is_cause"),
    [
        (wrong(error=0.25, noise=None), False),
        (wrong(error=0.26, noise=None), True),
        (wrong(error=0.8, kept=1.0, noise=0.4), False),
        (wrong(error=0.81, kept=1.0, noise=0.4), True),
        (wrong(error=0.8, kept=0.5, noise=0.4), True),  # less is left than noise explains
        (wrong(error=0.8, kept=0.6, noise=0.4), False),
        (GradientError("net/a", 1.9, -0.5, 0.9e-3, 0.2, largest_norm=1.0), False),  # converged
        (GradientError("net/a", 1.9, -0.5, 1.1e-3, 0.2, largest_norm=1.0), True),
    ],
)
def test_gradients_are_wrong_beyond_the_noise_of_a_batch(error, is_cause):
    # Another layer has not converged, so that the training as a whole has not.
    others = [GradientError("net/b", 0.01, 1.0, 1.0, 0.5, largest_norm=1.0)]
    replay = compared(gradient_errors=[error, *others])
    assert names(comparing(replay)) == (["precision_loss"] if is_cause else [])


@pytest.mark.parametrize("output_error", [0.001, 0.2])
def test_harmful_gradients_are_a_warning_with_the_loss_scale_that_removes_the_errors(output_error):
    error = wrong("net/dense")
    layers = [LayerError("net/head", output_error, output_error)]
    replay = compared(
        output_error, layer_errors=layers, gradient_errors=[error], usable_scale=2.0**20
    )
    run = comparing(replay, layers={"net": "Functional", "net/dense": "Dense"})
    cause = problem(run)
    assert isinstance(cause, WrongGradients)
    assert (cause.name, cause.severity) == ("precision_loss", WARNING)
    assert (cause.location, cause.layer, cause.error) == ("net/dense", "net/dense", error)
    assert (cause.is_of_loss, cause.is_cured_by_float32) == (False, True)
    assert edits_of(cause) == ["kmp.enable(initial_scale=2.0**20)"]


def differing(loss=0.1, float32_loss=0.3, output_error=0.001, **values):
    """Returns a comparison whose loss and gradients differ."""
    values = {"gradient_errors": [wrong()], "float32_layers": ["net/norm"]} | values
    return compared(output_error, loss=loss, float32_loss=float32_loss, **values)


@pytest.mark.parametrize(
    ("replay", "is_of_loss"),
    [
        (differing(), True),
        (differing(loss=0.316), True),
        (differing(loss=0.314), False),
        (differing(output_error=0.05), True),
        (differing(output_error=0.06, float32_layers=[]), False),
    ],
)
def test_loss_that_differs_where_the_outputs_agree_is_the_origin(replay, is_of_loss):
    cause = problem(comparing(replay))
    assert isinstance(cause, WrongGradients)
    assert (cause.is_of_loss, cause.severity) == (is_of_loss, ERROR if is_of_loss else WARNING)
    assert cause.location == (LOSS_FUNCTION if is_of_loss else "net/a")


def test_loss_that_overflows_inside_and_stays_finite_is_found_where_it_overflows():
    found = operation("Sum", "inf", "net/dice", smallest_input=0.0)
    replay = differing(
        1.0,
        0.6,
        gradient_errors=[GradientError("net/down", 1.0, 0.0, 1.0, 0.02)],
        operations=[found],
        float32_layers=["net/dice"],
        flushed={"net/kernel": 1.0},  # not for want of a loss scale
    )
    cause = problems(training(healthy(1), healthy(50), healthy(100, replay=replay)))[0]
    assert isinstance(cause, WrongGradients)
    assert (cause.location, cause.is_of_loss) == ("net/dice", True)


@pytest.mark.parametrize(("examples", "is_cause"), [(7, False), (8, True)])
@pytest.mark.parametrize(("output_error", "error"), [(0.5, 0.3), (0.01, 2.0)])
def test_few_examples_do_not_show_that_bfloat16_is_harmful(examples, is_cause, output_error, error):
    replay = compared(
        output_error,
        examples=examples,
        layer_errors=[LayerError("net/a", output_error, output_error)],
        gradient_errors=[wrong(error=error, kept=1.0, noise=0.5)],
        float32_layers=["net/a"],
    )
    run = comparing(*[replay] * 3, **BFLOAT16)
    assert names(run) == (["precision_loss"] if is_cause else [])


# Which comparisons decide.

OUTPUTS_DIFFER = {"output_error": 0.6, "layer_errors": [LayerError("net/dense", 0.6, 0.6)]}
GRADIENTS_DIFFER = {"gradient_errors": [wrong("net/dense")]}


@pytest.mark.parametrize("errors", [OUTPUTS_DIFFER, GRADIENTS_DIFFER])
@pytest.mark.parametrize("is_unscaled", [False, True])
def test_no_cure_is_for_errors_that_another_cause_explains(errors, is_unscaled):
    replay = compared(**errors, float32_layers=["net/dense"])
    if is_unscaled:
        replay = replace(replay, unscaled=UnscaledGradients(["net/dense"]))
    run = comparing(replay, replay, replay)
    assert cured_layers(run) == (None if is_unscaled else ("net/dense",))


# Of comparisons in the order of their steps, which have harmful errors.
ONE_OF_SIX, LATE_HARM = [0, 0, 0, 0, 0, 1], [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("harmful", "errors", "is_cause", "layers"),
    [
        (ONE_OF_SIX, GRADIENTS_DIFFER, False, None),
        ([0, 0, 0, 0, 1, 1], GRADIENTS_DIFFER, False, None),
        (LATE_HARM, GRADIENTS_DIFFER, True, ("net/dense",)),
        ([1, 1, 0, 1, 0, 1], GRADIENTS_DIFFER, True, None),  # a repair needs three in a row
        ([0, 1], GRADIENTS_DIFFER, True, None),
        ([1, 1, 1, 1, 1, 0], GRADIENTS_DIFFER, False, None),  # harm that has passed
        (ONE_OF_SIX, OUTPUTS_DIFFER, True, ("net/dense",)),
    ],
)
def test_comparisons_since_the_last_repair_agree_on_harm_before_it_is_a_problem(
    harmful, errors, is_cause, layers
):
    bad = compared(**errors, float32_layers=["net/dense"])
    before = [healthy(step, replay=bad) for step in (1, 2, 3)]
    repair = healthy(4, fallback=["net/other"])
    after = [
        healthy(step, replay=bad if is_harmful else compared())
        for step, is_harmful in zip(range(10, 100, 10), harmful, strict=False)
    ]
    run = run_of(*before, repair, *after, healthy(after[-1].step + 1), **FLOAT16)
    assert names(run) == (["precision_loss"] if is_cause else [])
    assert cured_layers(run) == layers


# States.


def with_states(*errors, **settings):
    """Returns a run whose last comparison has these errors of states."""
    replay = compared(state_errors=errors, float32_layers=["net"])
    return comparing(compared(), replay, **{"layers": {"net": "Running"}} | settings)


@pytest.mark.parametrize(
    ("error", "is_cause"),
    [
        (StateError("net/mean", 1.0, 0.1, 0.99), True),
        (StateError("net/mean", 0.26, 0.1, 0.51), True),
        (StateError("net/mean", 0.25, 0.1, 0.99), False),
        (StateError("net/mean", 1.0, 0.1, 0.5), False),  # it moves half the way
        (StateError("net/mean", 1.0, 0.25, 0.99), False),  # noise
        (StateError("net/mean", 1.0, 0.0, 0.0), False),  # that of the batch itself
        (StateError("net/mean", 1.0, 0.0, 0.9), False),
        (StateError("net/mean", 1.0, 0.0, 0.91), True),
    ],
)
def test_state_whose_updates_float16_loses_moves_slowly(error, is_cause):
    run = with_states(error)
    assert names(run) == (["precision_loss"] if is_cause else [])
    if is_cause:
        cause = problem(run)
        assert isinstance(cause, StaleState)
        assert (cause.severity, cause.location, cause.error) == (ERROR, "net", error)
        assert cause.is_cured_by_float32
        assert edits_of(cause) == ["kmp.layers.Float32(Running(..., name='net'))"]


@pytest.mark.parametrize(
    ("settings", "edit"),
    [
        ({}, "Dense(dtype='float32', name='slow')"),
        ({"layers": {"net": "Sequential"}}, "Sequential(dtype='float32', name='net')"),
        ({"layers": {}}, "self.add_weight(dtype='float32', name='kernel')"),
        ({"policy": "float16"}, "kmp.enable(policy='mixed_float16')"),
        (
            {"policy": "bfloat16"},
            "keras.config.set_dtype_policy(policy='mixed_bfloat16')",
        ),
    ],
)
def test_state_in_float16_needs_another_dtype_of_its_variable(settings, edit):
    lost = [
        StateError(f"net/{name}", 1.0, 0.0, next_update, "float16")
        for name, next_update in (("slow/kernel", 0.99), ("slow/bias", 0.99), ("vector", 0.8))
    ]
    run = with_states(*lost, **{"layers": {"net/slow": "Dense", "net": "Sequential"}} | settings)
    cause = problem(run)
    assert isinstance(cause, StaleState)
    assert (cause.error, cause.is_cured_by_float32) == (lost[0], False)
    assert edits_of(cause)[0] == edit
    # A repair of the training does not change the dtype of variables.
    assert cured_layers(run) is None


# Updates.


@pytest.mark.parametrize(
    ("settings", "name", "layers", "edit"),
    [
        (
            {"variable_dtypes": ["bfloat16"]},
            "bfloat16",
            [],
            "keras.config.set_dtype_policy(policy='mixed_bfloat16')",
        ),
        (
            {
                "variable_dtypes": ["bfloat16", "float32"],
                "policy": "mixed_bfloat16",
                "layers": {"net": "Embedding"},
            },
            "bfloat16",
            ["net"],
            # Its outputs are its weights, so that "mixed_bfloat16" would round these.
            "keras.layers.Embedding(dtype='float32', name='net')",
        ),
        (
            {
                "variable_dtypes": ["float16", "float32"],
                "policy": "mixed_float16",
                "layers": {"net": "Embedding"},
            },
            "float16",
            ["net"],
            "keras.layers.Embedding(dtype='mixed_float16', name='net')",
        ),
    ],
)
def test_updates_that_weights_in_16_bits_lose_are_reported(settings, name, layers, edit):
    cause = problem(training(updated(50, 1e-5, updates=0), **settings))
    assert isinstance(cause, LostUpdates)
    assert (cause.name, cause.severity, cause.location) == ("lost_updates", ERROR, "net/kernel")
    assert (cause.number_format.name, cause.share) == (name, 1.0)
    assert (cause.variables, cause.layers) == (["net/kernel"], layers)
    assert edits_of(cause) == [edit]
    assert not cause.is_cured_by_float32


@pytest.mark.parametrize(
    ("updates", "variables"), [(80, None), (79, []), (50, []), (49, ["net/kernel"])]
)
def test_many_weights_have_to_stay_as_they_were(updates, variables):
    record = updated(50, 1e-5, counts=[100], updates=updates)
    found = problems(training(record, variable_dtypes=["float16"]))
    assert [each.variables for each in found] == ([] if variables is None else [variables])
    assert names(training(record, variable_dtypes=["float32"])) == []
