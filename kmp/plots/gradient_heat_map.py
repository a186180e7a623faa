"""A heat map of gradient exponents over the training steps."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from kmp.plots import style
from kmp.plots.exponent_axis import EXPONENT_LABEL, NORMAL_EXPONENT, OVERFLOW_EXPONENT, SMALLEST_EXPONENT
from kmp.records import RUN_EXPECTED, ExponentHistogram, Run
from kmp.utils import validation

_MOST_CELLS = 1000  # along the steps; a figure has fewer pixels


def exponents_over_steps(run: Run, ax: Axes | None = None) -> Axes:
    """Draws the exponents of the loss-scaled gradient over the steps, as a heat map.

    A cell extends halfway to the samples before and after it; of more than 1,000 samples, neighbours share a cell.
    Shares are of all elements, but zeros, NaN and Inf have no exponent and therefore no cell.

    Args:
        run: A run with samples.
        ax: Axes to draw on; new ones by default. A colour bar is placed next to them.

    Returns:
        The axes: training steps along x, binary exponents along y, the share of elements as colour on a log scale.

    Example:
    >>> from kmp.records import BinCounts, GradientSample
    >>> counts = BinCounts.of(np.bincount([0] * 3 + [130] * 5 + [131] * 8, minlength=280)[None])
    >>> sample = GradientSample(1, 1024.0, ("dense/kernel",), counts, np.array([2.0**-18]), np.array([1e-5]))
    >>> run = Run([{"step": 1, "sample": sample}])
    >>> exponents_over_steps(run).get_xlabel()
    'training step'
    """
    validation.instance("run", run, Run, RUN_EXPECTED)
    ax = style.label(style.axes(ax), "Exponents of the loss-scaled gradient", "training step", EXPONENT_LABEL)
    newest = {histogram.step: histogram for histogram in run.histograms if histogram.total}
    histograms = [newest[step] for step in sorted(newest)]
    if not histograms:
        return style.empty(ax, "No gradients were sampled.")
    ax.set_title(_finding(histograms), loc="left", fontsize="medium")
    low, high = _exponent_range(histograms)
    _draw_shares(ax, histograms, low, high)
    _mark_nonfinite(ax, histograms, high + 1.5)
    _draw_float16_limits(ax)
    ax.set_ylim(low, high + 3)
    style.label_steps(ax, np.array([histogram.step for histogram in histograms]))
    style.legend_above(ax)
    return ax


def _finding(histograms: Sequence[ExponentHistogram]) -> str:
    """Returns the title: the shares of the sampled elements that float16 holds as zero, with fewer bits, or not."""
    total = sum(histogram.total for histogram in histograms)
    zones = {name: sum(histogram.zones[name] for histogram in histograms) for name in histograms[0].zones}
    parts = {"zero": zones["zero"] + zones["below_subnormal"], "subnormal": zones["subnormal"]}
    nonfinite = zones["inf"] + zones["nan"]
    shares = [f"{_percent(count / total)} {name}" for name, count in (parts | {"Inf or NaN": nonfinite}).items()]
    return f"Of the loss-scaled gradient in float16: {', '.join(shares[: 3 if nonfinite else 2])}"


def _percent(share: float) -> str:
    if share < 0.01:
        return "<1%" if share else "0%"
    return ">99%" if 0.99 < share < 1 else f"{share:.0%}"


def _exponent_range(histograms: Sequence[ExponentHistogram]) -> tuple[int, int]:
    """Returns the range of exponents that covers all counts and float16's range."""
    filled = np.flatnonzero(np.logical_or.reduce([histogram.by_exponent > 0 for histogram in histograms]))
    exponents = histograms[0].exponents[filled]
    return min([SMALLEST_EXPONENT - 4, *exponents[:1]]), max([OVERFLOW_EXPONENT, *(exponents[-1:] + 1)])


def _draw_shares(ax: Axes, histograms: Sequence[ExponentHistogram], low: int, high: int) -> None:
    starts = np.arange(0, len(histograms), math.ceil(len(histograms) / _MOST_CELLS))
    cells = [histograms[start:stop] for start, stop in pairwise([*starts, None])]
    counts = np.array([np.sum([one.by_exponent for one in cell], axis=0, dtype=np.float64) for cell in cells])
    totals = np.array([sum(one.total for one in cell) for cell in cells], np.float64)
    is_visible = (histograms[0].exponents >= low) & (histograms[0].exponents < high)
    shares = (counts / totals[:, None])[:, is_visible].T
    edges = _cell_edges(np.array([histogram.step for histogram in histograms], np.float64))
    edges = np.append(edges[starts], edges[-1])
    if not shares.any():
        ax.set_xlim(edges[0], edges[-1])
        return
    smallest, largest = shares[shares > 0].min(), shares.max()
    norm = LogNorm(smallest if smallest < largest else largest / 10, largest)
    nonzero = np.ma.masked_equal(shares, 0)
    mesh = ax.pcolormesh(edges, np.arange(low, high + 1), nonzero, norm=norm, cmap="cividis_r", rasterized=True)
    colour_bar = ax.figure.colorbar(mesh, ax=ax, pad=0.02, aspect=25)
    colour_bar.set_label("share of gradient elements, log scale", fontsize="small")
    colour_bar.ax.tick_params(labelsize=style.SMALL)


def _cell_edges(steps: np.ndarray) -> np.ndarray:
    """Returns the edges of the cells: halfway between neighbouring steps, and not before step 1."""
    if steps.size == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    middles = (steps[1:] + steps[:-1]) / 2
    first = max(2 * steps[0] - middles[0], min(0.5, steps[0] - 0.5))
    return np.concatenate([[first], middles, [2 * steps[-1] - middles[-1]]])


def _mark_nonfinite(ax: Axes, histograms: Sequence[ExponentHistogram], height: float) -> None:
    steps = [histogram.step for histogram in histograms if not histogram.is_finite]
    if steps:
        label = f"sample with NaN or Inf ({len(steps)} of {len(histograms)})"
        drawn = steps[:: len(steps) // _MOST_CELLS + 1]
        ax.plot(drawn, [height] * len(drawn), "x", color=style.MIDDLE, markersize=5, label=label)


def _draw_float16_limits(ax: Axes) -> None:
    background = {"facecolor": "white", "alpha": 0.85, "linewidth": 0, "pad": 0.8}
    labels = {
        OVERFLOW_EXPONENT: "overflow from",
        NORMAL_EXPONENT: "subnormal below",
        SMALLEST_EXPONENT: "smallest subnormal,",
    }
    for exponent, label in labels.items():
        ax.axhline(exponent, color="white", linewidth=2)
        ax.axhline(exponent, color="black", linewidth=0.9, linestyle="--")
        text = f"{label} {style.power_of_two(exponent)}"
        transform = ax.get_yaxis_transform()
        ax.text(0.01, exponent - 0.6, text, transform=transform, va="top", fontsize=style.SMALL, bbox=background)
