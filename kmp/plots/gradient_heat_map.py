"""Pictures of gradient exponents: one histogram, and the histograms of a run as a heat map."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from kmp.plots import style
from kmp.records import NEAR_OVERFLOW_BITS, RUN_EXPECTED, ExponentHistogram, Run
from kmp.utils import FLOAT16, validation

_FLUSHED, _SMALLEST = FLOAT16.flush_exponent, FLOAT16.min_subnormal_exponent
_NORMAL, _OVERFLOW = FLOAT16.min_exponent, FLOAT16.max_exponent + 1
_NEAR = _OVERFLOW - NEAR_OVERFLOW_BITS
_NAME_SIZE = 7.5
_EXPONENT = "binary exponent, floor(log2 |g|)"


def exponents_over_steps(run: Run, ax: Axes | None = None) -> Axes:
    """Draws the exponents of the loss-scaled gradient over the steps, as a heat map.

    A cell reaches half-way to the samples before and after it. Shares are of all elements; those that are zero, inf or
    nan have no exponent, and no cell.

    Args:
        run: A run with samples.
        ax: Axes to draw on; new ones by default. A colour bar is set beside them.

    Returns:
        The axes: training steps along x, binary exponents along y, the share of elements as colour, on a log scale.

    Example:
    >>> gradient = {"zero": 3, "inf": 0, "nan": 0, "first": -20, "counts": [5, 8, 2], "amax": 2.0**-18, "norm": 1e-5}
    >>> run = Run([{"step": 1, "sample": {"loss_scale": 1024.0, "variables": {"dense/kernel": gradient}}}])
    >>> exponents_over_steps(run).get_xlabel()
    'training step'
    """
    validation.instance("run", run, Run, RUN_EXPECTED)
    ax = style.label(style.axes(ax), "Exponents of the loss-scaled gradient", "training step", _EXPONENT)
    newest = {histogram.step: histogram for histogram in run.histograms if histogram.total}
    histograms = [newest[step] for step in sorted(newest)]
    if not histograms:
        return style.empty(ax, "No gradients were sampled.")
    low, high = _filled_range(histograms)
    _draw_shares(ax, histograms, low, high)
    _mark_overflown(ax, histograms, high + 1.5)
    _draw_edges(ax)
    ax.set_ylim(low, high + 3)
    style.label_steps(ax, np.array([histogram.step for histogram in histograms]))
    style.legend_above(ax)
    return ax


def _filled_range(histograms: Sequence[ExponentHistogram]) -> tuple[int, int]:
    """The exponents to show: those that are filled, and float16's."""
    filled = np.flatnonzero(np.sum([histogram.by_exponent for histogram in histograms], axis=0))
    exponents = histograms[0].exponents[filled]
    return min([_SMALLEST - 4, *exponents[:1]]), max([_OVERFLOW, *(exponents[-1:] + 1)])


def _draw_shares(ax: Axes, histograms: Sequence[ExponentHistogram], low: int, high: int) -> None:
    counts = np.array([histogram.by_exponent for histogram in histograms], np.float64)
    totals = np.array([histogram.total for histogram in histograms], np.float64)
    shown = (histograms[0].exponents >= low) & (histograms[0].exponents < high)
    shares = (counts / totals[:, None])[:, shown].T
    edges = _cell_edges(np.array([histogram.step for histogram in histograms], np.float64))
    if not shares.any():
        ax.set_xlim(edges[0], edges[-1])
        return
    smallest, largest = shares[shares > 0].min(), shares.max()
    norm = LogNorm(smallest if smallest < largest else largest / 10, largest)
    visible = np.ma.masked_equal(shares, 0)
    mesh = ax.pcolormesh(edges, np.arange(low, high + 1), visible, norm=norm, cmap="cividis_r", rasterized=True)
    bar = ax.figure.colorbar(mesh, ax=ax, pad=0.02, aspect=25)
    bar.set_label("share of gradient elements, log scale", fontsize="small")
    bar.ax.tick_params(labelsize=style.SMALL)


def _cell_edges(steps: np.ndarray) -> np.ndarray:
    """Returns where the cells of these steps begin and end: in the middle between two, and not before step 1."""
    if steps.size == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    middle = (steps[1:] + steps[:-1]) / 2
    first = max(2 * steps[0] - middle[0], min(0.5, steps[0] - 0.5))
    return np.concatenate([[first], middle, [2 * steps[-1] - middle[-1]]])


def _mark_overflown(ax: Axes, histograms: Sequence[ExponentHistogram], height: float) -> None:
    steps = [histogram.step for histogram in histograms if not histogram.is_finite]
    if steps:
        name = f"sample with inf or nan ({len(steps)} of {len(histograms)})"
        ax.plot(steps, [height] * len(steps), "x", color=style.MIDDLE, markersize=5, label=name)


def _draw_edges(ax: Axes) -> None:
    ground = {"facecolor": "white", "alpha": 0.85, "linewidth": 0, "pad": 0.8}
    names = {_OVERFLOW: "overflow from", _NORMAL: "subnormal below", _SMALLEST: "float16's smallest,"}
    for exponent, name in names.items():
        ax.axhline(exponent, color="white", linewidth=2)
        ax.axhline(exponent, color="black", linewidth=0.9, linestyle="--")
        text = f"{name} {style.power_of_two(exponent)}"
        at = ax.get_yaxis_transform()
        ax.text(0.01, exponent - 0.6, text, transform=at, va="top", fontsize=style.SMALL, bbox=ground)
