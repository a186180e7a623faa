"""Pictures of gradient exponents: one histogram, and the histograms of a run as a heat map."""

import re
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from kmp import _arguments
from kmp import _plot_style as style
from kmp._formats import FLOAT16
from kmp._histograms import NEAR_OVERFLOW_BITS, ExponentHistogram
from kmp.records import A_RUN, Run

_FLUSHED, _SMALLEST = FLOAT16.flush_exponent, FLOAT16.min_subnormal_exponent
_NORMAL, _OVERFLOW = FLOAT16.min_exponent, FLOAT16.max_exponent + 1
_NEAR = _OVERFLOW - NEAR_OVERFLOW_BITS
_NAME_SIZE = 7.5
_EXPONENT = "binary exponent, floor(log2 |g|)"


def gradient_exponents(histogram: ExponentHistogram, ax: Axes | None = None) -> Axes:
    """Draws gradient magnitudes against float16's range, with the loss scale and without it.

    The scaled gradient is what the backward pass computed. Zeros, inf and nan have no place on a logarithmic axis; the
    legend has them. Without the scale it is drawn where that is known: see `ExponentHistogram.unscaled`. Source: the
    figure of Micikevicius et al., "Mixed Precision Training" (ICLR 2018), section 3.2.

    Args:
        histogram: One sampled histogram.
        ax: Axes to draw on; new ones by default.

    Returns:
        The axes: binary exponents along x, element counts along y, on a log axis.

    Example:
    >>> histogram = ExponentHistogram(np.bincount([0] * 9 + [140] * 5, minlength=280), step=1, loss_scale=1024.0)
    >>> gradient_exponents(histogram).get_title(loc="left")
    'Gradient magnitudes in training step 1'
    """
    _arguments.instance("histogram", histogram, ExponentHistogram, "a kmp.records.ExponentHistogram of a run")
    title = f"Gradient magnitudes in training step {histogram.step}"
    ax = style.label(style.axes(ax), title, _EXPONENT, "gradient elements")
    if not histogram.total:
        return style.empty(ax, "No gradients were sampled.")
    unscaled = _without_scale(histogram)
    if unscaled is not None:
        _draw_counts(ax, unscaled, style.DARK, style.DARK, "--", "gradient without the loss scale")
    _draw_counts(ax, histogram, style.LIGHT, style.DARK_LIGHT, "-", _scaled_name(histogram))
    _shade_float16(ax)
    if not histogram.by_exponent.any():
        ax.text(0.5, 0.5, "No element is finite and not zero.", transform=ax.transAxes, ha="center", color=style.TEXT)
    # Room for the zones' names above the bars.
    ax.set_yscale("log")
    ax.set_ylim(0.8, 10 * max(10, histogram.by_exponent.max()))
    style.legend_above(ax)
    return ax


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
    _arguments.instance("run", run, Run, A_RUN)
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


def _without_scale(histogram: ExponentHistogram) -> ExponentHistogram | None:
    if histogram.loss_scale == 1.0:
        return None
    try:
        return histogram.unscaled
    except ValueError:
        return None


def _scaled_name(histogram: ExponentHistogram) -> str:
    if histogram.loss_scale == 1.0:
        name = "gradient (loss scale 1)"
    else:
        name = f"gradient times loss scale {style.scale_name(histogram.loss_scale)}"
    special = {"inf": histogram.infs, "nan": histogram.nans}
    counted = [f"{count:,} {kind}" for kind, count in special.items() if count]
    return "; ".join([name, f"{histogram.zero_fraction:.1%} are zero", *counted])


def _draw_counts(ax: Axes, histogram: ExponentHistogram, fill: str, color: str, line: str, name: str) -> None:
    filled = np.flatnonzero(histogram.by_exponent)
    if filled.size:
        span = slice(filled[0], filled[-1] + 1)
        edges = np.append(histogram.exponents[span], histogram.exponents[span][-1] + 1)
        ax.stairs(histogram.by_exponent[span], edges, color=fill, fill=True, alpha=0.3)
        ax.stairs(histogram.by_exponent[span], edges, color=color, linestyle=line, linewidth=1.4, label=name)
    else:
        ax.plot([], [], color=color, linestyle=line, label=name)


def _shade_float16(ax: Axes) -> None:
    left, right = min(ax.get_xlim()[0], _FLUSHED - 12), max(ax.get_xlim()[1], _OVERFLOW + 5)
    zones = [
        (left, _FLUSHED, "0.8", f"zero (below {style.power_of_two(_FLUSHED)})"),
        (_FLUSHED, _NORMAL, "0.92", "subnormal"),
        (_NORMAL, _NEAR, None, "float16's normal range"),
        (_NEAR, _OVERFLOW, "#F6DDE0", f"within {NEAR_OVERFLOW_BITS} bits of overflow"),
        (_OVERFLOW, right, "#DDA0A8", "overflow"),
    ]
    for start, stop, color, name in zones:
        if color:
            ax.axvspan(start, stop, color=color, linewidth=0, zorder=0)
        _name_zone(ax, (start + stop) / 2, (stop - start) / (right - left), name)
    ax.set_xlim(left, right)


def _name_zone(ax: Axes, middle: float, share: float, name: str) -> None:
    """Writes the name across the zone, or upright where that is too narrow for it."""
    points = share * ax.get_window_extent().width / ax.figure.dpi * 72
    fits = points > 0.56 * _NAME_SIZE * len(re.sub(r"[${}^]", "", name))
    text = ax.text(middle, 0.985, name, transform=ax.get_xaxis_transform(), ha="center", va="top")
    text.set(rotation=0 if fits else 90, fontsize=_NAME_SIZE, color=style.TEXT)


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
