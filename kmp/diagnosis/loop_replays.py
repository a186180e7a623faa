"""Whether the gradients of a replayed loop are those that its optimizer gets.

A replay has the gradients that come through the outputs of the model, before the loop changes them;
a sample has what the optimizer gets. Where the two differ, a comparison of the replay says nothing
about the rest.
"""

from dataclasses import dataclass

import numpy as np

from kmp.diagnosis import thresholds
from kmp.diagnosis.run_metrics import RunMetrics
from kmp.records import GradientSample, Replay
from kmp.records.gradient_sample import layer_of


@dataclass(frozen=True)
class LoopGradients:
    """How far the gradients that the optimizer gets are from those of a replay.

    Attributes:
        factor: Their norm, divided by that of the replay.
        is_changed: Whether the loop changes scaled gradients by such a factor that it may be a
            mistake.
        others: The layers with gradients that are not those of the replay times the factor.
    """

    factor: float
    is_changed: bool
    others: list[str]


def loop_gradients(run: RunMetrics) -> LoopGradients | None:
    """Returns how the gradients of a loop compare; `None` without a sample of a replayed step."""
    samples = {each.step: each for each in run.run.samples}
    for row in run.run.rows:
        replay, reference = row.get("replay"), row.get("reference")
        if replay and replay.loop and reference and reference.step in samples:
            sample = samples[reference.step]
            if np.isfinite(sample.total_norm) and reference.total_norm > 0:
                return _compared(replay, reference, sample)
    return None


def _compared(replay: Replay, reference: GradientSample, sample: GradientSample) -> LoopGradients:
    factor = sample.total_norm / reference.total_norm
    exact = dict(zip(reference.names, reference.norm.tolist(), strict=True))
    others = []
    for name, norm in zip(sample.names, sample.norm.tolist(), strict=True):
        expected = factor * exact.get(name, 0.0)
        low, high = sorted([norm, expected])
        matters = high > thresholds.PART_OF_STEP * sample.total_norm
        if matters and high > thresholds.OTHER_GRADIENTS * low:
            others.append(layer_of(name))
    is_similar = 1 / thresholds.CHANGED_IN_LOOP <= factor <= thresholds.CHANGED_IN_LOOP
    applies_unscaled = replay.loop is not None and replay.loop.applies_unscaled
    return LoopGradients(
        factor=factor,
        is_changed=not is_similar and not applies_unscaled,
        others=list(dict.fromkeys(others)),
    )
