"""Metrics of a run from which the effect of float16 is diagnosed."""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np

from kmp.diagnosis import soundness, thresholds
from kmp.diagnosis.loss_scale_sweep import WhatIf, sweep
from kmp.diagnosis.sample_statistics import counts_below, statistics, unscaled_counts, usable
from kmp.records import LOSS_FUNCTION, Replay, Run, layer_of
from kmp.utils import FLOAT16, path_and_parents


class RunMetrics:
    """Metrics of the records of a run; after a fallback, of those since the last one.

    Those of gradients are of the samples, at the loss scale in use; that is NaN if it is unknown.
    """

    def __init__(self, run: Run) -> None:
        self.complete_run = run
        self.fallback, run = since_last_fallback(run)
        self.run = run
        self._read_settings(run.settings)
        self._read_replays(run)
        self._read_counts(run)
        # The loss scale in use; NaN if it is unknown.
        scales = [*(sample.loss_scale for sample in run.samples[-1:]), *run.series("loss_scale")[1]]
        self.scale = float(next(filter(math.isfinite, reversed(scales)), math.nan))
        self.samples, self._references = statistics(run)
        self.finite_samples = usable(self.samples)
        # Those at the newest loss scale or above: lower scales flushed elements to zero that the
        # newest preserves.
        newest = self.finite_samples[-1].loss_scale if self.finite_samples else 0.0
        self.usable_samples = [each for each in self.finite_samples if each.loss_scale >= newest]

    def _read_settings(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        # The call that set the loss scale: `kmp.enable` sets what no other call sets.
        self.settings_call: str = settings.get("settings_call", "kmp.enable")
        self.is_fixed: bool = settings.get("rule") == "FixedScale"
        self.min_scale: float = settings.get("min_scale", FLOAT16.smallest_normal)
        dtypes = settings.get("compute_dtypes")
        self.dtypes = " and ".join(dtypes or ["an unknown dtype"])
        self.is_float16: bool = dtypes is None or FLOAT16.name in dtypes
        self.layers: dict[str, str] = settings.get("layers", {})  # the classes, by path

    def _read_replays(self, run: Run) -> None:
        self.replays = [replay for _, replay in run.replays]
        self.comparisons = run.comparisons
        self.last_comparison = self.comparisons[-1][1] if self.comparisons else None
        # The last replay whose loss and gradients were finite, and the last one whose loss was, but
        # not the gradients.
        self.clean_replay = self._last_replay(
            lambda replay: replay.is_finite and not replay.is_forward_only
        )
        self.backward_replay = self._last_replay(
            lambda replay: not replay.is_finite and replay.loss is not None
        )

    def _read_counts(self, run: Run) -> None:
        self.last_step = max((row["step"] for row in self.complete_run.rows), default=0)
        self.skipped_steps: int | None = self.complete_run.last("overflow_count")
        self.steps = self.last_step - (self.fallback["step"] if self.fallback else 0)
        # Of `steps`, those that were skipped; of these, those with a non-finite loss.
        self.overflows = int(run.last("overflow_count") or 0)
        self.nonfinite_losses = int(run.last("nonfinite_loss_count") or 0)
        self.gradient_overflows = self.overflows - self.nonfinite_losses
        self.consecutive_overflows = int(run.last("overflows_in_a_row") or 0)

    def layer_of(self, variable: str) -> str:
        """Returns the path of the layer that a program creates and that has this variable.

        That is an RNN, not its cell.
        """
        return self.created_layer(layer_of(variable))

    def created_layer(self, layer: str) -> str:
        """Returns the path of the layer that a program creates and that is or contains this.

        For a cell of an RNN, that is the RNN.
        """
        return next((each for each in path_and_parents(layer) if each in self.layers), layer)

    def describe(self, layer: str) -> str:
        """Returns what a finding calls a layer: its name, or its path if several have this name."""
        if layer == LOSS_FUNCTION:
            return layer
        if layer == self.settings.get("model"):
            return f"model {layer!r} outside its layers"
        is_ambiguous = [*map(name_of, self.layers)].count(name_of(layer)) > 1 or self.created_layer(
            layer
        ) != layer
        return f"layer {layer if is_ambiguous else name_of(layer)!r}"

    def _last_replay(self, is_wanted: Callable[[Replay], bool]) -> Replay | None:
        return next(filter(is_wanted, reversed(self.replays)), None)

    @cached_property
    def forward_replay(self) -> Replay | None:
        """The last replay whose loss was not finite, or of the forward pass alone.

        Not finite in the precision of the model. If all losses of the training were finite, it has
        to be the last replay with NaN or Inf: a fused kernel of the training may swallow a NaN that
        the replay shows.
        """
        if self.nonfinite_losses:
            failed = self._last_replay(lambda replay: replay.loss is None and not replay.is_finite)
            return failed or self._last_replay(lambda replay: replay.loss is None)
        failed = self._last_replay(lambda replay: not replay.is_finite)
        return failed if failed and failed.loss is None and self.overflows else None

    @cached_property
    def largest_gradient_error(self) -> float | None:
        """The largest error of gradients in all comparisons; `None` without one.

        Of layers that had not converged.
        """
        errors = [each for _, replay in self.comparisons for each in replay.gradient_errors]
        return max(
            (each.error for each in errors if not soundness.has_converged(each)), default=None
        )

    @property
    def is_compared_late(self) -> bool:
        """Whether a comparison was in the second half of the run."""
        return bool(self.comparisons) and 2 * self.comparisons[-1][0] >= self.last_step

    @property
    def agrees_late(self) -> bool:
        """Whether compared gradients agree, also in the second half of the run.

        That is, one comparison was in that half, and all errors are small.
        """
        error = self.largest_gradient_error
        return (
            self.is_compared_late and error is not None and error < thresholds.SMALL_GRADIENT_ERROR
        )

    @cached_property
    def with_harmful_gradients(self) -> list[Replay]:
        """The comparisons with a harmful error of gradients."""
        return [replay for _, replay in self.comparisons if soundness.harmful_gradients(replay)]

    @property
    def needs_float32_layers(self) -> bool:
        """Whether the largest usable loss scale does not remove harmful errors of gradients.

        All comparisons with such errors had them at that scale too.
        """
        harmful = self.with_harmful_gradients
        return bool(harmful) and all(replay.float32_layers for replay in harmful)

    @cached_property
    def curve(self) -> WhatIf | None:
        """Underflow and overflow at other loss scales, or `None` without a finite sample."""
        return sweep(self.run, self.samples, self._references)

    @cached_property
    def subnormal_share(self) -> float:
        """Share of nonzero gradient elements below float16's normal range."""
        counts = unscaled_counts(self.usable_samples)
        subnormal = (
            counts_below(counts, FLOAT16.min_exponent - round(math.log2(self.scale)))
            if counts.any()
            else 0.0
        )
        return float(subnormal / max(1.0, counts.sum()))

    @cached_property
    def underflow_share(self) -> float:
        """Share of all gradient elements that are nonzero and would round to zero."""
        assert self.curve is not None
        scales = self.curve.log2_scales
        return self.curve.at(float(np.clip(math.log2(self.scale), scales[0], scales[-1])))[
            "underflow"
        ]

    @cached_property
    def underflows(self) -> dict[str, int]:
        """Number of finite samples in which each variable underflowed.

        See `SampleStatistics.underflowed`.
        """
        return dict(Counter(name for sample in self.finite_samples for name in sample.underflowed))

    @cached_property
    def underflow_origins(self) -> dict[str, int]:
        """Number of finite samples in which each variable was the underflow origin.

        That is the variable nearest the loss that underflowed: gradients flushed there stay zero
        further back.
        """
        return dict(
            Counter(sample.underflowed[-1] for sample in self.finite_samples if sample.underflowed)
        )

    @cached_property
    def zero_share(self) -> float:
        """Share of sampled gradient elements that are exactly zero."""
        zeros = sum(sample.histogram.zeros for sample in self.usable_samples)
        return zeros / max(1, sum(sample.histogram.total for sample in self.usable_samples))

    @cached_property
    def all_zero_variables(self) -> list[str]:
        """The variables whose gradient was all zero in every usable sample."""
        counts = Counter(
            name for sample in self.usable_samples for name in sample.named(sample.is_all_zero)
        )
        newest = self.usable_samples[-1].names if self.usable_samples else ()
        return [name for name in newest if counts[name] == len(self.usable_samples)]

    @cached_property
    def headroom(self) -> float:
        """Bits between the largest sampled gradient and float16's maximum.

        Inf if all gradients are zero.
        """
        largest = max((sample.largest for sample in self.finite_samples), default=math.nan)
        return math.inf if largest == 0 else math.log2(FLOAT16.max / largest / self.scale)

    @cached_property
    def update_ratio(self) -> tuple[int, float]:
        """The step and the largest norm of an update relative to that of the weights.

        `(0, 0.0)` without any. Between two samples, the norm of the weights grew by so much in a
        step, on average: then in one of these steps the update was at least as large.
        """
        ratios = [
            (sample.step, sample.update_ratio)
            for sample in self.samples
            if not math.isnan(sample.update_ratio)
        ]
        weighed = [sample for sample in self.samples if sample.weight_norm > 0]
        growth = [
            (
                after.step,
                (after.weight_norm / before.weight_norm - 1.0) / (after.step - before.step),
            )
            for before, after in itertools.pairwise(weighed)
            if after.step > before.step
        ]
        return max([*ratios, *growth, (0, 0.0)], key=itemgetter(1))

    @cached_property
    def flushed(self) -> dict[str, float]:
        """The share of each gradient that float16 flushed to zero in the last clean replay.

        By the path of the variable. Without the variables whose gradient is zero in float32 too.
        Zero if the loss scale has grown since, because then it flushes less.
        """
        replay, samples = self.clean_replay, self.finite_samples
        if replay is None or not samples:
            return {}
        shares = {} if replay.loss_scale < self.scale else replay.gradients.flushed
        return {
            name: shares.get(name, 0.0)
            for name in samples[-1].names
            if name not in replay.gradients.zero
        }

    @cached_property
    def flushed_layers(self) -> list[str]:
        """The layers of which each variable's gradient was `flushed` to zero for the most part."""
        alive = {
            self.layer_of(name)
            for name, share in self.flushed.items()
            if share <= thresholds.MOSTLY_FLUSHED
        }
        return [
            layer for layer in dict.fromkeys(map(self.layer_of, self.flushed)) if layer not in alive
        ]

    @cached_property
    def unexplained_zero_variables(self) -> list[str]:
        """The `all_zero_variables` that may be nonzero in float32.

        The last clean replay did not show them to be zero there too.
        """
        explained = set(self.clean_replay.gradients.zero) if self.clean_replay else set()
        return [name for name in self.all_zero_variables if name not in explained]

    @cached_property
    def losses(self) -> tuple[float, float, float]:
        """The first finite loss, the highest magnitude since, and the last; NaN if none.

        The last is the median of a few, because the loss of one batch may be noisy.
        """
        finite = [float(value) for value in self.run.series("last_loss")[1] if math.isfinite(value)]
        recorded = self.run.series("highest_loss")[1]
        increased = (
            [float(value) for value in recorded[recorded > recorded[0]]] if recorded.size else []
        )
        highest = max((*increased, *map(abs, finite)), default=math.nan)
        last = float(np.median(finite[-thresholds.LAST_LOSSES :])) if finite else math.nan
        return next(iter(finite), math.nan), highest, last

    @property
    def ends_nonfinite(self) -> bool:
        """Whether the run ends in a streak of non-finite losses, after other steps."""
        nonfinite = int(self.run.last("nonfinite_losses_in_a_row") or 0)
        streak = self.consecutive_overflows
        return thresholds.STUCK_AFTER <= streak <= nonfinite and streak < self.steps

    @property
    def is_stuck(self) -> bool:
        """Whether the run ends in another streak of skipped steps."""
        return self.consecutive_overflows >= thresholds.STUCK_AFTER and not self.ends_nonfinite

    @cached_property
    def startup_overflows(self) -> tuple[int, int, float]:
        """Gradient overflows until the first record after an applied step.

        With that record's step and loss scale.
        """
        rows = sorted(self.run.rows, key=itemgetter("step"))
        if rows and rows[0]["step"] <= 1:
            for step, records in itertools.groupby(rows, key=itemgetter("step")):
                merged = {
                    key: value
                    for record in records
                    for key, value in record.items()
                    if value is not None
                }
                if (
                    merged.get("overflows_in_a_row") == 0
                    and {"loss_scale", "overflow_count"} <= merged.keys()
                ):
                    overflows = merged["overflow_count"] - merged.get("nonfinite_loss_count", 0)
                    return int(overflows), step, float(merged["loss_scale"])
        return 0, 0, self.scale

    @property
    def main_overflow_origin(self) -> tuple[str, float]:
        """The most frequent overflow origin and its share; `("", 0.0)` if none.

        Of the steps with a finite loss.
        """
        recorded = self.run.last("overflow_origins_by_variable") or {}
        counts = {path: count for path, count in recorded.items() if count}
        path = max(counts, key=counts.__getitem__, default="")
        return path, counts[path] / sum(counts.values()) if counts else 0.0


def since_last_fallback(run: Run) -> tuple[dict[str, Any] | None, Run]:
    """Returns the record in which layers were last set to float32, and the run after it.

    The counts of that run begin there. `None` and the run itself if there is none.
    """
    index = next(
        (index for index in reversed(range(len(run.rows))) if run.rows[index].get("fallback")), None
    )
    if index is None:
        return None, run
    before = Run(run.rows[: index + 1])
    origins = "overflow_origins_by_variable"
    earlier = before.last(origins) or {}
    rows = [dict(row) for row in run.rows[index + 1 :]]
    for row in rows:
        for key in row.keys() & {"overflow_count", "nonfinite_loss_count"}:
            row[key] -= int(before.last(key) or 0)
        if origins in row:
            row[origins] = {
                path: count - earlier.get(path, 0) for path, count in row[origins].items()
            }
    return run.rows[index], Run(rows, run.header)


def name_of(path: str) -> str:
    """Returns the name of a layer, the last component of its path."""
    return path.rpartition("/")[2]
