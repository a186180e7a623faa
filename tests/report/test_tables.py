"""The tables and figures of one run; `tests/plots` checks what is drawn."""

import math

import pytest
from built_runs import sample_from
from report_runs import (
    COUNTED,
    NOT_COUNTED,
    OVERFLOWED,
    bells,
    compared_run,
    figures_of,
    header_of,
    healthy_run,
    record_of,
    run_in,
    underflowing_run,
)

from kmp.records import Record, Run
from kmp.report.run_summary import RunSummary
from kmp.report.run_tables import (
    ALL_FINITE,
    NOT_SAMPLED,
    gradients,
    layer_errors,
    nonfinite_variables,
    other_scales,
    overflow_and_underflow,
)
from kmp.report.texts import share


def test_gradients_are_of_the_newest_sample_by_layer():
    table = gradients(RunSummary("first", underflowing_run()))
    first, last = (bells(300).by_layer()[name] for name in ("m/first", "m/last"))
    subnormal = last.zones["subnormal"] + last.zones["below_subnormal"]
    columns = dict(zip(table.columns, zip(*table.rows, strict=True), strict=True))
    assert columns["layer"] == ("m/first", "m/last")
    assert columns["elements"] == (f"{first.total:,}", f"{last.total:,}")
    assert columns["zero"][0] == share(first.zero_fraction)
    assert columns["subnormal"][1] == share(subnormal / last.total)
    assert columns["amax"][1] == "32"
    assert columns["norm"] == ("0.707", "0.5")
    assert columns["update / weight"] == ("0.001", "0.001")
    assert columns["updates lost"] == ("25%", "25%")
    assert "Step 300, loss scale 2^4." in table.note


def test_table_of_many_layers_has_forty_and_says_how_many_it_omits():
    layers = {f"m/layer_{i}/kernel": {"first": -20, "counts": [5]} for i in range(50)}
    table = gradients(RunSummary("x", Run([record_of(sample_from(300, 16.0, layers))])))
    assert len(table.rows) == 40
    assert table.note.endswith("10 more are not shown.")


def test_errors_of_layers_begin_with_the_one_that_adds_most_with_their_gradients():
    table = layer_errors(RunSummary("first", compared_run()))
    columns = ("layer", "class", "outputs", "new error", "gradients", "sampling noise")
    assert table.columns == columns
    assert table.rows == (
        ("m/last", "LSTM", "1.25", "1.5", "1.5", "0.1"),  # the larger error of its two cells
        ("m/first", "LSTM", "0.002", "0.0005", "-", "-"),
        ("m", "the model", "1.25", "unknown", "-", "-"),
    )
    assert table.marked == 0
    assert "In step 300," in table.intro
    assert "for 32 examples of a batch" in table.intro


def test_twelve_layers_with_the_largest_errors_are_shown():
    run = compared_run([f"m/layer_{index}" for index in range(30)])
    table = layer_errors(RunSummary("many", run))
    assert len(table.rows) == 12
    assert table.rows[0][0] == "m/layer_29"
    assert table.note.endswith("19 more are not shown.")


def test_skipped_steps_and_origins_are_counted_since_training_began_also_after_a_repair():
    run = healthy_run(skipped=60)
    middle = len(run.rows) // 2
    run.rows.insert(middle, Record(step=run.rows[middle - 1].step, fallback=["m/first"]))
    summary = RunSummary("first", run)
    assert summary.observed.skipped.count < 60  # those since the repair, of which the findings are
    counts = dict(summary.counts)
    assert counts["skipped steps"] == "60 (20%)"
    assert counts["last overflow origin"] == "m/last/kernel"
    assert [row[:3] for row in overflow_and_underflow(summary).rows] == [
        ("m/last/kernel", "60", "60"),
        ("m/first/kernel", "0", "60"),
        ("m/first/bias", "0", "60"),
    ]
    scales = other_scales(summary)
    assert (scales.rows[0][0], scales.rows[0][-1]) == ("in use: 2^4", "100%")
    assert scales.note.count("60 of 300 steps were skipped") == 1


def test_variables_that_underflow_without_overflow_are_listed():
    table = overflow_and_underflow(RunSummary("first", underflowing_run()))
    assert table.rows == (
        ("m/first/bias", "0", "0", "6", "6"),
        ("m/first/kernel", "0", "0", "0", "6"),
    )


def test_variables_with_nan_or_inf_are_listed_in_another_format():
    table = nonfinite_variables(RunSummary("first", run_in("bfloat16", skipped=30)))
    assert table.columns == ("variable", "origin", "not finite")
    assert table.rows[0] == ("m/last/kernel", "30", "30")


def test_no_scale_is_recommended_for_gradients_that_span_more_than_float16():
    tiny = {"first": -80, "counts": [500], "amax": 2.0**-79}
    large = {"first": 0, "counts": [500], "amax": 2.0}
    sample = sample_from(10, 16.0, {"m/first/kernel": tiny, "m/last/kernel": large})
    run = Run([Record(step=10, loss_scale=16.0), record_of(sample)], header_of())
    table = other_scales(RunSummary("first", run))
    assert not any("recommended" in row[0] for row in table.rows)
    assert table.note.startswith("No constant scale is recommended: none has at most 0.1% under")


@pytest.mark.parametrize(
    ("table", "run", "reason"),
    [
        (gradients, COUNTED, NOT_SAMPLED),
        (other_scales, OVERFLOWED, "No sampled gradient was finite."),
        (other_scales, run_in("bfloat16"), ""),
        (nonfinite_variables, COUNTED, ALL_FINITE),
        (nonfinite_variables, NOT_COUNTED, "NaN and Inf were not counted."),
        (overflow_and_underflow, COUNTED, "No variable overflowed, and no underflow was detected."),
        (
            overflow_and_underflow,
            NOT_COUNTED,
            "Overflows were not counted, and no underflow was detected.",
        ),
    ],
)
def test_empty_table_has_the_reason(table, run, reason):
    found = table(RunSummary("first", run))
    assert (found.rows, found.note) == ((), reason)


@pytest.mark.parametrize(
    ("run", "status", "findings"),
    [
        (healthy_run(lowest=-40), "error", "1 error"),
        (run_in("float32"), "no problem", "none"),
        (healthy_run(), "unknown", "unknown"),  # nothing was compared with float32
        (Run([Record(step=9)]), "unknown", "unknown"),
        (
            healthy_run(growth_interval=20, rule="DynamicScale", skipped=30),
            "warning",
            "1 warning",
        ),
    ],
)
def test_status_is_that_of_the_worst_finding(run, status, findings):
    summary = RunSummary("first", run)
    assert (summary.status, summary.findings_count) == (status, findings)


def test_settings_are_those_of_the_log_without_defaults():
    run = healthy_run(
        learning_rate=0.0020000000949949026,
        in_fit=True,
        layers={"a": "Dense", "b": "X"},
        promoted=[],
        hysteresis=1,
    )
    assert dict(RunSummary("first", run).settings) == {
        "started": "2026-11-01 10:00:00+00:00",
        "keras": "3.15.1",
        "rule": "FixedScale",
        "initial_scale": "2^4",
        "model": "m",
        "optimizer": "Adam",
        "compute_dtypes": "float16, float32",
        "parameters": "12,345",
        "learning_rate": "0.002",
        "in_fit": "True",
        "layers": "a: Dense, b: X",
    }


def test_share_is_not_rounded_to_none_or_all():
    values = None, math.nan, 0.0, 1e-9, 0.125, 0.99999, 1.0
    assert [*map(share, values)] == ["unknown", "unknown", "0%", "<0.1%", "12.5%", ">99.9%", "100%"]


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


@pytest.mark.parametrize(
    ("name", "run", "reason"),
    [
        ("loss_scale", COUNTED, "The loss scale was not recorded."),
        ("what_if", COUNTED, NOT_SAMPLED),
        ("overflowing_variables", COUNTED, "No variable overflowed."),
        ("overflowing_variables", NOT_COUNTED, "Overflows were not counted."),
        ("overflowing_variables", run_in("bfloat16"), ALL_FINITE),
    ],
)
def test_what_was_not_measured_has_a_reason_in_place_of_a_figure(name, run, reason):
    figure = figures_of(run)[name]
    assert figure.source is None
    assert figure.caption.startswith(reason)
