"""The figures of a report, embedded as `data:` URLs."""

import base64
import functools
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kmp.advice import WhatIf
from kmp.records import ExponentHistogram, Run
from kmp.report.run_comparison import main_metrics
from kmp.report.run_summary import NOT_SAMPLED, RunSummary
from kmp.report.text_formats import number, scale, share

_INCHES = (5.2, 3.6)

# A comparison of runs shows these side by side, and the others with their run.
COMPARED = ("loss_scale", "gradient_exponents")


@dataclass(frozen=True)
class ReportFigure:
    """A figure with its texts.

    Args:
        name: Name of the function in `kmp.plots` that draws it.
        alt: Text alternative for screen readers.
        caption: How to read the figure, or why there is none.
        source: A `data:` URL of an SVG image; `None` if there is nothing to draw.
    """

    name: str
    alt: str
    caption: str
    source: str | None


def figures(summary: RunSummary) -> dict[str, ReportFigure]:
    """Returns all figures of a run by name."""
    return {name: _figure(name, summary) for name in _CAPTIONS}


def metric_figures(summaries: Sequence[RunSummary]) -> list[ReportFigure]:
    """Returns a figure for each of the main metrics, with the curves of all runs."""
    from kmp import plots

    runs = {summary.name: summary.run for summary in summaries}
    found = []
    for name in main_metrics(summaries):
        values = ", ".join(
            f"{number(summary.metrics_of_epochs[name])} in {summary.name}"
            for summary in summaries
            if name in summary.metrics_of_epochs
        )
        source = _svg(functools.partial(plots.metric, runs, name))
        found.append(ReportFigure(name, f"{name} over the training steps; at the end {values}.", "", source))
    return found


def _figure(name: str, summary: RunSummary) -> ReportFigure:
    reason = _EMPTY[name](summary) if name in _EMPTY else None
    if reason:
        return ReportFigure(name, "", reason, None)
    from kmp import plots

    source = _svg(lambda ax: getattr(plots, name)(_data_of(name, summary), ax=ax))
    return ReportFigure(name, _ALTS[name](summary), _CAPTIONS[name], source)


def _svg(draw: Callable[[Any], object]) -> str:
    """Returns a drawing as a `data:` URL."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained")  # pyplot would keep the figure and choose a backend
    draw(figure.subplots())
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "kmp"}):  # makes the file reproducible
        figure.savefig(buffer, format="svg", dpi=200, metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def _data_of(name: str, summary: RunSummary) -> Run | ExponentHistogram | WhatIf:
    if name == "gradient_exponents" and summary.newest_sample is not None:
        return summary.newest_sample.histogram
    if name == "what_if" and summary.metrics.gradients.curve is not None:
        return summary.metrics.gradients.curve  # computed already
    return summary.run


_CAPTIONS = {
    "loss_scale": "The loss scale, with a mark where steps were skipped.",
    "gradient_exponents": "The newest sample. Below float16's normal range precision is lost; above it is overflow.",
    "exponents_over_steps": "The gradients' magnitudes during training.",
    "what_if": "What float16 would lose at every other loss scale.",
    "overflowing_variables": "The variables that overflowed, and the overflow origins.",
}


def _alt_of_loss_scale(summary: RunSummary) -> str:
    metrics = summary.metrics
    return (
        f"The loss scale over {metrics.steps} training steps, {scale(metrics.scale)} at the end; "
        f"{metrics.overflows} steps were skipped."
    )


def _alt_of_gradient_exponents(summary: RunSummary) -> str:
    assert summary.newest_sample is not None
    histogram = summary.newest_sample.histogram
    zones, total = histogram.zones, max(1, histogram.total)
    return (
        f"Histogram of the gradients' binary exponents in step {histogram.step}: {share(zones['zero'] / total)} zero, "
        f"{share((zones['subnormal'] + zones['below_subnormal']) / total)} below float16's normal range, "
        f"{share((zones['near_overflow'] + zones['beyond']) / total)} near overflow or above."
    )


def _alt_of_exponents_over_steps(summary: RunSummary) -> str:
    samples = summary.metrics.gradients.samples
    return (
        f"The gradients' binary exponents in {len(samples)} samples, from step {samples[0].step} to {samples[-1].step}."
    )


def _alt_of_what_if(summary: RunSummary) -> str:
    return f"The share of gradient elements lost at every loss scale. {summary.other_scales.note}"


def _alt_of_overflowing_variables(summary: RunSummary) -> str:
    path, part = summary.metrics.main_overflow_origin
    if not path:
        return "Skipped steps by variable."
    return f"Skipped steps by variable; {path} was the overflow origin in {share(part)} of those with a finite loss."


# Why there is nothing to draw.
_EMPTY: dict[str, Callable[[RunSummary], str | None]] = {
    "loss_scale": lambda summary: None if "loss_scale" in summary.keys else "The loss scale was not recorded.",
    "gradient_exponents": lambda summary: None if summary.newest_sample else NOT_SAMPLED,
    "exponents_over_steps": lambda summary: None if summary.newest_sample else NOT_SAMPLED,
    "what_if": lambda summary: None if summary.metrics.gradients.curve else "No sampled gradient was finite.",
    "overflowing_variables": lambda summary: (
        None if summary.run.last("overflows_by_variable") else "No variable overflowed."
    ),
}

_ALTS: dict[str, Callable[[RunSummary], str]] = {
    "loss_scale": _alt_of_loss_scale,
    "gradient_exponents": _alt_of_gradient_exponents,
    "exponents_over_steps": _alt_of_exponents_over_steps,
    "what_if": _alt_of_what_if,
    "overflowing_variables": _alt_of_overflowing_variables,
}
