"""Statistics of sampled gradients, without the 280 counts of each variable: a run may have thousands of samples."""

import itertools
import math
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from kmp.records import FIRST_EXPONENT, ZERO_BIN, ExponentHistogram, GradientSample, Run
from kmp.utils import FLOAT16

_UNDERFLOWED = 0.05
_FIRST_NORMAL_BIN = ZERO_BIN + 1 + FLOAT16.min_exponent - FIRST_EXPONENT


@dataclass(frozen=True, eq=False)
class SampleStatistics:
    """Statistics of one sample, of the variables whose layers compute in 16 bits.

    Arrays have one element per variable, in the order from the input to the loss.

    Args:
        step: The sampled training step.
        loss_scale: The loss scale of the gradients.
        names: Paths of the variables.
        histogram: The histogram of these variables together.
        amax: float64, the largest magnitudes.
        totals: int64, numbers of elements.
        zeros: int64, numbers of elements that are exactly zero.
        below_normal: int64, numbers of nonzero elements below float16's normal range.
        update_ratio: Norm of the update of all variables, as a ratio to that of their weights; NaN if not measured.
        weight_norm: Norm of all weights; 0 if not measured.
    """

    step: int
    loss_scale: float
    names: tuple[str, ...]
    histogram: ExponentHistogram
    amax: np.ndarray
    totals: np.ndarray
    zeros: np.ndarray
    below_normal: np.ndarray
    update_ratio: float
    weight_norm: float

    @property
    def is_usable(self) -> bool:
        """Whether the sample has elements, and no NaN or Inf."""
        return self.histogram.is_finite and self.histogram.total > 0

    @property
    def largest(self) -> float:
        """The largest magnitude of a usable sample, in the range of the largest exponent counted; 0 without one.

        A device that flushes subnormal numbers to zero may report an `amax` of 0 for nonzero gradients.
        """
        exponents = self.histogram.exponents[self.histogram.by_exponent > 0]
        if not exponents.size:
            return 0.0
        lowest = 2.0 ** int(exponents[-1])
        return float(np.clip(np.fmax.reduce(self.amax, initial=lowest), lowest, 2 * lowest))

    @property
    def below_normal_shares(self) -> np.ndarray:
        """Shares of the nonzero elements below float16's normal range."""
        return self.below_normal / np.maximum(1, self.totals - self.zeros)

    @property
    def is_all_zero(self) -> np.ndarray:
        """Whether all elements of a variable are zero, and it has some."""
        return (self.totals > 0) & (self.zeros == self.totals)

    @property
    def underflowed(self) -> list[str]:
        """The variables that underflowed: more than 5 % of their nonzero elements are below float16's normal range.

        A variable whose elements are all zero underflowed too if one nearer the loss did.
        """
        has_small = self.below_normal > _UNDERFLOWED * (self.totals - self.zeros)
        is_behind_small = np.logical_or.accumulate(has_small[::-1])[::-1]
        return self.named(has_small | (self.is_all_zero & is_behind_small))

    def named(self, is_selected: np.ndarray) -> list[str]:
        """Returns the names of the variables for which a bool array is true."""
        return [self.names[index] for index in np.flatnonzero(is_selected)]


def statistics(run: Run, key: str = "sample") -> list[SampleStatistics]:
    """Returns the statistics of a run's samples, or of its references, oldest first."""
    float32_variables = frozenset(run.settings.get("float32_variables") or ())
    samples = run.samples if key == "sample" else run.references
    return [statistics_of(sample, float32_variables) for sample in samples]


def statistics_of(sample: GradientSample, float32_variables: AbstractSet[str] = frozenset()) -> SampleStatistics:
    """Returns the statistics of a sample, without the variables of layers that compute in float32.

    float16 does not affect these. If all layers compute in float32, all variables are kept: the result then shows what
    float16 would lose.
    """
    kept = np.array([name not in float32_variables for name in sample.names], bool)
    kept = kept if kept.any() else ~kept
    return SampleStatistics(
        sample.step,
        sample.loss_scale,
        tuple(itertools.compress(sample.names, kept)),
        sample.histogram_of(kept),
        sample.amax[kept],
        sample.elements[kept],
        sample.zeros[kept],
        sample.bin_counts.between(ZERO_BIN + 1, _FIRST_NORMAL_BIN)[kept],
        _update_ratio(sample),
        _total_norm(sample.weight_norm),
    )


def usable(samples: Iterable[SampleStatistics]) -> list[SampleStatistics]:
    """Returns the samples that have elements and no NaN or Inf."""
    return [sample for sample in samples if sample.is_usable]


def _update_ratio(sample: GradientSample) -> float:
    weights, updates = _total_norm(sample.weight_norm), _total_norm(sample.update_norm)
    return updates / weights if weights else math.nan


def _total_norm(norms: np.ndarray) -> float:
    return math.sqrt(np.sum(norms[~np.isnan(norms)] ** 2))
