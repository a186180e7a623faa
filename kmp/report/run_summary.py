"""The contents of a run's report, as text: shared by the terminal summary and the HTML file."""

import heapq
import json
import math
from collections import Counter
from collections.abc import Collection
from functools import cached_property
from typing import Any

from kmp.advice import INFO, Advice, RunMetrics, diagnosis_of
from kmp.records import ExponentHistogram, GradientSample, Run, layer_of
from kmp.report.text_formats import MISSING, UNKNOWN, number, scale, share
from kmp.report.text_table import MAX_ROWS, Table, with_omitted

Pairs = tuple[tuple[str, str], ...]

NO_PROBLEM = "no problem"
VALIDATION, LEARNING_RATE = "val_", "learning_rate"  # in the names of metrics
_GRADIENT_COLUMNS = (
    *("layer", "elements", "zero", "subnormal", "near overflow", "NaN, Inf"),
    *("amax", "norm", "update / weight", "updates lost"),
)
NOT_SAMPLED = "No gradients were sampled. Attach kmp.callbacks.GradientHistogram to sample them."


class RunSummary:
    """Summarizes a run as texts and tables.

    Args:
        name: The run's name.
        run: The run.
    """

    def __init__(self, name: str, run: Run) -> None:
        self.name = name
        self.run = run
        self.metrics = RunMetrics(run)

    @cached_property
    def advice(self) -> Advice:
        """The findings and the verdict."""
        return diagnosis_of(self.metrics)

    @property
    def is_known(self) -> bool:
        """Whether the run can be diagnosed: it has a finding, or samples of finite gradients."""
        return bool(self.advice) or self.metrics.gradients.curve is not None

    @property
    def status(self) -> str:
        """`"error"` or `"warning"`, the severity of the worst finding, `"no problem"` or `"unknown"`."""
        if self.advice.problems:
            return self.advice.problems[0].severity
        return NO_PROBLEM if self.is_known else UNKNOWN

    @property
    def findings_count(self) -> str:
        """The number of findings of each severity, as text."""
        counts = Counter(finding.severity for finding in self.advice)
        parts = [f"{count} {severity}{'s' * (count > 1 and severity != INFO)}" for severity, count in counts.items()]
        return ", ".join(parts) if parts else "none" if self.is_known else UNKNOWN

    @cached_property
    def keys(self) -> set[str]:
        """The keys of all records."""
        return {key for row in self.run.rows for key in row}

    @cached_property
    def metrics_of_epochs(self) -> dict[str, float]:
        """The last value of each metric, with those of the validation first, and without the learning rate."""
        last = {name: float(values[-1]) for name, (_, values) in self.run.metrics.items() if name != LEARNING_RATE}
        return dict(sorted(last.items(), key=lambda item: not item[0].startswith(VALIDATION)))

    @property
    def subtitle(self) -> str:
        """Model, optimizer, compute dtypes, loss scale and steps, in one line."""
        settings = self.metrics.settings
        parts = [settings.get("model"), settings.get("optimizer")]
        parts += [f"computed in {self.metrics.dtypes}" if "compute_dtypes" in settings else None]
        if math.isfinite(self.metrics.scale):
            kind = "fixed" if self.metrics.is_fixed else "dynamic"
            parts += [f"{kind} loss scale {scale(self.metrics.scale)}"]
        return ", ".join([*(str(part) for part in parts if part), f"{self.metrics.steps} steps"])

    @property
    def numbers(self) -> Pairs:
        """The metrics of the last epoch, and the counts."""
        return (*((name, number(value)) for name, value in self.metrics_of_epochs.items()), *self.counts)

    @cached_property
    def counts(self) -> Pairs:
        """Named numbers of the run, without the metrics of its epochs."""
        metrics, last = self.metrics, self.run.last
        return (
            ("computed in", metrics.dtypes if self.run.settings else UNKNOWN),
            ("steps", str(metrics.steps)),
            ("skipped steps", _count_of(metrics.overflows, metrics.steps) if self._has("overflow_count") else UNKNOWN),
            ("of these with a non-finite loss", str(last("nonfinite_loss_count", UNKNOWN))),
            (
                "last overflow origin",
                str(last("overflow_origin", None) or ("none" if self._has("overflow_count") else UNKNOWN)),
            ),
            ("current loss scale", scale(metrics.scale)),
            ("first loss", self._loss(0)),
            ("last loss", self._loss(-1)),
            ("gradient elements that are zero", _or_unknown(share(last("grad_zeros")))),
            ("gradient norm", _or_unknown(number(last("grad_norm")))),
            ("sampled steps", str(len(metrics.gradients.samples))),
        )

    @cached_property
    def settings(self) -> Pairs:
        """The settings of the run, from the header of its log."""
        header = {key: value for key, value in self.run.header.items() if key not in ("schema", "kind", "settings")}
        settings = {key: value for key, value in (header | self.run.settings).items() if key != "float32_variables"}
        return tuple((key, _setting(key, value)) for key, value in settings.items())

    @cached_property
    def gradients(self) -> Table:
        """The newest sample by layer."""
        sample = self.newest_sample
        if sample is None or not len(sample):
            return Table((), (), NOT_SAMPLED)
        names = list(dict.fromkeys(map(layer_of, sample.names)))
        shown = names[:MAX_ROWS]
        layers, updates = _layers(sample, shown), self._updates(shown)
        rows = [
            (name, *_zones(layers[name]), number(amax), number(norm), *updates.get(name, ("", "")))
            for name, amax, norm in zip(layers.names, layers.amax, layers.norm, strict=True)
        ]
        note = (
            f"Step {sample.step}, loss scale {scale(sample.loss_scale)}. Of the loss-scaled gradient: subnormal is "
            "below 2^-14, near overflow is 2^13 and above, and amax is the largest magnitude. The norm is of the "
            f"unscaled gradient. Updates ({self._updates_step}): their norm over that of the weights, and the "
            "share of updates below 2^-11 of their weight, most of which a float16 weight would lose."
        )
        return Table(_GRADIENT_COLUMNS, tuple(rows), with_omitted(note, len(names)))

    @cached_property
    def newest_sample(self) -> GradientSample | None:
        """The newest sample, of all variables."""
        return next(reversed(self.run.samples), None)

    def _updates(self, shown: Collection[str]) -> dict[str, tuple[str, str]]:
        """Norm ratio and lost share of the newest measured update, by layer. Most samples do not measure updates."""
        measured = self._newest_update
        if measured is None:
            return {}
        layers = _layers(measured, shown)
        parts = zip(layers.names, layers.update_ratio, layers.lost_updates, layers.updates, strict=True)
        return {name: (number(ratio), share(_fraction(lost, updates))) for name, ratio, lost, updates in parts}

    @cached_property
    def _newest_update(self) -> GradientSample | None:
        return next((sample for sample in reversed(self.run.samples) if sample.has_update), None)

    @property
    def _updates_step(self) -> str:
        return f"in step {self._newest_update.step}" if self._newest_update else "not measured"

    @cached_property
    def overflow_and_underflow(self) -> Table:
        """How often each variable overflowed or underflowed, and how often it was the origin."""
        overflows, underflows = self.run.last("overflows_by_variable", {}), self.metrics.gradients.underflows
        overflow_origins, underflow_origins = self.metrics.overflow_origins, self.metrics.gradients.underflow_origins
        by_priority = (overflow_origins, overflows, underflow_origins, underflows)
        columns = (overflows, overflow_origins, underflows, underflow_origins)
        names = list(dict.fromkeys(name for counts in by_priority for name in counts))

        def priority(name: str) -> tuple[float, ...]:
            return tuple(counts.get(name, 0) for counts in by_priority)

        if not names:
            overflow = "No variable overflowed" if self._has("overflow_count") else "Overflows were not counted"
            return Table((), (), f"{overflow}, and no underflow was detected.")
        shown = heapq.nlargest(MAX_ROWS, names, key=priority)
        rows = [(name, *(str(counts.get(name, 0)) for counts in columns)) for name in shown]
        samples = len(self.metrics.gradients.finite_samples)
        note = (
            "Overflowed: steps in which the variable's gradient was not finite. Underflowed: of "
            f"{samples} samples, those in which more than 5 % of its nonzero gradient "
            "elements were subnormal in float16 or smaller, or all were zero. Origin: of these, those in which it was "
            "the variable nearest the loss. A step with a non-finite loss has no overflow origin."
        )
        headings = ("variable", "overflowed", "overflow origin", "underflowed", "underflow origin")
        return Table(headings, tuple(rows), with_omitted(note, len(names)))

    @cached_property
    def other_scales(self) -> Table:
        """Underflow, overflow and skipped steps at a few other loss scales."""
        curve = self.metrics.gradients.curve
        if curve is None:
            return Table(
                (), (), f"No sample has finite gradients. {NOT_SAMPLED * (not self.metrics.gradients.samples)}"
            )
        names = ("lowest recommended", "highest recommended")
        bounds = list(zip(names, curve.recommended or (), strict=False))[not curve.is_lowest_known :]
        rows = []
        for name, exponent in (("in use", curve.in_use), *bounds, ("none", 0.0)):
            if curve.log2_scales[0] <= exponent <= curve.log2_scales[-1]:
                shares = {key: share(value) for key, value in curve.at(exponent).items()}
                underflow = " to ".join(dict.fromkeys([shares["underflow"], shares["underflow_bound"]]))
                rows.append((f"{name}: {scale(2.0**exponent)}", underflow, shares["overflow"], shares["skipped"]))
        return Table(("loss scale", "underflow", "overflow", "steps skipped"), tuple(rows), self._what_if_note())

    def _what_if_note(self) -> str:
        curve = self.metrics.gradients.curve
        assert curve is not None
        advice = "No scale is recommended."
        if curve.recommended:
            low, high = curve.recommended
            lowest = f"{scale(2.0**low)} to" if curve.is_lowest_known else "at most"
            advice = f"Recommended: {lowest} {scale(2.0**high)}."
        source = (
            "Measured with a float32 reference pass."
            if curve.is_measured
            else "Computed from the sampled gradients: values above the scale in use are extrapolated, and the upper "
            "bound of a range counts all zeros as flushed by float16."
        )
        return f"{advice} Shares of gradient elements if they were float16 at that scale. {source}"

    def _loss(self, index: int) -> str:
        losses = self.run.series("last_loss")[1]
        if not losses.size:
            return UNKNOWN
        return number(losses[index]) if math.isfinite(losses[index]) else "NaN or Inf"

    def _has(self, key: str) -> bool:
        return self.run.last(key) is not None


def _zones(histogram: ExponentHistogram) -> tuple[str, ...]:
    zones, total = histogram.zones, histogram.total
    groups = (
        ("zero",),
        ("subnormal", "below_subnormal"),
        ("near_overflow", "beyond"),
        ("inf", "nan"),
    )
    return (f"{total:,}", *(share(_fraction(sum(zones[name] for name in group), total)) for group in groups))


def _fraction(count: float, total: float) -> float | None:
    return count / total if total else None


def _or_unknown(text: str) -> str:
    return UNKNOWN if text == MISSING else text


def _count_of(count: int, total: int) -> str:
    return f"{count} ({share(_fraction(count, total))})" if count else "0"


def _layers(sample: GradientSample, shown: Collection[str]) -> GradientSample:
    """Returns the sample of some layers."""
    kept = set(shown)
    return sample.without(name for name in sample if layer_of(name) not in kept).by_layer()


def _setting(key: str, value: Any) -> str:
    if "scale" in key and isinstance(value, int | float):
        return scale(float(value))
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if key == "parameters" and isinstance(value, int):
        return f"{value:,}"
    return json.dumps(value) if isinstance(value, dict) else str(value)
