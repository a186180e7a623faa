"""Plots of gradient exponents and the range of a format: of one step, and over the steps."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.ticker import MaxNLocator

from kmp.plots import style
from kmp.records import BIN_COUNT, ExponentHistogram, GradientSample, Run
from kmp.records.exponent_histogram import NEAR_OVERFLOW_BITS
from kmp.records.run import RUN_EXPECTED
from kmp.utils import validation
from kmp.utils.float_formats import FLOAT16, FORMATS, FloatFormat

_EXPONENT_LABEL = "binary exponent, floor(log2 |g|)"
_ZONE_FONT_SIZE = 7.5
_MOST_CELLS = 1000  # along the steps; a figure has fewer pixels
_MARGIN_BITS = 4  # beside the gradients
_FORMATS = {each.name: each for each in FORMATS}


def gradient_exponents(
    histogram: ExponentHistogram, ax: Axes | None = None, dtype: str = FLOAT16.name
) -> Axes:
    """Draws gradient magnitudes and the range of a format, with and without the loss scale.

    The backward pass computes the scaled gradient. Zeros, NaN and Inf do not fit on a logarithmic
    axis, so the legend counts them. The unscaled gradient is drawn if the scale is not 1, see
    `ExponentHistogram.unscaled`. Source: the figure in section 3.2 of Micikevicius et al., "Mixed
    Precision Training" (ICLR 2018).

    Args:
        histogram: One sampled histogram.
        ax: Axes to draw on; new ones by default.
        dtype: The dtype in which the gradients were computed: `"float16"`, `"bfloat16"` or
            `"float32"`. The axis has all of float16's range; of the others, it shows the limits
            that gradients come near to.

    Returns:
        The axes: binary exponents along x, element counts along y on a log axis.

    Example:
    >>> import kmp, numpy as np
    >>> from kmp.records import ExponentHistogram
    >>> counts = np.bincount([0] * 9 + [140] * 5, minlength=280)
    >>> histogram = ExponentHistogram(counts, step=1, loss_scale=1024.0)
    >>> kmp.plots.gradient_exponents(histogram).get_title(loc="left")
    'Step 1: 64.3% of gradients zero, 64.3% without scaling'
    """
    expected = "a kmp.records.ExponentHistogram of a run"
    validation.instance("histogram", histogram, ExponentHistogram, expected)
    number_format = _FORMATS[validation.one_of("dtype", dtype, tuple(_FORMATS))]
    title = f"Gradient magnitudes in training step {histogram.step}"
    ax = style.axes(ax, title, _EXPONENT_LABEL, "gradient elements")
    if not histogram.total:
        return style.empty(ax, "No gradients were sampled.")
    scale, zeros = histogram.loss_scale, histogram.zero_fraction
    title = f"Step {histogram.step}: {zeros:.1%} of gradients zero"
    label = "gradient (loss scale 1)" if number_format is FLOAT16 else "gradient"
    if scale != 1.0:
        unscaled = histogram.unscaled
        _draw_counts(ax, unscaled, style.DARK, style.DARK, "--", "gradient without the loss scale")
        label = f"gradient times loss scale {style.scale_name(scale)}"
    if scale > 1.0 and number_format is FLOAT16:
        is_flushed = unscaled.exponents < FLOAT16.flush_exponent
        flushed = unscaled.by_exponent[is_flushed].sum() / histogram.total
        title += f", {zeros + flushed:.1%} without scaling"
    label += f"; {zeros:.1%} are zero"
    for count, name in ((histogram.infs, "Inf"), (histogram.nans, "NaN")):
        label += f"; {count:,} {name}" if count else ""
    _draw_counts(ax, histogram, style.LIGHT, style.DARK_LIGHT, "-", label)
    _shade_range(ax, number_format)
    if not histogram.by_exponent.any():
        text = ax.text(0.5, 0.5, "No element is finite and nonzero.", transform=ax.transAxes)
        text.set(ha="center", color=style.TEXT)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    # Leaves space for the zone labels above the bars.
    ax.set_yscale("log")
    ax.set_ylim(0.8, 10 * max(10, histogram.by_exponent.max()))
    style.legend_above(ax, title=title)
    return ax


def _draw_counts(
    ax: Axes, histogram: ExponentHistogram, fill: str, color: str, linestyle: str, label: str
) -> None:
    if not histogram.by_exponent.any():
        ax.plot([], [], color=color, linestyle=linestyle, label=label)
        return
    edges, counts = histogram.log2_buckets()
    ax.stairs(counts, edges, color=fill, fill=True, alpha=0.3)
    ax.stairs(counts, edges, color=color, linestyle=linestyle, linewidth=1.4, label=label)


class _Zone(NamedTuple):
    """A part of the axis of exponents, from `start` to `stop`."""

    start: float
    stop: float
    color: str | None
    label: str

    def within(self, left: float, right: float) -> "_Zone":
        """Returns the part between two points; it is empty if it ends before it starts."""
        return self._replace(start=max(self.start, left), stop=min(self.stop, right))


def _shade_range(ax: Axes, number_format: FloatFormat) -> None:
    """Shades the zones of a format's range that are on the axis, and labels them.

    A label is vertical where the zone is too narrow for it.
    """
    flush, overflow = number_format.flush_exponent, number_format.max_exponent + 1
    left, right = ax.get_xlim()
    if number_format is FLOAT16:
        left, right = min(left, flush - 12), max(right, overflow + 5)
    else:
        left, right = left - _MARGIN_BITS, right + _MARGIN_BITS
    normal, near_overflow = number_format.min_exponent, overflow - NEAR_OVERFLOW_BITS
    all_zones = (
        _Zone(left, flush, "0.8", f"zero (below {style.power_of_two(flush)})"),
        _Zone(flush, normal, "0.92", "subnormal"),
        _Zone(normal, near_overflow, None, f"{number_format.name}'s normal range"),
        _Zone(near_overflow, overflow, "#F6DDE0", f"within {NEAR_OVERFLOW_BITS} bits of overflow"),
        _Zone(overflow, right, "#DDA0A8", "overflow"),
    )
    on_axis = (zone.within(left, right) for zone in all_zones)
    zones = [zone for zone in on_axis if zone.start < zone.stop]
    points_per_bit = ax.get_window_extent().width / ax.figure.dpi * 72 / (right - left)
    for zone in zones:
        if zone.color:
            ax.axvspan(zone.start, zone.stop, color=zone.color, linewidth=0, zorder=0)
        middle = (zone.start + zone.stop) / 2
        shown_characters = len(re.sub(r"[${}^]", "", zone.label))
        width = 0.56 * _ZONE_FONT_SIZE * shown_characters
        fits = width < points_per_bit * (zone.stop - zone.start)
        text = ax.text(middle, 0.985, zone.label, transform=ax.get_xaxis_transform())
        text.set(rotation=0 if fits else 90, ha="center", va="top")
        text.set(fontsize=_ZONE_FONT_SIZE, color=style.TEXT)
    ax.set_xlim(left, right)


def exponents_over_steps(run: Run, ax: Axes | None = None) -> Axes:
    """Draws the exponents of the gradient, with its loss scale, over the steps, as a heat map.

    Lines mark the limits of float16 in a run in float16. A cell extends halfway to the samples
    before and after it; of more than 1,000 samples, neighbours share a cell. Shares are of all
    elements, but zeros, NaN and Inf have no exponent and therefore no cell.

    Args:
        run: A run with samples.
        ax: Axes to draw on; new ones by default. A colour bar is placed next to them.

    Returns:
        The axes: training steps along x, binary exponents along y, the share of elements as colour
        on a log scale.

    Example:
    >>> import kmp, numpy as np
    >>> from kmp.records import GradientSample, Record, Run
    >>> counts = np.bincount([0] * 3 + [130] * 5 + [131] * 8, minlength=280)[None]
    >>> amax, norm = np.array([2.0**-18]), np.array([1e-5])
    >>> sample = GradientSample(1, 1024.0, ("dense/kernel",), counts, amax, norm)
    >>> run = Run([Record(step=1, sample=sample)])
    >>> kmp.plots.exponents_over_steps(run).get_xlabel()
    'training step'
    """
    validation.instance("run", run, Run, RUN_EXPECTED)
    is_float16 = run.format is FLOAT16
    title = f"Exponents of the {'loss-scaled ' if run.has_loss_scale else ''}gradient"
    ax = style.axes(ax, title, "training step", _EXPONENT_LABEL)
    newest = {sample.step: sample for sample in run.samples if sample.bins.size}
    samples = [newest[step] for step in sorted(newest)]
    if not samples:
        return style.empty(ax, "No gradients were sampled.")
    groups = _groups(samples)
    cells = _cells(samples, groups, FLOAT16 if is_float16 else None)
    top = cells.exponent_edges[-1]
    ax.set_xlim(cells.step_edges[0], cells.step_edges[-1])
    _draw_cells(ax, cells)
    _mark_nonfinite(ax, samples, top + 1.5)
    if is_float16:
        _mark_limits(ax)
    ax.set_ylim(cells.exponent_edges[0], top + 3)
    style.label_steps(ax, np.array([sample.step for sample in samples]))
    style.legend_above(ax, title=_zones_title(groups, run))
    return ax


class _Cells(NamedTuple):
    """The cells of the heat map.

    Args:
        step_edges: The edges along the steps.
        exponent_edges: The edges along the exponents, which cover all counts and the range of
            float16 in a run in float16.
        shares: The share of elements in each cell, of shape `(exponents, steps)`.
    """

    step_edges: np.ndarray
    exponent_edges: np.ndarray
    shares: np.ndarray


def _groups(samples: Sequence[GradientSample]) -> list[ExponentHistogram]:
    """Returns the histograms of neighbours that share a cell, each with its first step."""
    stride = _stride(samples)
    groups = []
    for start in range(0, len(samples), stride):
        counts = np.zeros(BIN_COUNT, np.int64)
        for sample in samples[start : start + stride]:
            counts[sample.bins] += sample.bin_counts.sum(axis=0, dtype=np.int64)
        groups.append(ExponentHistogram(counts, samples[start].step, samples[start].loss_scale))
    return groups


def _stride(samples: Sequence[GradientSample]) -> int:
    return math.ceil(len(samples) / _MOST_CELLS)


def _cells(
    samples: Sequence[GradientSample],
    groups: Sequence[ExponentHistogram],
    number_format: FloatFormat | None,
) -> _Cells:
    steps = np.array([sample.step for sample in samples], np.float64)
    middles = (steps[1:] + steps[:-1]) / 2
    before = after = 0.5
    if middles.size:
        before, after = middles[0] - steps[0], steps[-1] - middles[-1]
    first = max(steps[0] - before, min(0.5, steps[0] - 0.5))  # not before step 1

    starts = np.arange(0, len(samples), _stride(samples))  # the first sample of each group
    edges = np.array([first, *middles[starts[1:] - 1], steps[-1] + after])
    counts = [group.by_exponent for group in groups]
    totals = [float(group.total) for group in groups]

    exponents = groups[0].exponents
    shown = list(exponents[np.any(counts, axis=0)]) or [-1]
    low, high = shown[0] - _MARGIN_BITS, shown[-1] + _MARGIN_BITS
    if number_format:
        low = min(number_format.min_subnormal_exponent - _MARGIN_BITS, shown[0])
        high = max(number_format.max_exponent, shown[-1]) + 1
    is_shown = (exponents >= low) & (exponents < high)
    shares = np.array(counts) / np.array(totals)[:, None]
    return _Cells(edges, np.arange(low, high + 1), shares[:, is_shown].T)


def _draw_cells(ax: Axes, cells: _Cells) -> None:
    shares = cells.shares
    if not shares.any():
        return
    smallest, largest = shares[shares > 0].min(), shares.max()
    norm = LogNorm(smallest if smallest < largest else largest / 10, largest)
    mesh = ax.pcolormesh(
        cells.step_edges,
        cells.exponent_edges,
        np.ma.masked_equal(shares, 0),
        norm=norm,
        cmap="cividis_r",
        rasterized=True,
    )
    colour_bar = ax.figure.colorbar(mesh, ax=ax, pad=0.02, aspect=25)
    colour_bar.set_label("share of gradient elements, log scale", fontsize="small")
    colour_bar.ax.tick_params(labelsize=style.SMALL)


def _mark_nonfinite(ax: Axes, samples: Sequence[GradientSample], y: float) -> None:
    """Draws a cross at `y` for each sample with NaN or Inf."""
    steps = [sample.step for sample in samples if not sample.is_finite]
    if not steps:
        return
    label = f"sample with NaN or Inf ({len(steps)} of {len(samples)})"
    marks = steps[:: len(steps) // _MOST_CELLS + 1]
    (crosses,) = ax.plot(marks, [y] * len(marks), "x", label=label)
    crosses.set(color=style.MIDDLE, markersize=5)


def _mark_limits(ax: Axes) -> None:
    """Draws the limits of float16 as lines across the steps."""
    limits = {
        "overflow from": FLOAT16.max_exponent + 1,
        "subnormal below": FLOAT16.min_exponent,
        "smallest subnormal,": FLOAT16.min_subnormal_exponent,
    }
    for label, exponent in limits.items():
        ax.axhline(exponent, color="white", linewidth=2)
        ax.axhline(exponent, color="black", linewidth=0.9, linestyle="--")
        text = f"{label} {style.power_of_two(exponent)}"
        limit = ax.text(0.01, exponent - 0.6, text, transform=ax.get_yaxis_transform())
        limit.set(va="top", fontsize=style.SMALL)
        limit.set_bbox({"facecolor": "white", "alpha": 0.85, "linewidth": 0, "pad": 0.8})


def _zones_title(histograms: Sequence[ExponentHistogram], run: Run) -> str:
    """Returns the shares of elements that float16 holds as zero, with fewer bits, or not at all.

    For a run in another format, returns the shares of those that are zero, or not finite.
    """
    zones = Counter[str]()
    for histogram in histograms:
        zones.update(histogram.zones)
    total = zones.total()
    gradient = "the loss-scaled gradient" if run.has_loss_scale else "the gradient"
    parts = [f"{_whole_percent(zones['zero'] / total)} zero"]
    if run.format is FLOAT16:
        gradient += " in float16"
        zero = zones["zero"] + zones["below_subnormal"]
        parts = [
            f"{_whole_percent(zero / total)} zero",
            f"{_whole_percent(zones['subnormal'] / total)} subnormal",
        ]
    nonfinite = zones["inf"] + zones["nan"]
    if nonfinite:
        parts.append(f"{_whole_percent(nonfinite / total)} Inf or NaN")
    return f"Of {gradient}: {', '.join(parts)}"


def _whole_percent(share: float) -> str:
    if 0 < share < 0.01:
        return "<1%"
    return ">99%" if 0.99 < share < 1 else f"{share:.0%}"
