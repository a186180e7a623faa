"""The numbers of a run that say whether float16 costs it anything."""

import itertools
import math
from collections import Counter
from functools import cached_property
from typing import Any

import numpy as np

from kmp.advice.loss_scale_sweep import WhatIf, finite, narrow, what_if
from kmp.records import BATCH_PARTS, FIRST_EXPONENT, ExponentHistogram, GradientSample, Run
from kmp.utils import FLOAT16

FUTILE_IN_A_ROW = 12
_UNDERFLOWED = 0.05


class RunMetrics:
    """What a run's readings amount to.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.samples = run.samples
        self.settings = run.settings
        self.steps = max((row["step"] for row in run.rows), default=0)
        self.overflows = int(run.last("overflow_count") or 0)
        self.nonfinite_losses = int(run.last("nonfinite_loss_count") or 0)
        self.in_backward = self.overflows - self.nonfinite_losses
        self.in_a_row = int(run.last("overflows_in_a_row") or 0)
        # Older logs lack it: then all of them may have been the last.
        self.losses_in_a_row = int(run.last("nonfinite_losses_in_a_row", self.nonfinite_losses) or 0)
        self.overflow_origins: dict[str, int] = run.last("overflow_origins_by_variable") or {}
        known = [*(sample.loss_scale for sample in self.samples[-1:]), *run.series("loss_scale")[1]]
        self.scale = float(next((scale for scale in reversed(known) if math.isfinite(scale)), math.nan))

    @property
    def is_fixed(self) -> bool:
        """Whether the loss scale never moves."""
        return bool(self.settings.get("rule") == "FixedScale")

    @property
    def dtypes(self) -> str:
        """The dtypes the model computed in, in words."""
        return " and ".join(self.settings.get("compute_dtypes", ["an unknown dtype"]))

    @property
    def is_float16(self) -> bool:
        """Whether it computed in float16, as far as is known."""
        return FLOAT16.name in self.settings.get("compute_dtypes", [FLOAT16.name])

    def setting(self, name: str, default: Any) -> Any:
        """Returns a setting of the loss scale's rule."""
        return self.settings.get(name, default)

    @cached_property
    def curve(self) -> WhatIf | None:
        """What other scales would do, or `None` without a finite sample."""
        try:
            return what_if(self.run)
        except ValueError:
            return None

    @cached_property
    def finite(self) -> list[GradientSample]:
        """The samples without inf and nan, of the variables that float16 can take something from."""
        return finite(narrow(self.run, self.samples))

    @cached_property
    def telling(self) -> list[GradientSample]:
        """The finite samples at the scale of the last one or above: lower scales flushed to zero what it keeps."""
        return [sample for sample in self.finite if sample.loss_scale >= self.finite[-1].loss_scale]

    @cached_property
    def subnormal(self) -> float:
        """The share of the nonzero gradient elements below float16's normal range, at the loss scale in use."""
        nonzero = sum(int(sample.histogram.by_exponent.sum()) for sample in self.telling)
        small = sum(_small(each.histogram, round(math.log2(self.scale / each.loss_scale))) for each in self.telling)
        return small / nonzero if nonzero else 0.0

    @cached_property
    def too_small(self) -> float:
        """The share of all gradient elements that are not zero and would round to zero at the loss scale in use."""
        assert self.curve is not None
        scales = self.curve.log2_scales
        return self.curve.at(float(np.clip(math.log2(self.scale), scales[0], scales[-1])))["underflow"]

    @cached_property
    def underflows(self) -> dict[str, int]:
        """In how many of the finite samples each variable underflowed; zeros left out.

        That is: more than a twentieth of its gradient's nonzero elements were subnormal in float16 or smaller; or all
        were zero, and a variable nearer the loss underflowed.
        """
        return dict(Counter(name for names in self._underflown for name in names))

    @cached_property
    def underflow_origins(self) -> dict[str, int]:
        """In how many it was the one to blame: the nearest to the loss, because what is flushed there stays zero."""
        return dict(Counter(names[-1] for names in self._underflown if names))

    @cached_property
    def _underflown(self) -> list[list[str]]:
        return [_underflown_in(sample) for sample in self.finite]

    @cached_property
    def flushed(self) -> float | None:
        """The share of elements that are zero beyond a float32 reference's, or `None` without one."""
        references = finite(narrow(self.run, self.run.references))
        if not references or not self.finite:
            return None
        return max(0.0, _zero_share(self.telling) - _zero_share(references))

    @cached_property
    def zero_share(self) -> float:
        """The share of sampled gradient elements that are exactly zero, at the loss scale in use."""
        return _zero_share(self.telling)

    @cached_property
    def all_zero(self) -> list[str]:
        """The variables whose gradients were zero at the loss scale in use, all elements in all samples."""
        names = self.telling[-1].names if self.telling else ()
        return [name for name in names if all(_is_zero(sample, name) for sample in self.telling)]

    @cached_property
    def zero_from_the_input_on(self) -> list[str]:
        """Those of `all_zero` that come before any other, from the input on; what got no gradient is passed by."""
        names = self.telling[-1].names if self.telling else ()
        known = [name for name in names if any(name in sample and sample[name].total for sample in self.telling)]
        return list(itertools.takewhile(lambda name: name in self.all_zero, known))

    @cached_property
    def headroom(self) -> float:
        """Bits between the largest sampled gradient, at the scale in use, and float16's end; inf if all are zero."""
        largest = max((float(np.max(sample.amax)) / sample.loss_scale for sample in self.finite), default=math.nan)
        return math.inf if largest == 0 else math.log2(FLOAT16.max / largest / self.scale)

    @property
    def widest_apart(self) -> tuple[str, str]:
        """The variable with the largest gradient in the last finite sample, and that with the most small ones."""
        sample = self.finite[-1]
        largest = sample.names[int(sample.amax.argmax())]

        def small(name: str) -> float:
            return _small(sample[name]) / max(1, sample[name].total - sample[name].zeros)

        return largest, max(sample.names, key=small)

    @cached_property
    def first_loss(self) -> float:
        """The first loss that was read and finite; nan without one."""
        return next((value for value in self._losses if math.isfinite(value)), math.nan)

    @cached_property
    def highest_loss(self) -> float:
        """The highest loss in magnitude since the first reading, of those that were finite; nan without one."""
        counted = self.run.series("highest_loss")[1]
        grown = [float(value) for value in counted[counted > counted[0]]] if counted.size else []
        return max((*grown, *(abs(value) for value in self._losses if math.isfinite(value))), default=math.nan)

    @cached_property
    def last_loss(self) -> float:
        """The magnitude of the last loss that was finite; nan without one."""
        return next((abs(value) for value in reversed(self._losses) if math.isfinite(value)), math.nan)

    @property
    def ends_nonfinite(self) -> bool:
        """Whether the run ends in a streak of skipped steps with losses that were not finite, after others."""
        return FUTILE_IN_A_ROW <= self.in_a_row <= self.losses_in_a_row and self.in_a_row < self.steps

    @cached_property
    def update_ratio(self) -> tuple[int, float]:
        """The sampled step whose update was the largest, by norm, as a part of all weights; and that part."""
        ratios = [(sample.step, _update_ratio(sample)) for sample in self.samples]
        return max((pair for pair in ratios if not math.isnan(pair[1])), key=lambda pair: pair[1], default=(0, 0.0))

    @cached_property
    def at_start(self) -> tuple[int, int, float]:
        """Overflows of the backward pass until the first reading after a clean step; its step; the loss scale then."""
        table = self.run.table()
        fields = {"overflows_in_a_row", "loss_scale", "overflow_count"}
        if not table.size or table["step"][0] > 1 or not fields <= set(table.dtype.names or ()):
            return 0, 0, self.scale
        known = table[~np.isnan(table["overflows_in_a_row"]) & ~np.isnan(table["loss_scale"])]
        clean = known[known["overflows_in_a_row"] == 0]
        if not clean.size:
            return 0, 0, self.scale
        losses = clean["nonfinite_loss_count"][0] if "nonfinite_loss_count" in (table.dtype.names or ()) else 0
        return int(clean["overflow_count"][0] - losses), int(clean["step"][0]), float(clean["loss_scale"][0])

    @property
    def seen_first(self) -> str | None:
        """What a forward probe found first, the last time."""
        return self.run.last("nonfinite_activation")

    @property
    def is_in_data(self) -> bool:
        """Whether a forward probe found the batch itself to be inf or nan."""
        return self.seen_first in BATCH_PARTS

    @property
    def main_overflow_origin(self) -> tuple[str, float]:
        """The variable most often to blame where the loss was finite, and its share; `("", 0.0)` if none was."""
        if not self.overflow_origins:
            return "", 0.0
        path = max(self.overflow_origins, key=self.overflow_origins.__getitem__)
        return path, self.overflow_origins[path] / sum(self.overflow_origins.values())

    @property
    def _losses(self) -> np.ndarray:
        return self.run.series("last_loss")[1]


def _underflown_in(sample: GradientSample) -> list[str]:
    found: list[str] = []
    for name in reversed(sample.names):
        histogram = sample[name]
        nonzero = histogram.total - histogram.zeros
        is_flushed = histogram.total > 0 and not nonzero and bool(found)
        if is_flushed or _small(histogram) > _UNDERFLOWED * nonzero:
            found.insert(0, name)
    return found


def _small(histogram: ExponentHistogram, bits: int = 0) -> int:
    """Returns how many elements, were they 2^`bits` times as large, are not zero and below float16's normal range."""
    until = FLOAT16.min_exponent - bits - FIRST_EXPONENT
    return int(histogram.by_exponent[: max(0, until)].sum())


def _is_zero(sample: GradientSample, name: str) -> bool:
    return name in sample and sample[name].total > 0 and sample[name].zeros == sample[name].total


def _zero_share(samples: list[GradientSample]) -> float:
    return sum(s.histogram.zeros for s in samples) / max(1, sum(s.histogram.total for s in samples))


def _update_ratio(sample: GradientSample) -> float:
    weights, updates = np.nansum(sample.weight_norm**2), np.nansum(sample.update_norm**2)
    return math.sqrt(updates / weights) if weights else math.nan
