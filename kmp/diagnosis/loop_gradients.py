"""What a training loop does to gradients between the tape and the optimizer.

A replay has the gradients that the loop's tape computes, and a sample those that its optimizer
gets.
"""

import math
from collections.abc import Sequence
from typing import Literal

from kmp.diagnosis import thresholds
from kmp.diagnosis.run_metrics import RunMetrics
from kmp.records import GradientSample
from kmp.records.gradient_sample import layer_of
from kmp.records.replay import UnscaledGradients

_FEWEST_SAMPLES = 3  # to see that a norm is always the same


def reduced_in_loop(run: RunMetrics) -> UnscaledGradients | None:
    """Returns what a loop does to scaled gradients if that makes them far too small.

    The optimizer divides them by the loss scale after that, so that this scale is missing in the
    update. Gradients that the loop has unscaled may be clipped as it likes.
    """
    samples = [each for each in run.run.samples if 0 < each.total_norm < math.inf]
    if not samples:
        return None
    times = [
        reference.total_norm / _nearest(samples, reference.step).total_norm
        for reference in _references(run)
    ]
    if not times or min(times) < thresholds.REDUCED_IN_LOOP:
        return None
    return UnscaledGradients(
        layers=list(dict.fromkeys(map(layer_of, samples[-1].names))),
        are_all=True,
        change=_change(run, samples, times[-1]),
        times=times[-1],
    )


def _change(
    run: RunMetrics, samples: Sequence[GradientSample], times: float
) -> Literal["divided", "clipped", "reduced"]:
    replay, have_one_norm = run.last_comparison, _have_one_norm(samples)
    reads_scale = bool(replay and replay.loop and replay.loop.reads_scale)
    is_near_scale = abs(math.log2(times / run.scale)) < thresholds.DIVIDED_BITS
    # A training that hardly moves may have one norm too, if batches repeat.
    if is_near_scale and (reads_scale or not have_one_norm):
        return "divided"
    return "clipped" if have_one_norm else "reduced"


def _references(run: RunMetrics) -> list[GradientSample]:
    """Returns the gradients in float32 of the comparisons of a loop that passes scaled ones on."""
    found = []
    for row in run.run.rows:
        replay, reference = row.get("replay"), row.get("reference")
        if replay is None or reference is None or not replay.comparison:
            continue
        if replay.loop and not replay.loop.applies_unscaled:
            found.append(reference)
    return found


def _nearest(samples: Sequence[GradientSample], step: int) -> GradientSample:
    return min(samples, key=lambda sample: abs(sample.step - step))


def _have_one_norm(samples: Sequence[GradientSample]) -> bool:
    """Whether the norm, or the largest magnitude, of scaled gradients is always the same."""
    if len(samples) < _FEWEST_SAMPLES:
        return False
    norms = [sample.total_norm * sample.loss_scale for sample in samples]
    largest = [float(sample.amax.max()) for sample in samples]
    return any(max(each) <= (1 + thresholds.SAME_NORM) * min(each) for each in (norms, largest))
