"""Verdicts of hand-written records: what they exclude, and what they leave unknown."""

import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import sample_from

import kmp
from kmp.records import GradientError, LayerError, Replay, Run

GOOD = "float16 does not hurt this run: "
DOUBT = "No sign that float16 hurts this run: "
SETTINGS = {"rule": "DynamicScale", "initial_scale": 2.0**15, "growth_interval": 2000, "compute_dtypes": ["float16"]}


def row(step, zeros=0, exponent=-6, **values):
    counts = {"zero": zeros, "first": exponent, "counts": [100], "amax": 2.0**exponent, "norm": 1.0}
    sample = sample_from(step, 2.0**15, {"net/kernel": counts})
    return {"step": step, "loss_scale": 2.0**15, "overflow_count": 0, "last_loss": 1.0, "sample": sample} | values


def compared(record, output_error=0.001, **values):
    """Adds the comparison of a batch with float32 to a record."""
    replay = Replay(32, 2.0**15, 1.0, 1.0, True, True, output_error=output_error, **values)
    return record | {"replay": replay}


def verdict_of(*rows, **settings):
    return kmp.advise(Run(list(rows), {"settings": SETTINGS | settings})).verdict


def test_verdict_is_good_if_everything_is_excluded():
    errors = [GradientError("net", 0.02, 1.0, 1.0, 0.5)]
    verdict = verdict_of(compared(row(1)), row(50), compared(row(100), 0.003, gradient_errors=errors))
    assert verdict.startswith(
        f"{GOOD}in 2 batches the outputs differ from float32 by at most 0.30%, and the gradients of a layer by at most "
        "2.0%; 0 of 100 steps were skipped"
    )
    assert verdict.endswith("in 3 samples.")


@pytest.mark.parametrize("steps", [(), (1,), (1, 30)])
def test_verdict_is_not_good_without_comparisons_at_the_start_and_the_end(steps):
    rows = [compared(row(step)) if step in steps else row(step) for step in (1, 30, 100)]
    verdict = verdict_of(*rows)
    assert verdict.startswith(DOUBT)
    assert "Unknown: how far outputs and gradients are from those in float32" in verdict


def test_verdict_is_not_good_if_a_comparison_found_harm_or_lacks_the_gradients():
    assert "at step 1 did to the training" in verdict_of(compared(row(1), 0.4), row(50), compared(row(100)))
    forward = [compared(row(step), is_forward_only=True) for step in (1, 50, 100)]
    verdict = verdict_of(*forward, train_step="custom")
    assert verdict.startswith(DOUBT)
    assert "whether the custom `train_step` scales each of its losses" in verdict


def test_harmful_errors_are_findings_with_the_layers_that_remove_them():
    layers = [LayerError("net/norm", 1.1, 1.0), LayerError("net/head", 1.1, 0.001)]
    errors = [GradientError("net", 0.2, 0.9, 1.0, 0.5)]
    rows = [compared(row(1), 1.1, layer_errors=layers, gradient_errors=errors, float32_layers=["net/norm"])]
    (finding,) = kmp.advise(Run(rows, {"settings": SETTINGS}))
    assert (finding.cause, finding.location, finding.severity) == ("precision_loss", "net/norm", "error")
    assert finding.change == "kmp.layers.Float32(Layer(..., name='norm'))"
    assert "differ from float32 by 110 % of how they vary; in layer 'norm' alone, given float32 inputs, by 100 %" in (
        finding.evidence
    )
    errors = [GradientError("net/dense", 0.6, 0.5, 1.0, 0.1)]
    rows = [compared(row(1), gradient_errors=errors, float32_layers=[], usable_scale=2.0**20)]
    (finding,) = kmp.advise(Run(rows, {"settings": SETTINGS | {"layers": {"net": "Functional", "net/dense": "Dense"}}}))
    assert (finding.cause, finding.location, finding.severity) == ("precision_loss", "net/dense", "warning")
    assert finding.change == "kmp.enable(initial_scale=2.0**20)"
    assert "differ by 60 % of their norm, and keep 50 % of it; the sampling noise is 10 %" in finding.evidence


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
    reference = replace(row(1, zeros=100)["sample"], loss_scale=1.0)
    first, last = (compared(row(step, zeros=100), zero=["net/kernel"]) for step in (1, 100))
    assert verdict_of(first | {"reference": reference}, row(50, zeros=100), last).startswith(GOOD)


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
