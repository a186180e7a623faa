"""What a report says of a run, in words: the numbers of its terminal summary and of its HTML file alike."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kmp.advice import Advice, RunMetrics, advise
from kmp.records import ExponentHistogram, GradientSample, Run
from kmp.utils import as_power

Pairs = tuple[tuple[str, str], ...]

UNKNOWN, NOT_KNOWN = "-", "not known"
_MOST_ROWS = 40
_GRADIENT_COLUMNS = (
    *("layer", "elements", "zero", "subnormal", "near overflow", "inf, nan"),
    *("amax", "norm", "update / weight", "updates lost"),
)
_NOT_SAMPLED = "No gradients were sampled; kmp.callbacks.GradientHistogram does that."


@dataclass(frozen=True)
class Table:
    """A table in words.

    Args:
        columns: What the columns are; the first names the rows.
        rows: The rows.
        note: How to read it, or why it is empty.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str


class RunSummary:
    """What there is to say of a run.

    Args:
        name: The run's name.
        run: The run.
    """

    def __init__(self, name: str, run: Run) -> None:
        self.name = name
        self.run = run
        self.evidence = RunMetrics(run)

    @cached_property
    def advice(self) -> Advice:
        """The findings and the verdict."""
        return advise(self.run)

    @property
    def is_known(self) -> bool:
        """Whether the run can be judged: a finding was made, or gradients were sampled."""
        return bool(self.advice) or self.evidence.curve is not None

    @property
    def findings_in_words(self) -> str:
        """How many findings there are."""
        count = len(self.advice)
        return f"{count} finding{'s' * (count > 1)}" if count else "no finding" if self.is_known else NOT_KNOWN

    @property
    def subtitle(self) -> str:
        """What was trained, in a line."""
        settings = self.evidence.settings
        told = [settings.get("model"), settings.get("optimizer")]
        told += [f"computed in {self.evidence.dtypes}" if "compute_dtypes" in settings else None]
        return ", ".join([*(str(word) for word in told if word), f"{self.evidence.steps} steps"])

    @cached_property
    def counts(self) -> Pairs:
        """The run in numbers, each with its name."""
        evidence, last = self.evidence, self.run.last
        return (
            ("computed in", evidence.dtypes if self.run.settings else NOT_KNOWN),
            ("steps", str(evidence.steps)),
            ("skipped steps", _of(evidence.overflows, evidence.steps) if self._has("overflow_count") else NOT_KNOWN),
            ("of these with a non-finite loss", str(last("nonfinite_loss_count", NOT_KNOWN))),
            (
                "last to blame",
                str(last("overflow_origin", None) or ("none" if self._has("overflow_count") else NOT_KNOWN)),
            ),
            ("loss scale now", scale(evidence.scale)),
            ("first loss", self._loss(0)),
            ("last loss", self._loss(-1)),
            ("gradient elements that are zero", _known(share(last("grad_zeros")))),
            ("gradient norm", _known(number(last("grad_norm")))),
            ("sampled steps", str(len(evidence.samples))),
        )

    @cached_property
    def settings(self) -> Pairs:
        """What the run was made with, as the header of its log tells."""
        plain = {key: value for key, value in self.run.header.items() if key not in ("schema", "kind", "settings")}
        told = {key: value for key, value in (plain | self.run.settings).items() if key != "float32_variables"}
        return tuple((key, _setting(key, value)) for key, value in told.items())

    @cached_property
    def gradients(self) -> Table:
        """The newest sample, layer by layer."""
        sample = self.evidence.samples[-1] if self.evidence.samples else None
        if sample is None or not len(sample):
            return Table((), (), _NOT_SAMPLED)
        layers, updates = sample.by_layer(), self._updates
        rows = [
            (name, *_zones(layers[name]), number(amax), number(norm), *updates.get(name, ("", "")))
            for name, amax, norm in zip(layers.names, layers.amax, layers.norm, strict=True)
        ]
        return Table(
            _GRADIENT_COLUMNS,
            *_capped(
                rows,
                f"Step {sample.step}, loss scale {scale(sample.loss_scale)}. Of the loss-scaled gradient: subnormal in "
                "float16 is below 2^-14, near overflow from 2^13 on, amax the largest magnitude. Norm: without the "
                f"scale. Updates, {self._updates_step}: norm over that of the weights, and the share of changes below "
                "2^-11 of their weight, most of which a float16 weight would not hold.",
            ),
        )

    @cached_property
    def _updates(self) -> dict[str, tuple[str, str]]:
        """By layer, what the newest measured update was; the updates of most samples are not measured."""
        measured = self._newest_update
        if measured is None:
            return {}
        layers = measured.by_layer()
        parts = zip(layers.names, layers.update_ratio, layers.lost_updates, layers.updates, strict=True)
        return {name: (number(ratio), share(_part(lost, updates))) for name, ratio, lost, updates in parts}

    @property
    def _newest_update(self) -> GradientSample | None:
        newest_first = reversed(self.evidence.samples)
        return next((sample for sample in newest_first if not np.isnan(sample.update_norm).all()), None)

    @property
    def _updates_step(self) -> str:
        return f"in step {self._newest_update.step}" if self._newest_update else "not measured"

    @cached_property
    def blame(self) -> Table:
        """The variables that overflowed or underflowed, and how often each was to blame."""
        overflowed = self.run.last("overflows_by_variable", {})
        to_blame, underflow_to_blame = self.evidence.overflow_origins, self.evidence.underflow_origins
        counts = (to_blame, overflowed, underflow_to_blame, self.evidence.underflows)
        columns = (overflowed, to_blame, self.evidence.underflows, underflow_to_blame)
        names = list(dict.fromkeys(name for each in counts for name in each))

        def weight(name: str) -> tuple[float, ...]:
            return tuple(each.get(name, 0) for each in counts)

        if not names:
            counted = "No variable overflowed" if self._has("overflow_count") else "Overflows were not counted"
            return Table((), (), f"{counted}, and none is known to underflow.")
        shown = sorted(names, key=weight, reverse=True)
        rows = [(name, *(str(each.get(name, 0)) for each in columns)) for name in shown]
        note = (
            "Overflowed: steps in which its gradient was not finite. Underflowed: of "
            f"{len(self.evidence.finite)} samples, those in which more than 5 % of its nonzero gradient elements were "
            "subnormal in float16 or smaller, or all were zero. To blame: of these, the nearest to the "
            "loss. A step whose loss itself was not finite blames none."
        )
        return Table(("variable", "overflowed", "to blame", "underflowed", "to blame"), *_capped(rows, note))

    @cached_property
    def other_scales(self) -> Table:
        """What other loss scales would do, in short."""
        curve = self.evidence.curve
        if curve is None:
            return Table((), (), f"No sample of finite gradients to work from. {_NOT_SAMPLED * (not self.run.samples)}")
        ends = zip(("lowest recommended", "highest recommended"), curve.recommended or (), strict=False)
        rows = []
        for name, exponent in (("in use", curve.in_use), *ends, ("none", 0.0)):
            if curve.log2_scales[0] <= exponent <= curve.log2_scales[-1]:
                at = curve.at(exponent)
                lost = " to ".join(dict.fromkeys([share(at["underflow"]), share(at["underflow_bound"])]))
                rows.append((f"{name}: {scale(2.0**exponent)}", lost, share(at["overflow"]), share(at["skipped"])))
        return Table(("loss scale", "underflow", "overflow", "steps skipped"), tuple(rows), self._what_if_note())

    def _what_if_note(self) -> str:
        curve = self.evidence.curve
        assert curve is not None
        ends = curve.recommended
        advised = f"Recommended: {scale(2.0 ** ends[0])} to {scale(2.0 ** ends[1])}." if ends else "No scale fits all."
        source = (
            "Measured with a float32 reference pass."
            if curve.is_measured
            else "Worked out from the sampled gradients: above the scale in use it is an extrapolation, and zeros that "
            "float16 may have flushed make the higher figure."
        )
        return f"{advised} Shares of gradient elements, were they float16 at that scale. {source}"

    def _loss(self, place: int) -> str:
        losses = self.run.series("last_loss")[1]
        if not losses.size:
            return NOT_KNOWN
        return number(losses[place]) if math.isfinite(losses[place]) else "inf or nan"

    def _has(self, key: str) -> bool:
        return self.run.last(key) is not None


def comparison(runs: Sequence[RunSummary]) -> Table:
    """Returns the counts of several runs side by side, a column each."""
    names = [name for name, _ in runs[0].counts]
    rows = [(name, *(dict(facts.counts)[name] for facts in runs)) for name in names]
    rows.append(("findings", *(facts.findings_in_words for facts in runs)))
    return Table(("", *(facts.name for facts in runs)), tuple(rows), "")


def code_lines(change: str) -> tuple[str, ...]:
    """Returns a line of code, and its comment on a line of its own: together they are too wide for a screen."""
    code, _, comment = change.partition("  # ")
    return (code, f"# {comment}") if comment else (code,)


def share(value: float | None) -> str:
    """Returns a share in percent; one that is not quite nothing or all is not rounded to it."""
    if value is None or math.isnan(value):
        return UNKNOWN
    if 0 < value < 0.0005:
        return "<0.1%"
    return ">99.9%" if 0.9995 <= value < 1 else f"{value:.1%}".replace(".0%", "%")


def number(value: float | None) -> str:
    """Returns a number with three digits."""
    return UNKNOWN if value is None else f"{value:.3g}"


def scale(value: float) -> str:
    """Returns a loss scale as a power of two where it is one."""
    return NOT_KNOWN if math.isnan(value) else as_power(value)


def _zones(histogram: ExponentHistogram) -> tuple[str, ...]:
    zones, total = histogram.zones, histogram.total
    groups = (
        ("zero",),
        ("subnormal", "below_subnormal"),
        ("near_overflow", "beyond"),
        ("inf", "nan"),
    )
    return (f"{total:,}", *(share(_part(sum(zones[name] for name in group), total)) for group in groups))


def _part(count: float, total: float) -> float | None:
    return count / total if total else None


def _known(text: str) -> str:
    return NOT_KNOWN if text == UNKNOWN else text


def _of(count: int, total: int) -> str:
    return f"{count} ({share(_part(count, total))})" if count else "0"


def _capped(rows: Sequence[tuple[str, ...]], note: str) -> tuple[tuple[tuple[str, ...], ...], str]:
    """Returns the first rows, and the note with how many were left out."""
    left = len(rows) - _MOST_ROWS
    return tuple(rows[:_MOST_ROWS]), f"{note} {left} more are not shown." if left > 0 else note


def _setting(key: str, value: Any) -> str:
    if "scale" in key and isinstance(value, int | float):
        return scale(float(value))
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if key == "parameters" and isinstance(value, int):
        return f"{value:,}"
    return json.dumps(value) if isinstance(value, dict) else str(value)
