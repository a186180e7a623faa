"""Plots of gradient exponents against float16's range: a histogram of one step, and a heat map over the steps."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from kmp.plots import style
from kmp.records import NEAR_OVERFLOW_BITS, RUN_EXPECTED, ExponentHistogram, Run
from kmp.utils import FLOAT16, validation

_EXPONENT_LABEL = "binary exponent, floor(log2 |g|)"
_FLUSH, _SUBNORMAL, _NORMAL = (
    FLOAT16.flush_exponent,
    FLOAT16.min_subnormal_exponent,
    FLOAT16.min_exponent,
)
_OVERFLOW = FLOAT16.max_exponent + 1
_ZONE_FONT_SIZE = 7.5
_MOST_CELLS = 1000  # along the steps; a figure has fewer pixels


def gradient_exponents(histogram: ExponentHistogram, ax: Axes | None = None) -> Axes:
    """Draws gradient magnitudes against float16's range, with and without the loss scale.

    The backward pass computes the scaled gradient. Zeros, NaN and Inf do not fit on a logarithmic
    axis, so the legend counts them. The unscaled gradient is drawn if the scale is not 1, see
    `ExponentHistogram.unscaled`. Source: the figure in section 3.2 of Micikevicius et al., "Mixed
    Precision Training" (ICLR 2018).

    Args:
        histogram: One sampled histogram.
        ax: Axes to draw on; new ones by default.

    Returns:
        The axes: binary exponents along x, element counts along y on a log axis.

    Example:
    >>> histogram = ExponentHistogram(np.bincount([0] * 9 + [140] * 5, minlength=280), step=1, loss_scale=1024.0)
    >>> gradient_exponents(histogram).get_title(loc="left")
    'Step 1: 64.3% of gradients zero, 64.3% without scaling'
    """
    validation.instance(
        "histogram", histogram, ExponentHistogram, "a kmp.records.ExponentHistogram of a run"
    )
    title = f"Gradient magnitudes in training step {histogram.step}"
    ax = style.axes(ax, title, _EXPONENT_LABEL, "gradient elements")
    if not histogram.total:
        return style.empty(ax, "No gradients were sampled.")
    scale, zeros = histogram.loss_scale, histogram.zero_fraction
    title = f"Step {histogram.step}: {zeros:.1%} of gradients zero"
    if scale != 1.0:
        unscaled = histogram.unscaled
        _draw_counts(ax, unscaled, style.DARK, style.DARK, "--", "gradient without the loss scale")
        if scale > 1.0:
            flushed = unscaled.by_exponent[unscaled.exponents < _FLUSH].sum() / histogram.total
            title += f", {zeros + flushed:.1%} without scaling"
    label = (
        "gradient (loss scale 1)"
        if scale == 1.0
        else f"gradient times loss scale {style.scale_name(scale)}"
    )
    nonfinite = [
        f"; {count:,} {name}"
        for count, name in ((histogram.infs, "Inf"), (histogram.nans, "NaN"))
        if count
    ]
    label += "".join([f"; {zeros:.1%} are zero", *nonfinite])
    _draw_counts(ax, histogram, style.LIGHT, style.DARK_LIGHT, "-", label)
    _shade_float16(ax)
    if not histogram.by_exponent.any():
        ax.text(
            0.5,
            0.5,
            "No element is finite and nonzero.",
            transform=ax.transAxes,
            ha="center",
            color=style.TEXT,
        )
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


def _shade_float16(ax: Axes) -> None:
    """Shades the zones of float16's range and labels them, vertically where a zone is too narrow for its label."""
    left, right = min(ax.get_xlim()[0], _FLUSH - 12), max(ax.get_xlim()[1], _OVERFLOW + 5)
    near_overflow = _OVERFLOW - NEAR_OVERFLOW_BITS
    points_per_bit = ax.get_window_extent().width / ax.figure.dpi * 72 / (right - left)
    for start, stop, color, label in (
        (left, _FLUSH, "0.8", f"zero (below {style.power_of_two(_FLUSH)})"),
        (_FLUSH, _NORMAL, "0.92", "subnormal"),
        (_NORMAL, near_overflow, None, "float16's normal range"),
        (near_overflow, _OVERFLOW, "#F6DDE0", f"within {NEAR_OVERFLOW_BITS} bits of overflow"),
        (_OVERFLOW, right, "#DDA0A8", "overflow"),
    ):
        if color:
            ax.axvspan(start, stop, color=color, linewidth=0, zorder=0)
        width = 0.56 * _ZONE_FONT_SIZE * len(re.sub(r"[${}^]", "", label))
        rotation = 0 if width < points_per_bit * (stop - start) else 90
        text = ax.text(
            (start + stop) / 2, 0.985, label, transform=ax.get_xaxis_transform(), rotation=rotation
        )
        text.set(ha="center", va="top", fontsize=_ZONE_FONT_SIZE, color=style.TEXT)
    ax.set_xlim(left, right)


def exponents_over_steps(run: Run, ax: Axes | None = None) -> Axes:
    """Draws the exponents of the loss-scaled gradient over the steps, as a heat map.

    A cell extends halfway to the samples before and after it; of more than 1,000 samples,
    neighbours share a cell. Shares are of all elements, but zeros, NaN and Inf have no exponent and
    therefore no cell.

    Args:
        run: A run with samples.
        ax: Axes to draw on; new ones by default. A colour bar is placed next to them.

    Returns:
        The axes: training steps along x, binary exponents along y, the share of elements as colour
        on a log scale.

    Example:
    >>> from kmp.records import GradientSample
    >>> counts = np.bincount([0] * 3 + [130] * 5 + [131] * 8, minlength=280)[None]
    >>> sample = GradientSample(1, 1024.0, ("dense/kernel",), counts, np.array([2.0**-18]), np.array([1e-5]))
    >>> run = Run([{"step": 1, "sample": sample}])
    >>> exponents_over_steps(run).get_xlabel()
    'training step'
    """
    validation.instance("run", run, Run, RUN_EXPECTED)
    ax = style.axes(ax, "Exponents of the loss-scaled gradient", "training step", _EXPONENT_LABEL)
    newest = {histogram.step: histogram for histogram in run.histograms if histogram.total}
    histograms = [newest[step] for step in sorted(newest)]
    if not histograms:
        return style.empty(ax, "No gradients were sampled.")
    edges, exponents, shares = _cells(histograms)
    ax.set_xlim(edges[0], edges[-1])
    if shares.any():
        smallest, largest = shares[shares > 0].min(), shares.max()
        norm = LogNorm(smallest if smallest < largest else largest / 10, largest)
        filled = np.ma.masked_equal(shares, 0)
        mesh = ax.pcolormesh(edges, exponents, filled, norm=norm, cmap="cividis_r", rasterized=True)
        colour_bar = ax.figure.colorbar(mesh, ax=ax, pad=0.02, aspect=25)
        colour_bar.set_label("share of gradient elements, log scale", fontsize="small")
        colour_bar.ax.tick_params(labelsize=style.SMALL)
    nonfinite = [histogram.step for histogram in histograms if not histogram.is_finite]
    if nonfinite:
        label = f"sample with NaN or Inf ({len(nonfinite)} of {len(histograms)})"
        marks = nonfinite[:: len(nonfinite) // _MOST_CELLS + 1]
        ax.plot(
            marks,
            [exponents[-1] + 1.5] * len(marks),
            "x",
            color=style.MIDDLE,
            markersize=5,
            label=label,
        )
    for exponent, label in (
        (_OVERFLOW, "overflow from"),
        (_NORMAL, "subnormal below"),
        (_SUBNORMAL, "smallest subnormal,"),
    ):
        ax.axhline(exponent, color="white", linewidth=2)
        ax.axhline(exponent, color="black", linewidth=0.9, linestyle="--")
        text = f"{label} {style.power_of_two(exponent)}"
        limit = ax.text(
            0.01,
            exponent - 0.6,
            text,
            transform=ax.get_yaxis_transform(),
            va="top",
            fontsize=style.SMALL,
        )
        limit.set_bbox({"facecolor": "white", "alpha": 0.85, "linewidth": 0, "pad": 0.8})
    ax.set_ylim(exponents[0], exponents[-1] + 3)
    style.label_steps(ax, np.array([histogram.step for histogram in histograms]))
    style.legend_above(ax, title=_zones_title(histograms))
    return ax


def _cells(histograms: Sequence[ExponentHistogram]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the cells of the heat map.

    Returns:
        The edges of the cells along the steps; their edges along the exponents, which cover all
        counts and float16's range; and the share of elements in each cell, of shape `(exponents,
        steps)`.
    """
    steps = np.array([histogram.step for histogram in histograms], np.float64)
    middles = (steps[1:] + steps[:-1]) / 2
    before, after = (middles[0] - steps[0], steps[-1] - middles[-1]) if middles.size else (0.5, 0.5)
    starts = np.arange(
        0, len(histograms), math.ceil(len(histograms) / _MOST_CELLS)
    )  # the first sample of each cell
    first = max(steps[0] - before, min(0.5, steps[0] - 0.5))  # not before step 1
    edges = np.array([first, *middles[starts[1:] - 1], steps[-1] + after])
    groups = [histograms[start:stop] for start, stop in pairwise([*starts, None])]
    counts = np.array(
        [np.sum([one.by_exponent for one in group], axis=0, dtype=np.float64) for group in groups]
    )
    totals = np.array([sum(one.total for one in group) for group in groups], np.float64)
    exponents = histograms[0].exponents
    filled = exponents[counts.any(axis=0)]
    low, high = min([_SUBNORMAL - 4, *filled[:1]]), max([_OVERFLOW, *(filled[-1:] + 1)])
    shares = (counts / totals[:, None])[:, (exponents >= low) & (exponents < high)].T
    return edges, np.arange(low, high + 1), shares


def _zones_title(histograms: Sequence[ExponentHistogram]) -> str:
    """Returns the shares of the sampled elements that float16 holds as zero, with fewer bits, or not at all."""
    zones = sum((Counter(histogram.zones) for histogram in histograms), Counter[str]())
    counts = {
        "zero": zones["zero"] + zones["below_subnormal"],
        "subnormal": zones["subnormal"],
        "Inf or NaN": zones["inf"] + zones["nan"],
    }
    shares = {
        name: count / zones.total()
        for name, count in counts.items()
        if count or name != "Inf or NaN"
    }
    texts = [
        "<1%" if 0 < part < 0.01 else ">99%" if 0.99 < part < 1 else f"{part:.0%}"
        for part in shares.values()
    ]
    parts = [f"{text} {name}" for text, name in zip(texts, shares, strict=True)]
    return f"Of the loss-scaled gradient in float16: {', '.join(parts)}"
