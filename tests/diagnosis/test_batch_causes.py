"""Causes in the batch and its targets: `BadData` and `BadTargets`."""

import pytest
from built_runs import (
    BFLOAT16,
    FLOAT32,
    edits_of,
    failed,
    failed_in_float32,
    make_replay,
    operation,
    problem,
    problems,
    skipped,
    training,
)

from kmp.diagnosis import ERROR, WARNING, thresholds
from kmp.diagnosis.causes.bad_data import BadData
from kmp.diagnosis.causes.bad_targets import BadTargets
from kmp.records import Record
from kmp.records.replay import InvalidTargets, NonfinitePart
from kmp.utils.float_formats import FLOAT16 as FLOAT16_FORMAT

TOO_LARGE = NonfinitePart("the batch's x", is_too_large=True)
CAST = operation("Cast", "inf")


def with_failed(replay, count=50, **settings):
    """Returns a run with some losses that are not finite, of 100."""
    return training(skipped(count, nonfinite=count, replay=replay), **settings)


def invalid(*values, **others):
    """Returns a replay of a batch with such targets."""
    return failed_in_float32(invalid_targets=InvalidTargets(*values, **others))


def huge(largest_input=9.97e36, **values):
    """Returns an operation whose result overflows float32."""
    values = {"dtype": "float32", "largest_input": largest_input} | values
    return operation("Square", "inf", **values)


@pytest.mark.parametrize(
    ("part", "name", "condition"),
    [
        ("x", "data", "np.abs(x) <= 65504"),
        ("y", "targets", "np.isfinite(y)"),
        ("sample_weight", "data", "np.isfinite(sample_weight)"),
    ],
)
def test_part_of_a_batch_that_is_not_finite_is_left_out_with_its_examples(part, name, condition):
    location = f"the batch's {part}"
    replay = failed_in_float32(nonfinite=NonfinitePart(location), has_sample_weight=part == "y")
    cause = problem(with_failed(replay))
    assert (cause.name, cause.location, cause.largest) == (name, location, 0.0)
    assert not cause.is_cured_by_float32
    arrays = "x, y" if part == "x" else "x, y, sample_weight"
    assert edits_of(cause) == [
        f"keep = ({condition}).reshape(len({part}), -1).all(axis=1)\n"
        f"{arrays} = keras.tree.map_structure(lambda a: a[keep], ({arrays}))"
    ]


@pytest.mark.parametrize(
    ("count", "steps", "severity"),
    [(1, 20, WARNING), (2, 20, ERROR), (10, 1000, WARNING), (11, 1000, ERROR)],
)
def test_rare_batches_are_a_warning(count, steps, severity):
    replay = failed_in_float32(nonfinite=NonfinitePart("the batch's x"))
    run = training(skipped(count, steps, nonfinite=count, replay=replay))
    assert problem(run).severity == severity


@pytest.mark.parametrize(
    ("operations", "values", "is_cause"),
    [
        ([huge()], {}, True),
        ([huge(thresholds.OVERFLOWS_FLOAT32)], {}, False),
        ([operation("Sqrt", has_negative_input=True)], {}, False),
        ([huge()], {"nonfinite_variables": ["net/kernel"]}, False),
        ([], {}, False),
    ],
)
def test_large_inputs_are_the_cause_only_if_float32_overflows_with_them(
    operations, values, is_cause
):
    replay = failed_in_float32(*operations, nonfinite=TOO_LARGE, **values)
    cause = problem(with_failed(replay))
    assert isinstance(cause, BadData) == is_cause
    if is_cause:
        assert cause.largest == FLOAT16_FORMAT.max


@pytest.mark.parametrize("layers", [["net/a"], []])
def test_large_inputs_that_a_cast_to_float16_makes_infinite_are_normalized_or_borne(layers):
    cause = problem(with_failed(failed(CAST, nonfinite=TOO_LARGE, float32_layers=layers)))
    assert (cause.name, cause.is_borne, cause.is_cured_by_float32) == (
        "data",
        bool(layers),
        bool(layers),
    )
    borne = ["kmp.layers.Float32(Dense(..., name='a'))"]
    normalized = ["x = (x - x.mean(axis=0)) / (x.std(axis=0) + 1e-6)"]
    assert edits_of(cause) == (borne if layers else normalized)


@pytest.mark.parametrize(
    ("settings", "is_cause_in_float32"), [(BFLOAT16, False), (BFLOAT16, True), (FLOAT32, True)]
)
def test_large_inputs_of_other_formats_have_to_overflow_float32(settings, is_cause_in_float32):
    build = failed_in_float32 if is_cause_in_float32 else failed
    replay = build(huge(9e36), nonfinite=TOO_LARGE)
    cause = problems(with_failed(replay, **settings))[0]
    assert isinstance(cause, BadData) == is_cause_in_float32
    if is_cause_in_float32:
        assert cause.largest == thresholds.OVERFLOWS_FLOAT32
        assert "np.abs(x) <= 1e+09" in edits_of(cause)[0]


@pytest.mark.parametrize(("part", "is_cause"), [("x", True), ("y", False)])
def test_targets_that_the_loss_ignores_are_no_cause(part, is_cause):
    replay = failed(operation("Exp", "inf"), nonfinite=NonfinitePart(f"the batch's {part}"))
    assert isinstance(problem(with_failed(replay)), BadData) == is_cause


@pytest.mark.parametrize(
    ("targets", "marker", "edit"),
    [
        # A marker of one target per example: the example is left out.
        (InvalidTargets(-1, 2, 3, only_invalid=-1), -1, "keep = (y >= 0).reshape"),
        (
            InvalidTargets(-1, 7, 3, only_invalid=-1),
            -1,
            "keep = ((y >= 0) & (y < 3)).reshape",
        ),
        # Of several targets per example, the loss ignores it.
        (
            InvalidTargets(0, 255, 3, only_invalid=255, per_example=64, from_logits=True),
            255,
            "model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True,"
            " ignore_class=255))",
        ),
        # Classes that are counted from 1 need one more.
        (InvalidTargets(1, 3, 3, only_invalid=3), None, "keras.layers.Conv2D(filters=4, name='h')"),
    ],
)
def test_edit_of_targets_depends_on_what_is_invalid(targets, marker, edit):
    settings = {"output_layers": ["net/h"], "layers": {"net/h": "Conv2D"}}
    cause = problem(with_failed(failed_in_float32(invalid_targets=targets), **settings))
    assert (cause.name, cause.severity, cause.location) == ("targets", ERROR, "net/h")
    assert (cause.targets, cause.array, cause.marker) == (targets, "y", marker)
    assert cause.has_ignoring_loss == ("ignore_class" in edit)
    assert not cause.is_cured_by_float32
    assert edits_of(cause)[0].startswith(edit)


@pytest.mark.parametrize(
    ("layers", "edits"),
    [
        ({"net/h": "Dense"}, ["keras.layers.Dense(units=4, name='h')"]),
        ({"net/h": "Head"}, []),
        ({}, []),
    ],
)
def test_number_of_classes_is_an_argument_of_layers_of_keras_only(layers, edits):
    settings = {"output_layers": ["net/h"], "layers": layers}
    assert edits_of(problem(with_failed(invalid(1, 3, 3), **settings))) == edits


@pytest.mark.parametrize(
    ("low", "high", "edits"), [(0, 255, ["y = (y - 0) / (255 - 0)"]), (7, 7, [])]
)
def test_targets_of_a_binary_cross_entropy_are_a_problem_of_finite_losses_too(low, high, edits):
    targets = InvalidTargets(low, high, 2, is_binary=True)
    cause = problem(training(Record(step=9, replay=make_replay(invalid_targets=targets))))
    assert isinstance(cause, BadTargets)
    assert (cause.severity, cause.location, edits_of(cause)) == (WARNING, "y", edits)
