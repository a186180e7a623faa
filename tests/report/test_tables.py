"""The tables of one run, and its numbers in words."""

import math

import pytest
from report_runs import (
    bells,
    compared_run,
    header_of,
    healthy_run,
    record_of,
    run_in,
    underflowing_run,
    with_metrics,
)
from runs import sample_from

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
from kmp.report.texts import number, share

NOT_COUNTED = Run([Record(step=5, loss_scale=8.0)])
COUNTED = Run([Record(step=5, overflow_count=0)], header_of())
OVERFLOWED = Run([record_of(bells(5, inf=3))], header_of())


def columns_of(table):
    """Returns the cells below each heading."""
    return dict(zip(table.columns, zip(*table.rows, strict=True), strict=True))


def test_gradients_are_of_the_newest_sample_by_layer():
    table = gradients(RunSummary("first", underflowing_run()))
    layers = bells(300).by_layer()
    first, last = layers["m/first"], layers["m/last"]
    subnormal = last.zones["subnormal"] + last.zones["below_subnormal"]
    columns = columns_of(table)
    assert columns["layer"] == ("m/first", "m/last")
    assert columns["elements"] == (f"{first.total:,}", f"{last.total:,}")
    assert columns["zero"][0] == share(first.zero_fraction)
    assert columns["subnormal"][1] == share(subnormal / last.total)
    assert columns["amax"][1] == number(2.0**5)
    assert columns["norm"][0] == number(math.sqrt(0.5))
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
    by_variable = overflow_and_underflow(summary)
    assert by_variable.columns[:3] == ("variable", "overflow origin", "overflowed")
    assert {row[:3] for row in by_variable.rows} == {
        ("m/last/kernel", "60", "60"),
        ("m/first/kernel", "0", "60"),
        ("m/first/bias", "0", "60"),
    }
    assert by_variable.rows[0][0] == "m/last/kernel"
    scales = other_scales(summary)
    assert columns_of(scales)["loss scale"][0] == "in use: 2^4"
    assert columns_of(scales)["would be skipped"][0] == "100%"
    assert scales.note.count("60 of 300 steps were skipped") == 1


def test_variables_that_underflow_without_overflow_are_listed():
    table = overflow_and_underflow(RunSummary("first", underflowing_run()))
    assert table.rows == (
        ("m/first/bias", "0", "0", "6", "6"),
        ("m/first/kernel", "0", "0", "0", "6"),
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_variables_with_nan_or_inf_are_listed_in_another_format(dtype):
    table = nonfinite_variables(RunSummary("first", run_in(dtype, skipped=30)))
    assert table.columns == ("variable", "origin", "not finite")
    assert table.rows[0] == ("m/last/kernel", "30", "30")
    assert {row[1:] for row in table.rows[1:]} == {("0", "30")}


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
        (other_scales, COUNTED, NOT_SAMPLED),
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
        (underflowing_run(), "error", "1 error"),
        (healthy_run(), "no problem", "none"),
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


def test_metrics_come_before_the_counts_of_a_run_without_the_learning_rate():
    summary = RunSummary("first", with_metrics(healthy_run(), loss=0.6, val_loss=0.9))
    assert summary.numbers[:3] == (
        ("val_loss", "0.9"),
        ("loss", "0.6"),
        ("computed in", "float16 and float32"),
    )


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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "unknown"),
        (math.nan, "unknown"),
        (0.0, "0%"),
        (1e-9, "<0.1%"),
        (0.125, "12.5%"),
        (0.99999, ">99.9%"),
        (1.0, "100%"),
    ],
)
def test_share_is_not_rounded_to_none_or_all(value, text):
    assert share(value) == text
