"""What a report says of a run, as text: shared by the terminal summary and the HTML file."""

import math
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from msgspec.structs import asdict

from kmp.advice import Advice
from kmp.advice.diagnose import advice_of
from kmp.diagnosis import INFO, Observations
from kmp.records import Header, Run, Settings
from kmp.records.run import RUN_EXPECTED
from kmp.report.texts import UNKNOWN, number, scale, share, share_of
from kmp.utils import validation

Pairs = tuple[tuple[str, str], ...]

NO_PROBLEM, REPAIRED = "no problem", "repaired"
LOSS_SCALE = "current loss scale"  # a count that not every run has
VALIDATION, LEARNING_RATE = "val_", "learning_rate"  # in the names of metrics


class RunSummary:
    """Summarizes a run as texts.

    Args:
        name: The run's name.
        run: The run.
    """

    def __init__(self, name: str, run: Run) -> None:
        self.name = name
        self.run = run
        self.observed = Observations(run)

    @cached_property
    def advice(self) -> Advice:
        """The findings and the verdict."""
        return advice_of(self.observed)

    @property
    def status(self) -> str:
        """The severity of the worst finding, `"repaired"`, `"no problem"` or `"unknown"`."""
        if self.advice.problems:
            return self.advice.problems[0].severity
        if self.observed.repair:
            return REPAIRED
        return NO_PROBLEM if self.advice.is_known else UNKNOWN

    @property
    def findings_count(self) -> str:
        """The number of findings of each severity, as text."""
        parts = []
        for severity, count in Counter(finding.severity for finding in self.advice).items():
            plural = "s" if count > 1 and severity != INFO else ""
            parts.append(f"{count} {severity}{plural}")
        if parts:
            return ", ".join(parts)
        return "none" if self.advice.is_known else UNKNOWN

    @property
    def subtitle(self) -> str:
        """Model, optimizer, compute dtypes, loss scale if it matters, and steps, in one line."""
        observed, settings = self.observed, self.observed.settings
        parts = [name for name in (settings.model, settings.optimizer) if name]
        if settings.compute_dtypes:
            parts.append(f"computed in {observed.dtypes}")
        if math.isfinite(observed.loss_scale) and observed.records.has_loss_scale:
            rule = "fixed" if observed.is_fixed else "dynamic"
            parts.append(f"{rule} loss scale {scale(observed.loss_scale)}")
        parts.append(f"{observed.last_step} steps")
        return ", ".join(parts)

    @cached_property
    def metrics_of_epochs(self) -> dict[str, float]:
        """The last value of each metric but the learning rate, those of the validation first."""
        last = {name: float(values[-1]) for name, (_, values) in self.run.metrics.items()}
        last.pop(LEARNING_RATE, None)
        return dict(sorted(last.items(), key=lambda item: not item[0].startswith(VALIDATION)))

    @property
    def numbers(self) -> Pairs:
        """The metrics of the last epoch, and the counts."""
        metrics = [(name, number(value)) for name, value in self.metrics_of_epochs.items()]
        return (*metrics, *self.counts)

    @cached_property
    def counts(self) -> Pairs:
        """Named numbers of the run without the metrics of its epochs.

        Every run has the same, but that of the loss scale.
        """
        observed, last = self.observed, self.run.last
        _, losses = self.run.series("last_loss")
        count = observed.skipped_steps
        skipped = origin = UNKNOWN
        if count is not None:
            skipped, origin = str(count), "none"
        if count:
            skipped += f" ({share_of(count, observed.last_step)})"
        loss_scale: tuple[tuple[str, str], ...] = ()
        if observed.records.has_loss_scale:
            loss_scale = ((LOSS_SCALE, scale(observed.loss_scale)),)
        return (
            ("computed in", observed.dtypes if self.run.settings != Settings() else UNKNOWN),
            ("steps", str(observed.last_step)),
            ("skipped steps", skipped),
            ("of these with a non-finite loss", str(last("nonfinite_loss_count", UNKNOWN))),
            ("last overflow origin", last("overflow_origin") or origin),
            *loss_scale,
            ("first loss", number(losses[0]) if losses.size else UNKNOWN),
            ("last loss", number(losses[-1]) if losses.size else UNKNOWN),
            ("gradient elements that are zero", share(last("grad_zeros"))),
            ("gradient norm", number(last("grad_norm"))),
            ("sampled steps", str(len(observed.gradients.samples))),
        )

    @cached_property
    def settings(self) -> Pairs:
        """The header of the log, and the settings of the run that are not the defaults."""
        hidden = {"schema", "kind", "settings", "float32_variables"}
        if not self.observed.records.has_loss_scale:
            hidden |= {"rule", "loss_scale", "initial_scale", "settings_call"}
        shown = []
        for part, default in ((self.run.header, Header()), (self.run.settings, Settings())):
            for key, value in asdict(part).items():
                if key not in hidden and value != getattr(default, key):
                    shown.append((key, _setting(key, value)))
        return tuple(shown)


def summaries(runs: Mapping[str, Run]) -> list[RunSummary]:
    """Returns a summary of each run.

    Raises:
        ValueError: If it is empty.
    """
    expected = "a dictionary of runs by name, at least one"
    validation.instance("runs", runs, Mapping, expected)
    if not runs:
        raise ValueError(validation.message("runs", runs, expected))
    for name, run in runs.items():
        validation.instance("runs", name, str, "a dictionary with strings as keys")
        validation.instance(f"runs[{name!r}]", run, Run, RUN_EXPECTED)
    return [RunSummary(name, run) for name, run in runs.items()]


def _setting(key: str, value: Any) -> str:
    if isinstance(value, Mapping):
        value = [f"{name}: {of_name}" for name, of_name in value.items()]
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if key == "started":
        return str(value).replace("T", " ")  # so that it fits a narrow screen
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if "scale" in key:
        return scale(float(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
