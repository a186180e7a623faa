"""Pictures of gradient exponents: one histogram, and the histograms of a run as a heat map."""

import re

import numpy as np
from matplotlib.axes import Axes

from kmp.plots import style
from kmp.plots.gradient_heat_map import _EXPONENT, _FLUSHED, _NAME_SIZE, _NEAR, _NORMAL, _OVERFLOW
from kmp.records import NEAR_OVERFLOW_BITS, ExponentHistogram
from kmp.utils import validation


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
    validation.instance("histogram", histogram, ExponentHistogram, "a kmp.records.ExponentHistogram of a run")
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
