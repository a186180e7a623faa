"""The figures of a report, embedded as `data:` URLs."""

import base64
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
from kmp.report.run_tables import NOT_SAMPLED, other_scales
from kmp.report.texts import number, scale, share, share_of

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

    Without a comparison of layers with float32, there is no `layer_errors`.
    """
    run, metrics, sample, scales = (
        summary.run,
        summary.metrics,
        summary.run.last("sample"),
        other_scales(summary),
    )
    found = {
        "loss_scale": ReportFigure("The loss scale was not recorded."),
        "gradient_exponents": ReportFigure(NOT_SAMPLED),
        "exponents_over_steps": ReportFigure(NOT_SAMPLED),
        "what_if": ReportFigure(scales.note),
        "overflowing_variables": ReportFigure(
            "Overflows were not counted."
            if metrics.skipped_steps is None
            else "No variable overflowed."
        ),
    }

    def draw(name: str, data: Any, caption: str, alt: str) -> None:
        found[name] = ReportFigure(caption, alt, _svg(getattr(plots, name), data))

    if any(row.get("loss_scale") for row in run.rows):
        alt = (
            f"The loss scale over the training steps, {scale(metrics.scale)} at the end;"
            f" {skipped(metrics)}."
        )
        draw("loss_scale", run, "The loss scale, with a mark where steps were skipped.", alt)
    if sample is not None:
        caption = (
            "The newest sample. Below float16's normal range precision is lost; above it is"
            " overflow."
        )
        zones, total = sample.histogram.zones, sample.histogram.total
        below, above = (
            zones["subnormal"] + zones["below_subnormal"],
            zones["near_overflow"] + zones["beyond"],
        )
        alt = (
            f"Histogram of the gradients' binary exponents in step {sample.step}:"
            f" {share_of(zones['zero'], total)} zero, {share_of(below, total)} below float16's"
            f" normal range, {share_of(above, total)} near overflow or above."
        )
        draw("gradient_exponents", sample.histogram, caption, alt)
        steps = [sample.step for sample in run.samples]
        alt = (
            f"The gradients' binary exponents in {len(steps)} samples, from step {steps[0]} to"
            f" {steps[-1]}."
        )
        draw("exponents_over_steps", run, "The gradients' magnitudes during training.", alt)
    if (curve := metrics.curve) is not None:
        caption = "What float16 would lose of the sampled gradients at each constant loss scale."
        draw(
            "what_if",
            curve,
            caption,
            f"The share of gradient elements lost at every loss scale. {scales.note}",
        )
    if run.last("overflows_by_variable"):
        path, part = metrics.main_overflow_origin
        origin = (
            f"; {path} was the overflow origin in {share(part)} of those with a finite loss"
            if path
            else ""
        )
        caption = "The variables that overflowed, and the overflow origins."
        draw("overflowing_variables", run, caption, f"Skipped steps by variable{origin}.")
    step, replay = next(reversed(run.comparisons), (0, None))
    if replay is not None and replay.layer_errors:
        caption = (
            "How far the outputs of each layer are from float32, relative to how they vary between"
            " examples, and the part that the layer adds to it."
        )
        first = error_origin(replay)
        begins = (
            f"; a harmful error begins at {first.layer}, which adds {number(first.new_error)}"
            if first
            else ""
        )
        alt = (
            f"Errors of {len(replay.layer_errors)} layers in step {step}; the outputs of the model"
            f" differ from float32 by {number(replay.output_error)}{begins}."
        )
        draw("layer_errors", run, caption, alt)
    return found


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
    figure = Figure(
        figsize=_INCHES, layout="constrained"
    )  # pyplot would keep the figure and choose a backend
    draw(*data, ax=figure.subplots())
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "kmp"}):  # makes the file reproducible
        figure.savefig(buffer, format="svg", dpi=200, metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
