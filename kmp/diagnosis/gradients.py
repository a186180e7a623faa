"""The sizes of a run's gradients, and what float16 loses of them."""

import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from kmp.diagnosis import branches
from kmp.diagnosis.loss_scale_sweep import WhatIf, sweep
from kmp.diagnosis.model_names import ModelNames
from kmp.diagnosis.passes import Passes
from kmp.diagnosis.sample_statistics import counts_below, statistics, unscaled_counts, usable
from kmp.numerics import unit_roundoff
from kmp.records import GradientSample, Replay, Run
from kmp.utils.float_formats import FLOAT16, FLOAT32


class Gradients:
    """The sampled gradients of a run since the last repair, at the loss scale in use.

    Args:
        run: The records.
        all_records: Those with what was before the last repair.
        loss_scale: The loss scale in use; NaN if it is unknown.
        passes: The replays.
        model: The names of the layers.

    Attributes:
        samples: The statistics of all samples.
        finite: Those without NaN and Inf.
        usable: Those of them at the newest loss scale or above: lower scales flushed elements to
            zero that the newest preserves.
    """

    def __init__(
        self, run: Run, all_records: Run, loss_scale: float, passes: Passes, model: ModelNames
    ) -> None:
        self._run, self._all_records, self._model = run, all_records, model
        self._loss_scale = loss_scale
        self._passes, self._clean = passes, passes.clean
        self.samples, self._references = statistics(run)
        self.finite = usable(self.samples)
        newest = self.finite[-1].loss_scale if self.finite else 0.0
        self.usable = [each for each in self.finite if each.loss_scale >= newest]

    # What the samples show.

    @cached_property
    def curve(self) -> WhatIf | None:
        """Underflow and overflow at other loss scales; `None` without a finite sample.

        And in another format than float16, which needs no loss scale.
        """
        if self._run.format is not FLOAT16:
            return None
        return sweep(self._run, self.samples, self._references)

    @cached_property
    def subnormal_share(self) -> float:
        """Share of nonzero gradient elements below float16's normal range."""
        counts = unscaled_counts(self.usable)
        if not counts.any():
            return 0.0
        limit = FLOAT16.min_exponent - round(math.log2(self._loss_scale))
        return float(counts_below(counts, limit) / max(1.0, counts.sum()))

    @cached_property
    def underflow_share(self) -> float:
        """Share of all gradient elements that are nonzero and would round to zero."""
        assert self.curve is not None
        scales = self.curve.log2_scales
        in_use = np.clip(math.log2(self._loss_scale), scales[0], scales[-1])
        return self.curve.at(float(in_use))["underflow"]

    @property
    def lost_norm(self) -> float:
        """Upper bound of the norm of the elements that are too small.

        Relative to the norm of all gradients.
        """
        sample = self.finite[-1]
        elements = self.underflow_share * sample.total
        if not elements:
            return 0.0
        if not sample.largest:
            return math.inf
        largest_lost = 2.0**FLOAT16.flush_exponent / self._loss_scale
        return math.sqrt(elements) * largest_lost / sample.largest

    @cached_property
    def headroom(self) -> float:
        """Bits between the largest sampled gradient and float16's maximum.

        Inf if all gradients are zero.
        """
        largest = max((sample.largest for sample in self.finite), default=math.nan)
        return math.inf if largest == 0 else math.log2(FLOAT16.max / largest / self._loss_scale)

    @cached_property
    def underflows(self) -> dict[str, int]:
        """Number of finite samples in which each variable underflowed.

        See `SampleStatistics.underflowed`.
        """
        return dict(Counter(name for sample in self.finite for name in sample.underflowed))

    @cached_property
    def underflow_origins(self) -> dict[str, int]:
        """Number of finite samples in which each variable was the underflow origin.

        That is the variable nearest the loss that underflowed: gradients flushed there stay zero
        further back.
        """
        underflowed = [sample.underflowed for sample in self.finite]
        return dict(Counter(names[-1] for names in underflowed if names))

    # Zeros, which a clean replay tells apart from those of float32.

    @property
    def _zero_in_float32(self) -> set[str]:
        return set(self._clean.gradients.zero) if self._clean else set()

    @cached_property
    def unexplained_zero_share(self) -> float:
        """Share of sampled gradient elements that are exactly zero, and may not be in float32.

        Without those of variables that the last clean replay showed to be zero there too.
        """
        explained = self._zero_in_float32
        zeros = total = 0
        for sample in self.usable:
            is_open = np.array([name not in explained for name in sample.names], bool)
            zeros += int(sample.zeros[is_open].sum())
            total += int(sample.totals[is_open].sum())
        return zeros / max(1, total)

    @cached_property
    def all_zero_variables(self) -> list[str]:
        """The variables whose gradient was all zero in every usable sample."""
        samples = self.usable
        if not samples:
            return []
        counts: Counter[str] = Counter()
        for sample in samples:
            counts.update(sample.named(sample.is_all_zero))
        return [name for name in samples[-1].names if counts[name] == len(samples)]

    @property
    def unexplained_zero_variables(self) -> list[str]:
        """The `all_zero_variables` that may be nonzero in float32."""
        explained = self._zero_in_float32
        return [name for name in self.all_zero_variables if name not in explained]

    # What float16 flushes, as a clean replay shows.

    @cached_property
    def flushed(self) -> dict[str, float]:
        """The share of each gradient that float16 flushed to zero in the last clean replay.

        By the path of the variable. Without the variables whose gradient is zero in float32 too.
        A share is zero if the loss scale has grown since, because then it flushes less. It is also
        zero if all that is flushed is below float32's rounding error in the sums of the layer's
        other variables, as it is where the sums of a bias cancel.
        """
        replay = self._clean
        if replay is None or not self.finite:
            return {}
        shares = {} if replay.loss_scale < self._loss_scale else replay.gradients.flushed
        names = [name for name in self.finite[-1].names if name not in replay.gradients.zero]
        largest_flushed = 2.0**FLOAT16.flush_exponent / replay.loss_scale
        found = dict[str, float]()
        largest = self._largest_by_layer(replay)
        for name in names:
            sizes = largest.get(self._model.layer_of(name), {})
            beside = max((size for other, size in sizes.items() if other != name), default=0.0)
            is_noise = largest_flushed < unit_roundoff(FLOAT32) * beside
            found[name] = 0.0 if is_noise else shares.get(name, 0.0)
        return found

    def _largest_by_layer(self, replay: Replay) -> dict[str, dict[str, float]]:
        """Returns the largest magnitude of each finite gradient in float32, by layer and path.

        As recorded with a replay; empty without a record.
        """
        reference, found = self._reference_of(replay), dict[str, dict[str, float]]()
        if reference is None:
            return found
        for name, amax in zip(reference.names, reference.amax / reference.loss_scale, strict=True):
            if np.isfinite(amax):
                found.setdefault(self._model.layer_of(name), {})[name] = float(amax)
        return found

    @property
    def flushed_share(self) -> float:
        """The mean of these shares over all variables."""
        return sum(self.flushed.values()) / max(1, len(self.finite[-1].names))

    @cached_property
    def flushed_layers(self) -> list[str]:
        """The layers of which each variable's gradient was `flushed` to zero for the most part."""
        return branches.flushed_layers(self.flushed, self._model.layer_of)

    @cached_property
    def flushed_branch(self) -> list[str]:
        """Those of the `flushed_layers` that are part of a branch, while others are kept."""
        next_layers = self._run.settings.next_layers
        return branches.flushed_branch(self.flushed, self._model.layer_of, next_layers)

    def gap_of(self, layers: Sequence[str], replay: Replay) -> branches.Gap | None:
        """Returns how far gradients of these layers are from those of the other 16-bit layers.

        In float32, as recorded with a replay; `None` without a record.
        """
        reference = self._reference_of(replay)
        if not reference:
            return None
        repaired: set[str] = set()
        for earlier in self._all_records.rows:
            repaired.update(earlier.fallback or ())
        branch, others = [], []
        for name in reference.names:
            layer = self._model.layer_of(name)
            if layer in layers:
                branch.append(name)
            elif name not in self._run.settings.float32_variables and layer not in repaired:
                others.append(name)
        return branches.gap_of(reference, branch, others)

    def _reference_of(self, replay: Replay) -> GradientSample | None:
        """Returns the gradients in float32 that were recorded with a replay."""
        row = next((row for row in self._run.rows if row.replay is replay), None)
        return row.reference or None if row else None

    @property
    def can_underflow(self) -> bool:
        """Whether a loss scale decides what the samples lose, and not layers that need float32."""
        return bool(self.finite) and not self._passes.need_float32_layers
