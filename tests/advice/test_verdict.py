"""Verdicts of hand-written records: what they exclude, and what they leave unknown."""

import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import sample_from

import kmp
from kmp.records import Replay, Run

GOOD = "float16 does not hurt the gradients and updates of this run: "
DOUBT = "No sign that float16 hurts this run: "
SETTINGS = {"rule": "DynamicScale", "initial_scale": 2.0**15, "growth_interval": 2000, "compute_dtypes": ["float16"]}


def row(step, zeros=0, exponent=-6, **values):
    counts = {"zero": zeros, "first": exponent, "counts": [100], "amax": 2.0**exponent, "norm": 1.0}
    sample = sample_from(step, 2.0**15, {"net/kernel": counts})
    return {"step": step, "loss_scale": 2.0**15, "overflow_count": 0, "last_loss": 1.0, "sample": sample} | values


def verdict_of(*rows, **settings):
    return kmp.advise(Run(list(rows), {"settings": SETTINGS | settings})).verdict


def test_verdict_is_good_if_everything_is_excluded():
    verdict = verdict_of(row(1), row(50), row(100))
    assert verdict.startswith(GOOD)
    assert verdict.endswith("in 3 samples. Rounding in the forward pass is not measured.")


@pytest.mark.parametrize("steps", [(1, 100), (1, 2, 3)])
def test_few_or_early_samples_are_not_enough(steps):
    verdict = verdict_of(*map(row, steps), {"step": 200, "overflow_count": 0, "last_loss": 1.0})
    assert verdict.startswith(DOUBT)
    assert "Unknown: the gradients of the whole run" in verdict
    assert "to find out: a smaller every_n_steps in kmp.callbacks.defaults()." in verdict


def test_zeros_without_a_reference_are_unknown():
    verdict = verdict_of(*(row(step, zeros=100) for step in (1, 50, 100)))
    assert verdict.startswith(DOUBT)
    assert "50.0% are exactly zero" in verdict
    assert "Unknown: whether float16 flushed the gradient elements that are exactly zero; to find out: " in verdict
    assert "no batch was replayed, which needs reference='auto', Keras' training step" in verdict


def test_zeros_that_are_zero_in_float32_too_are_known():
    replay = Replay(32, 2.0**15, 1.0, 1.0, True, True, zero=["net/kernel"])
    reference = replace(row(1, zeros=100)["sample"], loss_scale=1.0)
    first = row(1, zeros=100) | {"replay": replay, "reference": reference}
    assert verdict_of(first, row(50, zeros=100), row(100, zeros=100)).startswith(GOOD)


def test_weights_in_float16_need_a_measured_update():
    verdict = verdict_of(row(1), row(50), row(100), variable_dtypes=["float16"])
    assert "Unknown: whether updates change weights in float16" in verdict


def test_skipped_steps_after_the_first_ones_leave_their_reason_unknown():
    rows = [row(1, overflows_in_a_row=0), row(50), row(100, overflow_count=9)]
    assert "Unknown: why steps overflow" in verdict_of(*rows)


def test_layer_that_is_flushed_leaves_the_cost_unknown():
    replay = Replay(32, 2.0**15, 1.0, 1.0, True, True, flushed={"net/kernel": 0.6})
    rows = [row(step, exponent=14) for step in (1, 50, 100)]  # a larger scale would overflow
    rows[0]["replay"] = replay
    verdict = verdict_of(*rows)
    assert verdict.startswith(DOUBT)
    assert "Unknown: what the layers lose whose gradients are mostly zero in float16, but not in float32" in verdict


def test_reason_of_a_failed_replay_is_named():
    verdict = verdict_of(
        row(1, zeros=100) | {"replay_error": "ValueError: no"}, *(row(n, zeros=100) for n in (50, 100))
    )
    assert "; the replay of a batch failed with ValueError: no." in verdict


def test_documented_causes_are_those_of_the_rules():
    page = Path(__file__).parents[2] / "docs" / "advice.md"
    first_cells = [
        line.split("|")[1] for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `")
    ]
    described = [cause for cell in first_cells for cause in re.findall("`(.*?)`", cell)]
    documented = re.findall('`"([a-z0-9_]+)"`', inspect.getdoc(kmp.advice.Finding).partition("severity:")[0])
    assert sorted(described) == sorted(documented)


def test_custom_train_step_may_not_scale_all_of_its_losses():
    verdict = verdict_of(row(1), row(50), row(100), train_step="custom")
    assert verdict.startswith(GOOD)
    assert verdict.endswith("not measured, nor whether the custom `train_step` scales each of its losses.")
