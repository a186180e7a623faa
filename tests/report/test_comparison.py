"""Reports of several runs."""

import re
from dataclasses import replace

import numpy as np
import pytest
from report_runs import (
    OVERFLOWED,
    assert_in_order,
    healthy_run,
    page_of,
    run_in,
    three_runs,
    with_metrics,
)

from kmp.records import BIN_COUNT, Run
from kmp.records.exponent_histogram import ZERO_BIN
from kmp.report.run_comparison import comparison, difference, main_metrics
from kmp.report.run_summary import RunSummary


def net_of(*suffixes):
    """Returns a run of layers that Keras has numbered."""
    layers = [f"net/dense{suffix}" for suffix in suffixes]
    return healthy_run(
        [f"{layer}/kernel" for layer in layers], layers=dict.fromkeys(layers, "Dense")
    )


@pytest.fixture(scope="module")
def page_of_three():
    return page_of(**three_runs())


@pytest.fixture(scope="module")
def good_and_bad():
    """Summaries of two runs, the second with a lower accuracy."""
    values = {"loss": 0.6, "steps": 1.2}
    return [
        RunSummary("good", with_metrics(healthy_run(), **values, val_loss=0.9, val_accuracy=0.9)),
        RunSummary("bad", with_metrics(healthy_run(), **values, val_loss=0.93, val_accuracy=0.3)),
    ]


def test_page_has_a_comparison_and_then_each_run(page_of_three):
    verdicts = [RunSummary(name, run).advice.verdict for name, run in three_runs().items()]
    compared = ("3 runs compared", *verdicts, "findings", "computed in", "side by side")
    each = ("float32", verdicts[0], "Counts", "float16", "Evidence:", "Counts", "bfloat16")
    assert_in_order(page_of_three.text, *compared, *each, verdicts[2], "Counts")


def test_figures_of_loss_scales_are_those_of_runs_with_one(page_of_three):
    alone = page_of(a=run_in("float32"), b=run_in("bfloat16"))
    assert "Gradients, side by side" in alone.folded
    assert "oss scale" not in alone.text
    assert "Loss scale and gradients, side by side" in page_of_three.folded
    # Only the run in float16 has figures of the loss scale and of others.
    assert page_of_three.html.count("<img") == 3 * 2 + 2


def test_metrics_come_first_and_the_one_that_differs_is_marked(good_and_bad):
    metrics, counts = comparison(good_and_bad)
    assert metrics.columns == ("", "good", "bad")
    assert metrics.rows == (
        ("val_loss", "0.9", "0.93"),
        ("val_accuracy", "0.9", "0.3"),
        ("loss", "0.6", "0.6"),
        ("steps", "1.2", "1.2"),
        ("findings", "unknown", "unknown"),
    )
    assert metrics.marked == 1
    assert metrics.note == "The first metric that differs by more than 10 %: val_accuracy."
    assert ("steps", "300", "300") in counts.rows  # beside a metric of this name
    assert main_metrics(good_and_bad) == ["val_accuracy", "val_loss"]


def test_page_has_the_metrics_and_their_figures_and_folds_the_counts(good_and_bad):
    page = page_of(**{summary.name: summary.run for summary in good_and_bad})
    assert re.search('<tr class="marked"><th scope="row">val_accuracy', page.html)
    ends = "at the end 0.9 in good, 0.3 in bad."
    assert page.alts[0] == f"val_accuracy over the training steps; {ends}"
    assert page.alts[1].startswith("val_loss over")
    assert page.text.index("Counts compared") < page.text.index("sampled steps")


def test_empty_run_is_compared_with_a_healthy_run():
    first = RunSummary("first", with_metrics(healthy_run(), loss=0.6))
    metrics, counts = comparison([first, RunSummary("empty", Run())])
    assert metrics.rows[0] == ("loss", "0.6", "unknown")
    assert metrics.marked == 0
    assert ("skipped steps", "0", "unknown") in counts.rows


def test_layers_that_differ_are_listed_from_their_first_step():
    first = net_of("", "_1")
    second = net_of("_7", "_8")
    for row in second.rows:
        if row.sample and row.step >= 200:
            counts = row.sample.counts
            counts[1, ZERO_BIN] = 10**6
            row.sample = replace(row.sample, bin_counts=counts, bins=np.arange(BIN_COUNT))
    table = difference(RunSummary("a", first), RunSummary("b", second))
    headings = ("layer", "from step", "zero in a", "zero in b", "norm in a", "norm in b")
    assert table.columns == headings
    assert [row[:2] for row in table.rows] == [("net/dense_1", "200")]


ALIKE = "The gradients of a and b are alike in all sampled steps."
NOT_COMPARED = "No layer was sampled in the same step of a and b."


@pytest.mark.parametrize(
    ("second", "reason"),
    [(net_of("_7", "_8"), ALIKE), (Run(), NOT_COMPARED), (OVERFLOWED, NOT_COMPARED)],
    ids=["alike", "empty", "overflowed"],
)
def test_runs_without_a_difference_have_the_reason(second, reason):
    table = difference(RunSummary("a", net_of("", "_1")), RunSummary("b", second))
    assert (table.rows, table.note) == ((), reason)
