"""The figures of a report, embedded as `data:` URLs."""

import base64
import functools
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from kmp import plots
from kmp.advice.wording import skipped
from kmp.diagnosis.soundness import error_origin
from kmp.report.run_comparison import main_metrics
from kmp.report.run_summary import RunSummary
from kmp.report.run_tables import ALL_FINITE, NOT_SAMPLED, other_scales
from kmp.report.texts import number, scale, share, share_of
from kmp.utils.float_formats import FLOAT16

_INCHES = (5.2, 3.6)

# A comparison of runs shows these side by side, and the others with their run.
COMPARED = ("loss_scale", "gradient_exponents")


@dataclass(frozen=True)
class ReportFigure:
    """A figure with its texts.

    Args:
        caption: How to read the figure, or why there is none.
        alt: Text alternative for screen readers.
        source: A `data:` URL of an SVG image; `None` if there is nothing to draw.
    """

    caption: str
    alt: str = ""
    source: str | None = None


def figures(summary: RunSummary) -> dict[str, ReportFigure]:
    """Returns the figures of a run, by the names of the functions in `kmp.plots` that draw them.

    Without a comparison of layers with float32, there is no `layer_errors`; without a loss scale,
    no `loss_scale`; and in another format than float16, no `what_if`.
    """
    metrics = summary.metrics
    found: dict[str, ReportFigure] = {}
    if metrics.has_loss_scale:
        found["loss_scale"] = _loss_scale(summary)
    found["gradient_exponents"] = _gradient_exponents(summary)
    found["exponents_over_steps"] = _exponents_over_steps(summary)
    if metrics.format is FLOAT16:
        found["what_if"] = _what_if(summary)
    found["overflowing_variables"] = _overflowing_variables(summary)
    comparisons = metrics.comparisons
    if comparisons and comparisons[-1][1].layer_errors:
        found["layer_errors"] = _layer_errors(summary)
    return found


def _loss_scale(summary: RunSummary) -> ReportFigure:
    run, metrics = summary.run, summary.metrics
    if not any(row.loss_scale for row in run.rows):
        return ReportFigure("The loss scale was not recorded.")
    caption = "The loss scale, with a mark where steps were skipped."
    alt = (
        f"The loss scale over the training steps, {scale(metrics.scale)} at the end;"
        f" {skipped(metrics)}."
    )
    return ReportFigure(caption, alt, _svg(plots.loss_scale, run))


def _gradient_exponents(summary: RunSummary) -> ReportFigure:
    sample = summary.run.last("sample")
    if sample is None:
        return ReportFigure(NOT_SAMPLED)
    caption = "The newest sample."
    histogram, name = sample.histogram, summary.metrics.format.name
    zones, total = histogram.zones, histogram.total
    alt = (
        f"Histogram of the gradients' binary exponents in step {sample.step}:"
        f" {share_of(zones['zero'], total)} zero"
    )
    if summary.metrics.format is FLOAT16:
        caption += " Below float16's normal range precision is lost; above it is overflow."
        below = share_of(zones["subnormal"] + zones["below_subnormal"], total)
        above = share_of(zones["near_overflow"] + zones["beyond"], total)
        alt += f", {below} below float16's normal range, {above} near overflow or above"
    draw = functools.partial(plots.gradient_exponents, dtype=name)
    return ReportFigure(caption, f"{alt}.", _svg(draw, histogram))


def _exponents_over_steps(summary: RunSummary) -> ReportFigure:
    samples = summary.run.samples
    if not samples:
        return ReportFigure(NOT_SAMPLED)
    alt = (
        f"The gradients' binary exponents in {len(samples)} samples, from step {samples[0].step}"
        f" to {samples[-1].step}."
    )
    source = _svg(plots.exponents_over_steps, summary.run)
    return ReportFigure("The gradients' magnitudes during training.", alt, source)


def _what_if(summary: RunSummary) -> ReportFigure:
    note = other_scales(summary).note
    curve = summary.metrics.curve
    if curve is None:
        return ReportFigure(note)
    caption = "What float16 would lose of the sampled gradients at each constant loss scale."
    alt = f"The share of gradient elements lost at every loss scale. {note}"
    return ReportFigure(caption, alt, _svg(plots.what_if, curve))


def _overflowing_variables(summary: RunSummary) -> ReportFigure:
    run, metrics = summary.run, summary.metrics
    is_float16 = metrics.format is FLOAT16
    if not run.last("overflows_by_variable"):
        if metrics.skipped_steps is None:
            return ReportFigure(f"{'Overflows' if is_float16 else 'NaN and Inf'} were not counted.")
        return ReportFigure("No variable overflowed." if is_float16 else ALL_FINITE)
    alt = "Skipped steps by variable"
    path, part = metrics.main_overflow_origin
    if path:
        alt += f"; {path} was the overflow origin in {share(part)} of those with a finite loss"
    caption = "The variables that overflowed, and the overflow origins."
    if not is_float16:
        caption = "The variables whose gradients were NaN or Inf, and where that began."
    return ReportFigure(caption, f"{alt}.", _svg(plots.overflowing_variables, run))


def _layer_errors(summary: RunSummary) -> ReportFigure:
    step, replay = summary.metrics.comparisons[-1]
    caption = (
        "How far the outputs of each layer are from float32, relative to how they vary between"
        " examples"
    )
    # It is measured only in a batch whose outputs are far from float32.
    has_new_errors = any(each.new_error is not None for each in replay.layer_errors)
    caption += ", and the part that the layer adds to it." if has_new_errors else "."
    alt = (
        f"Errors of {len(replay.layer_errors)} layers in step {step}; the outputs of the model"
        f" differ from float32 by {number(replay.output_error)}"
    )
    origin = error_origin(replay, summary.metrics.format)
    if origin:
        adds = number(origin.new_error)
        alt += f"; a harmful error begins at {origin.layer}, which adds {adds}"
    return ReportFigure(caption, f"{alt}.", _svg(plots.layer_errors, summary.run))


def metric_figures(summaries: Sequence[RunSummary]) -> list[ReportFigure]:
    """Returns a figure for each of the main metrics, with the curves of all runs."""
    runs = {summary.name: summary.run for summary in summaries}
    found = []
    for name in main_metrics(summaries):
        values = ", ".join(
            f"{number(summary.metrics_of_epochs[name])} in {summary.name}"
            for summary in summaries
            if name in summary.metrics_of_epochs
        )
        alt = f"{name} over the training steps; at the end {values}."
        found.append(ReportFigure("", alt, _svg(plots.metric, runs, name)))
    return found


def _svg(draw: Callable[..., object], *data: Any) -> str:
    """Returns a drawing of `kmp.plots` as a `data:` URL."""
    # pyplot would keep the figure and choose a backend.
    figure = Figure(figsize=_INCHES, layout="constrained")
    draw(*data, ax=figure.subplots())
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "kmp"}):  # makes the file reproducible
        figure.savefig(buffer, format="svg", dpi=200, metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
