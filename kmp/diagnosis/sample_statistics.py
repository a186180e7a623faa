"""Statistics of sampled gradients, without the 280 counts of each variable.

A run may have thousands of samples.
"""

import itertools
import math
from collections.abc import Iterable, Set
from functools import cached_property

import numpy as np

from kmp.diagnosis import thresholds
from kmp.records import BIN_COUNT, ExponentHistogram, GradientSample, Run
from kmp.records.exponent_histogram import FIRST_EXPONENT, INF_BIN, ZERO_BIN
from kmp.utils.float_formats import FLOAT16

_FIRST_NORMAL_BIN = ZERO_BIN + 1 + FLOAT16.min_exponent - FIRST_EXPONENT


class SampleStatistics:
    """Statistics of one sample, of the variables whose layers compute in 16 bits.

    Arrays have one element per variable, in the order from the input to the loss.
    """

    def __init__(self, sample: GradientSample, excluded: Set[str]) -> None:
        own = sample.without(excluded)
        own = own if len(own) else sample
        self.step, self.loss_scale, self.names = sample.step, sample.loss_scale, own.names
        # Those of all variables together, by bin; a histogram with all bins is many times larger.
        self.bins, self.counts = own.bins, own.bin_counts.sum(axis=0, dtype=np.int64)
        self._first, self._end = self.bins.searchsorted((ZERO_BIN + 1, INF_BIN)).tolist()
        self.is_finite = own.is_finite
        self.total, self.zero_count = int(self.counts.sum()), int(self.counts[: self._first].sum())
        self.amax, self.totals, self.zeros = own.amax, own.elements, own.zeros
        # Of the nonzero elements.
        nonzero = np.maximum(1, self.totals - self.zeros)
        self.small_shares = own.between(ZERO_BIN + 1, _FIRST_NORMAL_BIN) / nonzero
        self.total_norm = sample.total_norm  # of the gradients of all variables
        # Norms of all variables: 0 if they were not measured.
        self.weight_norm = _measured_norm(sample.weight_norm)
        update_norm = _measured_norm(sample.update_norm)
        self.update_ratio = update_norm / self.weight_norm if self.weight_norm else math.nan

    @property
    def is_all_zero(self) -> np.ndarray:
        """Whether all elements of a variable are zero; without a gradient it has none."""
        return (self.totals > 0) & (self.zeros == self.totals)

    @cached_property
    def largest(self) -> float:
        """The largest magnitude without the loss scale; 0 without one.

        It is in the range of the largest exponent that was counted. A device that flushes subnormal
        numbers to zero may report an `amax` of 0 for nonzero gradients.
        """
        if self._first == self._end:
            return 0.0
        lowest = 2.0 ** (int(self.bins[self._end - 1]) - ZERO_BIN - 1 + FIRST_EXPONENT)
        amax = float(np.fmax.reduce(self.amax, initial=lowest))
        return min(amax, 2 * lowest) / self.loss_scale

    @cached_property
    def underflowed(self) -> list[str]:
        """The variables that underflowed.

        More than 5 % of their nonzero elements are below float16's normal range. A variable whose
        elements are all zero underflowed too if one nearer the loss did.
        """
        has_small = self.small_shares > thresholds.MANY_FLUSHED
        is_behind_small = np.logical_or.accumulate(has_small[::-1])[::-1]
        return self.named(has_small | (self.is_all_zero & is_behind_small))

    def named(self, is_selected: np.ndarray) -> list[str]:
        """Returns the names of the variables for which a bool array is true."""
        return list(itertools.compress(self.names, is_selected))


def _measured_norm(norms: np.ndarray) -> float:
    """Returns the norm of all variables whose norm was measured; 0 without one."""
    measured = norms[~np.isnan(norms)]
    return math.sqrt(float(measured @ measured))


def statistics(run: Run) -> tuple[list[SampleStatistics], list[SampleStatistics]]:
    """Returns the statistics of a run's samples and of its references.

    Without the variables of float32 layers. float16 does not affect these. If all layers compute in
    float32, all variables are kept: the result then shows what float16 would lose.
    """
    excluded = frozenset(run.settings.float32_variables)
    samples = [SampleStatistics(each, excluded) for each in run.samples]
    references = [SampleStatistics(each, excluded) for each in run.references]
    return samples, references


def usable(samples: Iterable[SampleStatistics]) -> list[SampleStatistics]:
    """Returns the samples that have elements and no NaN or Inf."""
    return [sample for sample in samples if sample.is_finite and sample.total > 0]


def unscaled_counts(samples: Iterable[SampleStatistics]) -> np.ndarray:
    """Returns the numbers of nonzero elements of all samples by exponent, float64.

    The exponents are those without the loss scale.
    """
    by_scale: dict[float, np.ndarray] = {}
    for sample in samples:
        if sample.loss_scale not in by_scale:
            by_scale[sample.loss_scale] = np.zeros(BIN_COUNT, np.int64)
        by_scale[sample.loss_scale][sample.bins] += sample.counts
    counts = np.zeros(INF_BIN - ZERO_BIN - 1)
    for scale, summed in by_scale.items():
        counts += ExponentHistogram(summed, 0, scale).unscaled.by_exponent
    return counts


def counts_below(counts: np.ndarray, exponents: np.ndarray | int) -> np.ndarray:
    """Returns the numbers of elements below 2^k, for each k of `exponents`."""
    cumulative = np.cumsum(np.append(0, counts))
    return cumulative[np.clip(np.asarray(exponents) - FIRST_EXPONENT, 0, counts.size)]
