"""Metrics of the sampled gradients of a run: how much of them float16 loses."""

import itertools
import math
from collections import Counter
from functools import cached_property
from operator import itemgetter

import numpy as np

from kmp.advice.loss_scale_sweep import WhatIf, sweep
from kmp.advice.sample_statistics import counts_below, statistics, unscaled_counts, usable
from kmp.records import Run
from kmp.utils import FLOAT16


class GradientMetrics:
    """Metrics of the samples of a run, at the loss scale in use; that is NaN if it is unknown."""

    def __init__(self, run: Run, scale: float) -> None:
        self._run, self._scale = run, scale
        self.samples, self._references = statistics(run)
        self.finite_samples = usable(self.samples)
        # Those at the newest loss scale or above: lower scales flushed elements to zero that the newest preserves.
        newest = self.finite_samples[-1].loss_scale if self.finite_samples else 0.0
        self.usable_samples = [sample for sample in self.finite_samples if sample.loss_scale >= newest]

    @cached_property
    def curve(self) -> WhatIf | None:
        """Underflow and overflow at other loss scales, or `None` without a finite sample."""
        return sweep(self._run, self.samples, self._references)

    @cached_property
    def subnormal_share(self) -> float:
        """Share of nonzero gradient elements below float16's normal range."""
        counts = unscaled_counts(self.usable_samples)
        subnormal = counts_below(counts, FLOAT16.min_exponent - round(math.log2(self._scale))) if counts.any() else 0.0
        return float(subnormal / max(1.0, counts.sum()))

    @cached_property
    def underflow_share(self) -> float:
        """Share of all gradient elements that are nonzero and would round to zero."""
        assert self.curve is not None
        scales = self.curve.log2_scales
        return self.curve.at(float(np.clip(math.log2(self._scale), scales[0], scales[-1])))["underflow"]

    @cached_property
    def _underflowed(self) -> list[list[str]]:
        return [sample.underflowed for sample in self.finite_samples]

    @cached_property
    def underflows(self) -> dict[str, int]:
        """Number of finite samples in which each variable underflowed, see `SampleStatistics.underflowed`."""
        return dict(Counter(itertools.chain.from_iterable(self._underflowed)))

    @cached_property
    def underflow_origins(self) -> dict[str, int]:
        """Number of finite samples in which each variable was the underflow origin.

        That is the variable nearest the loss that underflowed: gradients flushed there stay zero further back.
        """
        return dict(Counter(names[-1] for names in self._underflowed if names))

    @cached_property
    def zero_share(self) -> float:
        """Share of sampled gradient elements that are exactly zero."""
        zeros = sum(sample.histogram.zeros for sample in self.usable_samples)
        return zeros / max(1, sum(sample.histogram.total for sample in self.usable_samples))

    @cached_property
    def all_zero_variables(self) -> list[str]:
        """The variables whose gradient was all zero in every usable sample."""
        counts = Counter(name for sample in self.usable_samples for name in sample.all_zero)
        newest = self.usable_samples[-1].names if self.usable_samples else ()
        return [name for name in newest if counts[name] == len(self.usable_samples)]

    @cached_property
    def headroom(self) -> float:
        """Bits between the largest sampled gradient and float16's maximum; inf if all gradients are zero."""
        largest = max((sample.largest for sample in self.finite_samples), default=math.nan)
        return math.inf if largest == 0 else math.log2(FLOAT16.max / largest / self._scale)

    @cached_property
    def update_ratio(self) -> tuple[int, float]:
        """The largest norm of an update relative to that of the weights, with its step; `(0, 0.0)` without any.

        Between two samples, the norm of the weights grew by so much in a step, on average: then in one of these steps
        the update was at least as large.
        """
        ratios = [(sample.step, sample.update_ratio) for sample in self.samples if not math.isnan(sample.update_ratio)]
        weighed = [sample for sample in self.samples if sample.weight_norm > 0]
        growth = [
            (after.step, (after.weight_norm / before.weight_norm - 1.0) / (after.step - before.step))
            for before, after in itertools.pairwise(weighed)
            if after.step > before.step
        ]
        return max([*ratios, *growth, (0, 0.0)], key=itemgetter(1))
