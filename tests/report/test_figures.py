"""The figures of a run, with their text alternatives. `tests/plots` checks what is drawn."""

import pytest
from report_runs import bells, compared_run, figures_of, header_of, healthy_run, record_of, run_in

from kmp.records import Record, Run

SCALED = ["loss_scale", "gradient_exponents", "exponents_over_steps", "what_if"]


@pytest.mark.parametrize(
    ("run", "names"),
    [
        (healthy_run(), [*SCALED, "overflowing_variables"]),
        (compared_run(), [*SCALED, "overflowing_variables", "layer_errors"]),
        (run_in("bfloat16"), [*SCALED[1:3], "overflowing_variables"]),
    ],
    ids=["float16", "compared with float32", "bfloat16"],
)
def test_figures_are_those_of_what_was_measured_in_the_format_of_the_run(run, names):
    assert list(figures_of(run)) == names


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("loss_scale", ["2^4 at the end", "60 of 300 steps were skipped"]),
        ("gradient_exponents", ["step 300", "below float16's normal range", "near overflow"]),
        ("exponents_over_steps", ["6 samples, from step 50 to 300"]),
        ("what_if", ["Recommended: "]),
        ("overflowing_variables", ["m/last/kernel was the overflow origin in 100%"]),
        ("layer_errors", ["3 layers in step 300", "by 1.25", "begins at m/last, which adds 1.5"]),
    ],
)
def test_text_alternative_has_the_numbers_of_the_figure(name, facts):
    alt = figures_of(compared_run(skipped=60))[name].alt
    assert [fact for fact in facts if fact not in alt] == []


COUNTED = Run([Record(step=5, overflow_count=0)], header_of())
NO_RECORDS = Run([Record(step=5)], header_of())
OVERFLOWED = Run([record_of(bells(5, inf=3))], header_of())
NO_SAMPLES = "No gradients were sampled."


@pytest.mark.parametrize(
    ("name", "run", "reason"),
    [
        ("loss_scale", COUNTED, "The loss scale was not recorded."),
        ("gradient_exponents", COUNTED, NO_SAMPLES),
        ("exponents_over_steps", COUNTED, NO_SAMPLES),
        ("what_if", COUNTED, NO_SAMPLES),
        ("what_if", OVERFLOWED, "No sampled gradient was finite."),
        ("overflowing_variables", COUNTED, "No variable overflowed."),
        ("overflowing_variables", NO_RECORDS, "Overflows were not counted."),
        ("overflowing_variables", run_in("bfloat16"), "No gradient was NaN or Inf."),
    ],
)
def test_what_was_not_measured_has_a_reason_in_place_of_a_figure(name, run, reason):
    figure = figures_of(run)[name]
    assert figure.source is None
    assert figure.caption.startswith(reason)
