"""Metrics of a run from which the effect of its number format is diagnosed."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
from msgspec import UNSET
from msgspec.structs import asdict, replace

from kmp.diagnosis import branches, soundness, thresholds
from kmp.diagnosis.loss_scale_sweep import WhatIf, sweep
from kmp.diagnosis.sample_statistics import counts_below, statistics, unscaled_counts, usable
from kmp.records import GradientSample, Record, Replay, Run, Settings
from kmp.records.gradient_sample import layer_of
from kmp.records.replay import LOSS_FUNCTION, GradientError
from kmp.records.step_facts import StepFacts
from kmp.utils.float_formats import FLOAT16, FLOAT32
from kmp.utils.names import path_and_parents


class RunMetrics:
    """Metrics of the records of a run; after a fallback, of those since the last one.

    Those of gradients are of the samples, at the loss scale in use; that is NaN if it is unknown.
    """

    def __init__(self, run: Run) -> None:
        self.complete_run = run
        self.fallback, run = since_last_fallback(run)
        self.run = run
        self.format, self.has_loss_scale = run.format, run.has_loss_scale
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

    def _read_settings(self, settings: Settings) -> None:
        self.settings = settings
        # The call that set the loss scale: `kmp.enable` sets what no other call sets.
        self.settings_call: str = settings.settings_call
        self.is_fixed: bool = settings.rule == "FixedScale"
        self.min_scale: float = settings.min_scale or FLOAT16.smallest_normal
        dtypes = settings.compute_dtypes
        self.dtypes = " and ".join(dtypes or ["an unknown dtype"])
        self.layers: dict[str, str] = settings.layers  # the classes, by path

    def _read_replays(self, run: Run) -> None:
        self.replays = [replay for _, replay in run.replays]
        # A float32 run is compared with itself.
        self.comparisons = [] if self.format is FLOAT32 else run.comparisons
        compared = [replay for _, replay in self.comparisons]
        self.last_comparison = compared[-1] if compared else None
        # That one if the comparisons agree on harm.
        agree = soundness.agree_on_harm(compared, self.format)
        self.harmful_comparison = self.last_comparison if agree else None
        # The last replay whose loss and gradients were finite, and the last one whose loss was, but
        # not the gradients.
        self.clean_replay = self._last_replay(
            lambda replay: replay.is_finite and not replay.is_forward_only
        )
        self.backward_replay = self._last_replay(
            lambda replay: not replay.is_finite and replay.is_finite_forward
        )

    def _read_counts(self, run: Run) -> None:
        self.last_step = max((row.step for row in self.complete_run.rows), default=0)
        self.skipped_steps: int | None = self.complete_run.last("overflow_count")
        self.steps = self.last_step - (self.fallback.step if self.fallback else 0)
        # Of `steps`, those that were skipped; of these, those with a non-finite loss.
        self.overflows = int(run.last("overflow_count") or 0)
        self.nonfinite_losses = int(run.last("nonfinite_loss_count") or 0)
        self.gradient_overflows = self.overflows - self.nonfinite_losses
        self.consecutive_overflows = int(run.last("overflows_in_a_row") or 0)

    def is_rare(self, skipped: int) -> bool:
        """Whether so many skipped steps are few: of a short run one, if another one trains."""
        return skipped <= thresholds.FEW_SKIPPED * self.steps or skipped == 1 < self.steps

    @property
    def has_own_loss(self) -> bool:
        """Whether no replay has the loss: only forward passes were replayed."""
        return bool(self.replays) and all(replay.is_forward_only for replay in self.replays)

    @property
    def step_facts(self) -> StepFacts | None:
        """What the graph of the training step shows; `None` if that is not known."""
        return self.settings.step_facts

    @property
    def has_step_of_keras(self) -> bool:
        """Whether `fit` trains with the training step of Keras."""
        return bool(self.settings.in_fit) and self.settings.train_step == "keras"

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
        if layer == self.settings.model:
            return f"model {layer!r} outside its layers"
        name = name_of(layer)
        namesakes = [path for path in self.layers if name_of(path) == name]
        is_inside_another = self.created_layer(layer) != layer
        shown = layer if len(namesakes) > 1 or is_inside_another else name
        return f"layer {shown!r}"

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
            failed = self._last_replay(_fails_forward)
            return failed or self._last_replay(lambda replay: replay.loss is None)
        failed = self._last_replay(lambda replay: not replay.is_finite)
        if failed is None or failed.is_finite_forward or not self.overflows:
            return None
        return failed

    @cached_property
    def largest_gradient_error(self) -> GradientError | None:
        """The largest error of gradients in all comparisons; `None` without one.

        Of layers that had not converged.
        """
        errors: list[GradientError] = []
        for _, replay in self.comparisons:
            errors += soundness.unconverged(replay.gradient_errors)
        return max(errors, key=attrgetter("error"), default=None)

    @property
    def is_compared_late(self) -> bool:
        """Whether a comparison was in the second half of the run."""
        return bool(self.comparisons) and 2 * self.comparisons[-1][0] >= self.last_step

    @property
    def agrees_late(self) -> bool:
        """Whether compared gradients agree, also in the second half of the run.

        That is, one comparison was in that half, and all errors are small.
        """
        largest = self.largest_gradient_error
        if largest is None or not self.is_compared_late:
            return False
        return largest.error < thresholds.SMALL_GRADIENT_ERROR

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
        """Underflow and overflow at other loss scales; `None` without a finite sample.

        And in another format than float16, which needs no loss scale.
        """
        if self.format is not FLOAT16:
            return None
        return sweep(self.run, self.samples, self._references)

    @cached_property
    def subnormal_share(self) -> float:
        """Share of nonzero gradient elements below float16's normal range."""
        counts = unscaled_counts(self.usable_samples)
        if not counts.any():
            return 0.0
        limit = FLOAT16.min_exponent - round(math.log2(self.scale))
        return float(counts_below(counts, limit) / max(1.0, counts.sum()))

    @cached_property
    def underflow_share(self) -> float:
        """Share of all gradient elements that are nonzero and would round to zero."""
        assert self.curve is not None
        scales = self.curve.log2_scales
        in_use = np.clip(math.log2(self.scale), scales[0], scales[-1])
        return self.curve.at(float(in_use))["underflow"]

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
        underflowed = [sample.underflowed for sample in self.finite_samples]
        return dict(Counter(names[-1] for names in underflowed if names))

    @cached_property
    def unexplained_zero_share(self) -> float:
        """Share of sampled gradient elements that are exactly zero, and may not be in float32.

        Without those of variables that the last clean replay showed to be zero there too.
        """
        explained = set(self.clean_replay.gradients.zero) if self.clean_replay else set()
        zeros = total = 0
        for sample in self.usable_samples:
            is_open = np.array([name not in explained for name in sample.names], bool)
            zeros += int(sample.zeros[is_open].sum())
            total += int(sample.totals[is_open].sum())
        return zeros / max(1, total)

    @cached_property
    def all_zero_variables(self) -> list[str]:
        """The variables whose gradient was all zero in every usable sample."""
        samples = self.usable_samples
        if not samples:
            return []
        counts: Counter[str] = Counter()
        for sample in samples:
            counts.update(sample.named(sample.is_all_zero))
        return [name for name in samples[-1].names if counts[name] == len(samples)]

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
        step, on average: then in one of these steps the update was at least as large. Weights that
        begin at 0 have no size before they have grown: their updates are compared with the last.
        """
        ratios = []
        weighed = [sample for sample in self.samples if sample.weight_norm > 0]
        begins_at_0 = bool(weighed) and weighed[0] is not self.samples[0]
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
    def has_no_update(self) -> bool:
        """Whether no update of the weights was measured."""
        return self.update_ratio[1] == 0.0

    @cached_property
    def estimated_update(self) -> float:
        """The norm of the next update relative to that of the weights; 0 if it is not known.

        Of SGD, which multiplies gradients by the learning rate: from the last gradients in float32.
        Momentum makes later ones larger.
        """
        rate = self.settings.learning_rate or 0.0
        is_known = self.settings.optimizer == "SGD" and not self.settings.clips
        norms = [sample.weight_norm for sample in self.samples if sample.weight_norm > 0]
        if not (is_known and norms and self.run.references):
            return 0.0
        ratio = rate * self.run.references[-1].total_norm / norms[-1]
        return float(ratio) if math.isfinite(ratio) else 0.0

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
        names = [name for name in samples[-1].names if name not in replay.gradients.zero]
        return {name: shares.get(name, 0.0) for name in names}

    @cached_property
    def flushed_layers(self) -> list[str]:
        """The layers of which each variable's gradient was `flushed` to zero for the most part."""
        return branches.flushed_layers(self.flushed, self.layer_of)

    @cached_property
    def flushed_branch(self) -> list[str]:
        """Those of the `flushed_layers` that are part of a branch, while others are kept."""
        next_layers = self.settings.next_layers
        return branches.flushed_branch(self.flushed, self.layer_of, next_layers)

    def gap_of(self, layers: Sequence[str], replay: Replay) -> branches.Gap | None:
        """Returns how far gradients of these layers are from those of the other 16-bit layers.

        In float32, as recorded with a replay; `None` without a record.
        """
        rows = self.run.rows
        reference = next((row.reference for row in rows if row.replay is replay), None)
        if not isinstance(reference, GradientSample):
            return None
        repaired: set[str] = set()
        for row in self.complete_run.rows:
            repaired.update(row.fallback or ())
        float32_variables = self.settings.float32_variables
        branch, others = [], []
        for name in reference.names:
            if self.layer_of(name) in layers:
                branch.append(name)
            elif name not in float32_variables and self.layer_of(name) not in repaired:
                others.append(name)
        return branches.gap_of(reference, branch, others)

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

        The last is the median of a few of the second half, because the loss of one batch may be
        noisy.
        """
        steps, losses = self.run.series("last_loss")
        _, highest_losses = self.run.series("highest_loss")
        finite = losses[np.isfinite(losses)]
        late = losses[np.isfinite(losses) & (2 * steps >= self.last_step)]
        if not late.size:
            late = finite[-1:]
        # That of the first record may be of a step before this run.
        increased = highest_losses[highest_losses > highest_losses[:1]]
        magnitudes = np.concatenate([increased, np.abs(finite)])
        highest = float(magnitudes.max()) if magnitudes.size else math.nan
        if not finite.size:
            return math.nan, highest, math.nan
        last = np.median(late[-thresholds.LAST_LOSSES :])
        return float(finite[0]), highest, float(last)

    @property
    def ends_nonfinite(self) -> bool:
        """Whether the run ends in a streak of non-finite losses, after other steps."""
        nonfinite = int(self.run.last("nonfinite_losses_in_a_row") or 0)
        streak = self.consecutive_overflows
        return thresholds.STUCK_AFTER <= streak <= nonfinite and streak < self.steps

    @property
    def has_never_updated(self) -> bool:
        """Whether all recorded steps were skipped, so that the weights are those of the start."""
        first_step = min((row.step for row in self.run.rows), default=0)
        return first_step > 0 and self.consecutive_overflows > self.last_step - first_step

    @property
    def is_stuck(self) -> bool:
        """Whether the run ends in another streak of skipped steps."""
        return self.consecutive_overflows >= thresholds.STUCK_AFTER and not self.ends_nonfinite

    @cached_property
    def startup_overflows(self) -> tuple[int, int, float]:
        """Gradient overflows until the first record after an applied step.

        With that record's step and loss scale.
        """
        unknown = 0, 0, self.scale
        rows = sorted(self.run.rows, key=attrgetter("step"))
        if not rows or rows[0].step > 1:
            return unknown
        for step, records in itertools.groupby(rows, key=attrgetter("step")):
            merged: dict[str, Any] = {}
            for record in records:
                values = asdict(record).items()
                merged.update((key, value) for key, value in values if value not in (None, UNSET))
            has_both = {"loss_scale", "overflow_count"} <= merged.keys()
            if has_both and merged.get("overflows_in_a_row") == 0:
                overflows = merged["overflow_count"] - merged.get("nonfinite_loss_count", 0)
                return int(overflows), step, float(merged["loss_scale"])
        return unknown

    @property
    def main_overflow_origin(self) -> tuple[str, float]:
        """The most frequent overflow origin and its share; `("", 0.0)` if none.

        Of the steps with a finite loss.
        """
        recorded = self.run.last("overflow_origins_by_variable") or {}
        total = sum(recorded.values())
        if not total:
            return "", 0.0
        path = max(recorded, key=recorded.__getitem__)
        return path, recorded[path] / total


def _fails_forward(replay: Replay) -> bool:
    return not replay.is_finite and not replay.is_finite_forward


def since_last_fallback(run: Run) -> tuple[Record | None, Run]:
    """Returns the record in which layers were last set to float32, and the run after it.

    The counts of that run begin there. `None` and the run itself if there is none.
    """
    fallbacks = [index for index, row in enumerate(run.rows) if row.fallback]
    if not fallbacks:
        return None, run
    begin = fallbacks[-1] + 1
    before = Run(run.rows[:begin])
    rows = [_counted_after(before, row) for row in run.rows[begin:]]
    return before.rows[-1], Run(rows, run.header)


def _counted_after(before: Run, row: Record) -> Record:
    """Returns a record without what a run before it has counted."""
    row = replace(row)
    if row.overflow_count is not UNSET:
        row.overflow_count -= int(before.last("overflow_count") or 0)
    if row.nonfinite_loss_count is not UNSET:
        row.nonfinite_loss_count -= int(before.last("nonfinite_loss_count") or 0)
    if row.overflow_origins_by_variable is not UNSET:
        earlier = before.last("overflow_origins_by_variable") or {}
        row.overflow_origins_by_variable = {
            path: count - earlier.get(path, 0)
            for path, count in row.overflow_origins_by_variable.items()
        }
    return row


def name_of(path: str) -> str:
    """Returns the name of a layer, the last component of its path."""
    return path.rpartition("/")[2]
