"""Metrics of a run from which the effect of float16 is diagnosed."""

import itertools
import math
from collections import Counter
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np

from kmp.advice.loss_scale_sweep import WhatIf, largest_usable_scale, sweep
from kmp.advice.sample_statistics import SampleStatistics, statistics, usable
from kmp.records import BATCH_PARTS, FIRST_EXPONENT, ZERO_BIN, ExponentHistogram, Replay, Run, iterate_samples, layer_of
from kmp.utils import FLOAT16

STUCK_AFTER = 12  # consecutive skipped steps
_MOST_FLUSHED = 0.5
_LAST_LOSSES = 5


class RunMetrics:
    """Computes metrics from the records of a run.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.samples = statistics(run)
        self.references = statistics(run, "reference")
        self.replays = [replay for _, replay in run.replays]
        self.settings = run.settings
        self.steps = max((row["step"] for row in run.rows), default=0)
        self.overflows = int(run.last("overflow_count") or 0)
        self.nonfinite_losses = int(run.last("nonfinite_loss_count") or 0)
        self.gradient_overflows = self.overflows - self.nonfinite_losses
        self.consecutive_overflows = int(run.last("overflows_in_a_row") or 0)
        # Older logs lack the key. All non-finite losses may then have been consecutive.
        self.consecutive_nonfinite_losses = int(run.last("nonfinite_losses_in_a_row", self.nonfinite_losses) or 0)
        self.unscaled_steps = int(run.last("unscaled_steps") or 0)
        origins = run.last("overflow_origins_by_variable") or {}
        self.overflow_origins: dict[str, int] = {path: count for path, count in origins.items() if count}
        scales = [*(sample.loss_scale for sample in self.samples[-1:]), *run.series("loss_scale")[1]]
        self.scale = float(next((scale for scale in reversed(scales) if math.isfinite(scale)), math.nan))

    @property
    def is_fixed(self) -> bool:
        """Whether the loss scale is fixed."""
        return bool(self.settings.get("rule") == "FixedScale")

    @property
    def is_unscaled(self) -> bool:
        """Whether most steps had gradients of a loss that was not multiplied by the loss scale."""
        return 2 * self.unscaled_steps > self.steps

    @property
    def dtypes(self) -> str:
        """The model's compute dtypes, joined by "and"."""
        return " and ".join(self.settings.get("compute_dtypes", ["an unknown dtype"]))

    @property
    def is_float16(self) -> bool:
        """Whether the model computed in float16. True if the dtypes are unknown."""
        return FLOAT16.name in self.settings.get("compute_dtypes", [FLOAT16.name])

    def setting(self, name: str, default: Any) -> Any:
        """Returns a setting of the run, such as `"growth_interval"`."""
        return self.settings.get(name, default)

    def class_of(self, layer: str) -> str:
        """Returns the class of the layer with this path; `""` if it is unknown."""
        return self.settings.get("layers", {}).get(layer, "")

    def layer_of(self, variable: str) -> str:
        """Returns the path of the layer with this variable that a program creates: an RNN, not its cell."""
        layers, path = self.settings.get("layers", {}), layer_of(variable)
        parents = itertools.accumulate(path.split("/"), lambda parent, name: f"{parent}/{name}")
        return next((parent for parent in reversed(list(parents)) if parent in layers), path)

    @property
    def forward_replay(self) -> Replay | None:
        """The last replay whose loss was not finite in the precision of the model."""
        return next((replay for replay in reversed(self.replays) if replay.loss is None), None)

    @property
    def backward_replay(self) -> Replay | None:
        """The last replay whose loss was finite in the precision of the model, and whose gradients were not."""
        failed = (replay for replay in reversed(self.replays) if not replay.is_finite)
        return next((replay for replay in failed if replay.loss is not None), None)

    @property
    def clean_replay(self) -> Replay | None:
        """The last replay whose loss and gradients were finite."""
        return next((replay for replay in reversed(self.replays) if replay.is_finite), None)

    @property
    def flushed(self) -> dict[str, float]:
        """The share of a variable's gradient that float16 flushed to zero in the last clean replay, by path.

        Empty if the loss scale has grown since, because then it flushes less.
        """
        replay = self.clean_replay
        return {} if replay is None or replay.loss_scale < self.scale else replay.flushed

    @cached_property
    def flushed_layers(self) -> list[str]:
        """The layers of which each variable's gradient was flushed to zero for the most part, in the last clean replay.

        Variables whose gradient is zero in float32 too are ignored.
        """
        if self.clean_replay is None or not self.finite_samples:
            return []
        names = [name for name in self.finite_samples[-1].names if name not in self.clean_replay.zero]
        alive = {self.layer_of(name) for name in names if self.flushed.get(name, 0.0) <= _MOST_FLUSHED}
        return [layer for layer in dict.fromkeys(map(self.layer_of, names)) if layer not in alive]

    @cached_property
    def lost_updates(self) -> tuple[float, list[str]]:
        """Share of the weights with a nonzero gradient that an update did not change, and the variables that lost most.

        Of the samples that measured an update; variables that lost more than half come with the largest first.
        """
        nonzero: Counter[str] = Counter()
        unchanged: Counter[str] = Counter()
        for sample in iterate_samples(self.run.rows):
            if np.isnan(sample.update_norm).all() or not sample.histogram.is_finite:
                continue
            count = sample.counts.sum(1) - sample.counts[:, ZERO_BIN]
            nonzero.update(dict(zip(sample.names, count.tolist(), strict=True)))
            lost = np.maximum(count - sample.updates, 0)
            unchanged.update(dict(zip(sample.names, lost.tolist(), strict=True)))
        shares = {name: unchanged[name] / count for name, count in nonzero.items() if count}
        most = sorted((name for name, share in shares.items() if share > 0.5), key=shares.__getitem__, reverse=True)
        return sum(unchanged.values()) / max(1, sum(nonzero.values())), most

    @cached_property
    def curve(self) -> WhatIf | None:
        """Underflow and overflow at other loss scales, or `None` without a finite sample."""
        return sweep(self.samples, self.references, largest_usable_scale(self.run))

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
            _below_normal(sample.histogram, round(math.log2(self.scale / sample.loss_scale)))
            for sample in self.usable_samples
        )
        return subnormal / nonzero if nonzero else 0.0

    @cached_property
    def underflow_share(self) -> float:
        """Share of all gradient elements that are nonzero and would round to zero at the loss scale in use."""
        assert self.curve is not None
        scales = self.curve.log2_scales
        return self.curve.at(float(np.clip(math.log2(self.scale), scales[0], scales[-1])))["underflow"]

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
    def has_reference(self) -> bool:
        """Whether gradients in float32 distinguish flushed elements from those that are truly zero."""
        return self.clean_replay is not None or self.excess_zeros is not None

    @property
    def unexplained_zero_variables(self) -> list[str]:
        """The `all_zero_variables` that the last clean replay did not show to be zero in float32 too."""
        explained = self.clean_replay.zero if self.clean_replay else ()
        return [name for name in self.all_zero_variables if name not in explained]

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
        return math.inf if largest == 0 else math.log2(FLOAT16.max / largest / self.scale)

    @property
    def extremes(self) -> tuple[str, str]:
        """The variables with the largest gradient, and with the largest share below float16's normal range.

        Both are of the last finite sample.
        """
        sample = self.finite_samples[-1]
        return sample.names[int(sample.amax.argmax())], sample.names[int(sample.below_normal_shares.argmax())]

    @cached_property
    def first_loss(self) -> float:
        """The first finite recorded loss; NaN if there is none."""
        return next((value for value in self._losses if math.isfinite(value)), math.nan)

    @cached_property
    def highest_loss(self) -> float:
        """The highest magnitude of a finite loss since the first record; NaN if there is none."""
        recorded = self.run.series("highest_loss")[1]
        increased = [float(value) for value in recorded[recorded > recorded[0]]] if recorded.size else []
        return max((*increased, *(abs(value) for value in self._losses if math.isfinite(value))), default=math.nan)

    @cached_property
    def last_loss(self) -> float:
        """The median of the last finite losses, because that of one batch may be noisy; NaN if there is none."""
        losses = [value for value in self._losses if math.isfinite(value)]
        return float(np.median(losses[-_LAST_LOSSES:])) if losses else math.nan

    @property
    def ends_nonfinite(self) -> bool:
        """Whether the run ends in a streak of non-finite losses, after steps that were not part of it."""
        streak = self.consecutive_overflows
        return STUCK_AFTER <= streak <= self.consecutive_nonfinite_losses and streak < self.steps

    @cached_property
    def update_ratio(self) -> tuple[int, float]:
        """The sampled step with the largest ratio of update norm to weight norm, and that ratio."""
        ratios = [(sample.step, sample.update_ratio) for sample in self.samples]
        return max((pair for pair in ratios if not math.isnan(pair[1])), key=lambda pair: pair[1], default=(0, 0.0))

    @cached_property
    def startup_overflows(self) -> tuple[int, int, float]:
        """Gradient overflows until the first record after an applied step; that record's step and loss scale."""
        rows = sorted(self.run.rows, key=itemgetter("step"))
        if not rows or rows[0]["step"] > 1:
            return 0, 0, self.scale
        for step, records in itertools.groupby(rows, key=itemgetter("step")):
            merged = {key: value for record in records for key, value in record.items() if value is not None}
            if merged.get("overflows_in_a_row") == 0 and {"loss_scale", "overflow_count"} <= merged.keys():
                overflows = merged["overflow_count"] - merged.get("nonfinite_loss_count", 0)
                return int(overflows), step, float(merged["loss_scale"])
        return 0, 0, self.scale

    @property
    def nonfinite_tensor(self) -> str | None:
        """The first non-finite tensor that a forward probe last reported."""
        return self.run.last("nonfinite_activation")

    @property
    def is_batch_nonfinite(self) -> bool:
        """Whether a forward probe reported NaN or Inf in the batch itself."""
        return self.nonfinite_tensor in BATCH_PARTS

    @property
    def main_overflow_origin(self) -> tuple[str, float]:
        """The most frequent overflow origin and its share, for steps with a finite loss; `("", 0.0)` if none."""
        if not self.overflow_origins:
            return "", 0.0
        path = max(self.overflow_origins, key=self.overflow_origins.__getitem__)
        return path, self.overflow_origins[path] / sum(self.overflow_origins.values())

    @property
    def _losses(self) -> np.ndarray:
        return self.run.series("last_loss")[1]


def _below_normal(histogram: ExponentHistogram, shift: int) -> int:
    """Returns the number of nonzero elements below float16's normal range after multiplying by 2^`shift`."""
    stop = FLOAT16.min_exponent - shift - FIRST_EXPONENT
    return int(histogram.by_exponent[: max(0, stop)].sum())


def _zero_share(samples: list[SampleStatistics]) -> float:
    zeros = sum(sample.histogram.zeros for sample in samples)
    return zeros / max(1, sum(sample.histogram.total for sample in samples))
