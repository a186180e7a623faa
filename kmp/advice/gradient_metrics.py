"""Metrics of the sampled gradients of a run: how much of them float16 loses."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from operator import itemgetter

import numpy as np

from kmp.advice.loss_scale_sweep import WhatIf, exponent_index, largest_usable_scale, sweep, unscaled_exponents
from kmp.advice.sample_statistics import SampleStatistics, statistics, usable
from kmp.records import FIRST_EXPONENT, ExponentHistogram, Run
from kmp.utils import FLOAT16


class GradientMetrics:
    """Computes metrics from the samples of a run.

    Args:
        run: The run.
        samples: The statistics of its samples.
        scale: The loss scale in use; NaN if it is unknown.
    """

    def __init__(self, run: Run, samples: Sequence[SampleStatistics], scale: float) -> None:
        self.samples = samples
        self.references = statistics(run, "reference")
        self._run = run
        self._scale = scale

    @cached_property
    def lost_updates(self) -> tuple[float, list[str]]:
        """Share of the weights with a nonzero gradient that an update did not change, and the variables that lost most.

        Of the samples that measured an update; variables that lost more than half come with the largest first.
        """
        nonzero: Counter[str] = Counter()
        unchanged: Counter[str] = Counter()
        for sample in self._run.samples:
            if not sample.has_update or not sample.histogram.is_finite:
                continue
            count = sample.elements - sample.zeros
            nonzero.update(dict(zip(sample.names, count.tolist(), strict=True)))
            lost = np.maximum(count - sample.updates, 0)
            unchanged.update(dict(zip(sample.names, lost.tolist(), strict=True)))
        shares = {name: unchanged[name] / count for name, count in nonzero.items() if count}
        most = sorted((name for name, share in shares.items() if share > 0.5), key=shares.__getitem__, reverse=True)
        return sum(unchanged.values()) / max(1, sum(nonzero.values())), most

    def share_between(self, low: int, high: int) -> float:
        """Returns the share of nonzero elements of the unscaled gradients from 2^`low` to below 2^`high`."""
        counts = unscaled_exponents(self.finite_samples)
        total = counts.sum()
        return float(counts[exponent_index(low) : exponent_index(high)].sum() / total) if total else 0.0

    @cached_property
    def curve(self) -> WhatIf | None:
        """Underflow and overflow at other loss scales, or `None` without a finite sample."""
        return sweep(self.samples, self.references, largest_usable_scale(self._run))

    @cached_property
    def finite_samples(self) -> list[SampleStatistics]:
        """The samples without NaN and Inf, restricted to variables whose layers compute in 16 bits."""
        return usable(self.samples)

    @cached_property
    def usable_samples(self) -> list[SampleStatistics]:
        """The finite samples taken at the newest one's loss scale or above.

        Lower scales flushed elements to zero that the newest scale preserves.
        """
        return [sample for sample in self.finite_samples if sample.loss_scale >= self.finite_samples[-1].loss_scale]

    @cached_property
    def subnormal_share(self) -> float:
        """Share of nonzero gradient elements below float16's normal range, at the loss scale in use."""
        nonzero = sum(int(sample.histogram.by_exponent.sum()) for sample in self.usable_samples)
        subnormal = sum(
            _below_normal(sample.histogram, round(math.log2(self._scale / sample.loss_scale)))
            for sample in self.usable_samples
        )
        return subnormal / nonzero if nonzero else 0.0

    @cached_property
    def underflow_share(self) -> float:
        """Share of all gradient elements that are nonzero and would round to zero at the loss scale in use."""
        assert self.curve is not None
        scales = self.curve.log2_scales
        return self.curve.at(float(np.clip(math.log2(self._scale), scales[0], scales[-1])))["underflow"]

    @cached_property
    def underflows(self) -> dict[str, int]:
        """Number of finite samples in which each variable underflowed. Zeros are left out.

        A variable underflowed if more than 5 % of its gradient's nonzero elements were subnormal in float16 or smaller,
        or if all elements were zero and a variable nearer the loss underflowed.
        """
        return dict(Counter(name for names in self._underflowed for name in names))

    @cached_property
    def underflow_origins(self) -> dict[str, int]:
        """Number of finite samples in which each variable was the underflow origin.

        That is the variable nearest the loss that underflowed: gradients flushed there stay zero further back.
        """
        return dict(Counter(names[-1] for names in self._underflowed if names))

    @cached_property
    def _underflowed(self) -> list[list[str]]:
        return [sample.underflowed for sample in self.finite_samples]

    @cached_property
    def excess_zeros(self) -> float | None:
        """Share of zeros in addition to those of the float32 reference, or `None` without a reference."""
        references = usable(self.references)
        if not references or not self.finite_samples:
            return None
        return max(0.0, _zero_share(self.usable_samples) - _zero_share(references))

    @cached_property
    def zero_share(self) -> float:
        """Share of sampled gradient elements that are exactly zero, at the loss scale in use."""
        return _zero_share(self.usable_samples)

    @cached_property
    def all_zero_variables(self) -> list[str]:
        """The variables whose gradient was all zero in every usable sample."""
        if not self.usable_samples:
            return []
        newest = self.usable_samples[-1]
        counts = Counter(name for sample in self.usable_samples for name in sample.named(sample.is_all_zero))
        return [name for name in newest.names if counts[name] == len(self.usable_samples)]

    @property
    def variables_without_gradient(self) -> list[str]:
        """The variables that the loss does not depend on."""
        sample = self.finite_samples[-1] if self.finite_samples else None
        return sample.named(sample.totals == 0) if sample else []

    @cached_property
    def leading_all_zero_variables(self) -> list[str]:
        """The `all_zero_variables` before the first other variable, counted from the input.

        Variables without a gradient are ignored.
        """
        names = self.usable_samples[-1].names if self.usable_samples else ()
        with_gradient = {name for sample in self.usable_samples for name in sample.named(sample.totals > 0)}
        all_zero = set(self.all_zero_variables)
        return list(itertools.takewhile(all_zero.__contains__, (name for name in names if name in with_gradient)))

    @cached_property
    def headroom(self) -> float:
        """Bits between the largest sampled gradient at the scale in use and float16's maximum; inf if all are zero."""
        maxima = (sample.largest / sample.loss_scale for sample in self.finite_samples)
        largest = max(maxima, default=math.nan)
        return math.inf if largest == 0 else math.log2(FLOAT16.max / largest / self._scale)

    @property
    def extremes(self) -> tuple[str, str]:
        """The variables with the largest gradient, and with the largest share below float16's normal range.

        Both are of the last finite sample.
        """
        sample = self.finite_samples[-1]
        return sample.names[int(sample.amax.argmax())], sample.names[int(sample.below_normal_shares.argmax())]

    @cached_property
    def update_ratios(self) -> list[tuple[int, float]]:
        """The sampled steps whose update was measured, and the ratio of its norm to that of the weights."""
        ratios = ((sample.step, sample.update_ratio) for sample in self.samples)
        return [(step, ratio) for step, ratio in ratios if not math.isnan(ratio)]

    @cached_property
    def weight_growth(self) -> list[tuple[int, float]]:
        """By how much the norm of the weights grew in a step, relative to the norm: the mean between two samples.

        With the step of the later sample. In one of the steps between the two, the update was at least as large.
        """
        measured = [sample for sample in self.samples if sample.weight_norm > 0]
        return [
            (after.step, (after.weight_norm / before.weight_norm - 1.0) / (after.step - before.step))
            for before, after in itertools.pairwise(measured)
            if after.step > before.step
        ]

    @property
    def update_ratio(self) -> tuple[int, float]:
        """The largest of `update_ratios` and `weight_growth`, with its step; `(0, 0.0)` without any."""
        return max(*self.update_ratios, *self.weight_growth, (0, 0.0), (0, 0.0), key=itemgetter(1))


def _below_normal(histogram: ExponentHistogram, shift: int) -> int:
    """Returns the number of nonzero elements below float16's normal range after multiplying by 2^`shift`."""
    stop = FLOAT16.min_exponent - shift - FIRST_EXPONENT
    return int(histogram.by_exponent[: max(0, stop)].sum())


def _zero_share(samples: list[SampleStatistics]) -> float:
    zeros = sum(sample.histogram.zeros for sample in samples)
    return zeros / max(1, sum(sample.histogram.total for sample in samples))
