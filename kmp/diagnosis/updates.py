"""The updates of a run's weights, and its losses."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

import numpy as np

from kmp.diagnosis import thresholds
from kmp.diagnosis.sample_statistics import SampleStatistics
from kmp.records import Run


@dataclass(frozen=True)
class Losses:
    """The losses of a run before scaling; NaN where none was finite.

    Args:
        first: The first finite one.
        highest: The highest magnitude since.
        last: The median of a few of the second half, because the loss of one batch may be noisy.
    """

    first: float
    highest: float
    last: float

    @classmethod
    def of(cls, run: Run, last_step: int) -> "Losses":
        """Returns the losses of a run."""
        steps, losses = run.series("last_loss")
        _, highest_losses = run.series("highest_loss")
        finite = losses[np.isfinite(losses)]
        late = losses[np.isfinite(losses) & (2 * steps >= last_step)]
        if not late.size:
            late = finite[-1:]
        # That of the first record may be of a step before this run.
        increased = highest_losses[highest_losses > highest_losses[:1]]
        magnitudes = np.concatenate([increased, np.abs(finite)])
        highest = float(magnitudes.max()) if magnitudes.size else math.nan
        if not finite.size:
            return cls(math.nan, highest, math.nan)
        last = np.median(late[-thresholds.LAST_LOSSES :])
        return cls(float(finite[0]), highest, float(last))

    @property
    def exploded(self) -> float:
        """The loss above which the training has diverged."""
        return thresholds.EXPLODING_LOSS * max(abs(self.first), thresholds.SMALL_LOSS)


class Updates:
    """The sizes of updates relative to the weights, and the losses.

    Args:
        run: The records, since the last repair.
        last_step: The last step.
        samples: The statistics of its samples.

    Attributes:
        losses: The losses.
        learning_rate: The highest learning rate known, of the first epoch and the ends of all;
            `None` without one.
    """

    def __init__(self, run: Run, last_step: int, samples: Sequence[SampleStatistics]) -> None:
        self._run, self._samples = run, samples
        self._weighed = [sample for sample in samples if sample.weight_norm > 0]
        self.losses = Losses.of(run, last_step)
        _, recorded = run.metrics.get("learning_rate", ((), ()))
        rates = [*recorded, run.settings.learning_rate or 0.0]
        self.learning_rate = max(filter(math.isfinite, rates), default=0.0) or None

    @cached_property
    def largest(self) -> tuple[int, float]:
        """The step and the largest norm of an update relative to that of the weights.

        `(0, 0.0)` without any. Between two samples, the norm of the weights grew by so much in a
        step, on average: then in one of these steps the update was at least as large. Weights that
        begin at 0 have no size before they have grown: their updates are compared with the last.
        """
        ratios, weighed = [], self._weighed
        begins_at_0 = bool(weighed) and weighed[0] is not self._samples[0]
        for sample in weighed:
            if not math.isnan(sample.update_ratio):
                grown = max(sample.weight_norm, weighed[-1].weight_norm if begins_at_0 else 0.0)
                ratios.append((sample.step, sample.update_ratio * sample.weight_norm / grown))
        spans = list(itertools.pairwise(weighed))
        if not begins_at_0:  # samples may be too near for what they show together
            spans += [(weighed[0], after) for after in weighed[1:]]
        for before, after in spans:
            steps = after.step - before.step
            if steps > 0:
                growth = after.weight_norm / before.weight_norm - 1.0
                ratios.append((after.step, growth / steps))
        return max([*ratios, (0, 0.0)], key=itemgetter(1))

    @property
    def ratio(self) -> float:
        """The largest norm of an update relative to that of the weights; 0 without any."""
        return self.largest[1]

    @property
    def are_unmeasured(self) -> bool:
        """Whether no update of the weights was measured."""
        return self.ratio == 0.0

    @property
    def first_large_ratio(self) -> float | None:
        """The first ratio that is too large, if the weights have not grown before."""
        for sample in self._weighed:
            if sample.weight_norm > thresholds.GROWN_WEIGHTS * self._weighed[0].weight_norm:
                return None
            if sample.update_ratio > thresholds.LARGE_UPDATE:
                return sample.update_ratio
        return None

    @cached_property
    def estimate(self) -> float:
        """The norm of the next update relative to that of the weights; 0 if it is not known.

        Of SGD, which multiplies gradients by the learning rate: from the last gradients in float32.
        Momentum makes later ones larger.
        """
        settings = self._run.settings
        is_known = settings.optimizer == "SGD" and not settings.clips
        if not (is_known and self._weighed and self._run.references):
            return 0.0
        norm = self._run.references[-1].total_norm / self._weighed[-1].weight_norm
        ratio = (settings.learning_rate or 0.0) * norm
        return float(ratio) if math.isfinite(ratio) else 0.0

    def may_diverge(self, float32_loss: float | None) -> bool:
        """Whether updates are so large, or a loss so high in float32 too, as in a divergence."""
        loss = min(self.losses.highest, abs(float32_loss or 0.0))
        if loss > self.losses.exploded or self.ratio > thresholds.DIVERGING_UPDATE:
            return True
        return self.estimate > thresholds.DIVERGING_ESTIMATE
