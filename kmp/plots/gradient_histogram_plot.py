"""A histogram of gradient exponents against float16's range."""

import re

import numpy as np
from matplotlib.axes import Axes

from kmp.plots import style
from kmp.plots.exponent_axis import (
    EXPONENT_LABEL,
    FLUSH_EXPONENT,
    NEAR_OVERFLOW_EXPONENT,
    NORMAL_EXPONENT,
    OVERFLOW_EXPONENT,
)
from kmp.records import NEAR_OVERFLOW_BITS, ExponentHistogram
from kmp.utils import validation

_ZONE_FONT_SIZE = 7.5


def gradient_exponents(histogram: ExponentHistogram, ax: Axes | None = None) -> Axes:
    """Draws gradient magnitudes against float16's range, with and without the loss scale.

    The backward pass computes the scaled gradient. Zeros, NaN and Inf do not fit on a logarithmic axis, so the legend
    counts them. The unscaled gradient is drawn if it is known, see `ExponentHistogram.unscaled`. Source: the figure in
    section 3.2 of Micikevicius et al., "Mixed Precision Training" (ICLR 2018).

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
    validation.instance("histogram", histogram, ExponentHistogram, "a kmp.records.ExponentHistogram of a run")
    title = f"Gradient magnitudes in training step {histogram.step}"
    ax = style.label(style.axes(ax), title, EXPONENT_LABEL, "gradient elements")
    if not histogram.total:
        return style.empty(ax, "No gradients were sampled.")
    unscaled = _unscaled(histogram)
    ax.set_title(_title(histogram, unscaled), loc="left", fontsize="medium")
    if unscaled is not None:
        _draw_counts(ax, unscaled, style.DARK, style.DARK, "--", "gradient without the loss scale")
    _draw_counts(ax, histogram, style.LIGHT, style.DARK_LIGHT, "-", _scaled_label(histogram))
    _shade_float16(ax)
    if not histogram.by_exponent.any():
        ax.text(0.5, 0.5, "No element is finite and nonzero.", transform=ax.transAxes, ha="center", color=style.TEXT)
    # Leaves space for the zone labels above the bars.
    ax.set_yscale("log")
    ax.set_ylim(0.8, 10 * max(10, histogram.by_exponent.max()))
    style.legend_above(ax)
    return ax


def _unscaled(histogram: ExponentHistogram) -> ExponentHistogram | None:
    if histogram.loss_scale == 1.0:
        return None
    try:
        return histogram.unscaled
    except ValueError:
        return None


def _title(histogram: ExponentHistogram, unscaled: ExponentHistogram | None) -> str:
    """Returns what the figure shows: how many elements are zero, and would be without the loss scale."""
    text = f"Step {histogram.step}: {histogram.zero_fraction:.1%} of gradients zero"
    if unscaled is None or unscaled.loss_scale < 1.0 or histogram.loss_scale < 1.0:
        return text
    flushed = unscaled.by_exponent[unscaled.exponents < FLUSH_EXPONENT].sum() / histogram.total
    return f"{text}, {histogram.zero_fraction + flushed:.1%} without scaling"


def _scaled_label(histogram: ExponentHistogram) -> str:
    if histogram.loss_scale == 1.0:
        label = "gradient (loss scale 1)"
    else:
        label = f"gradient times loss scale {style.scale_name(histogram.loss_scale)}"
    nonfinite = {"Inf": histogram.infs, "NaN": histogram.nans}
    counts = [f"{count:,} {value}" for value, count in nonfinite.items() if count]
    return "; ".join([label, f"{histogram.zero_fraction:.1%} are zero", *counts])


def _draw_counts(ax: Axes, histogram: ExponentHistogram, fill: str, color: str, linestyle: str, label: str) -> None:
    nonempty = np.flatnonzero(histogram.by_exponent)
    if nonempty.size:
        span = slice(nonempty[0], nonempty[-1] + 1)
        edges = np.append(histogram.exponents[span], histogram.exponents[span][-1] + 1)
        ax.stairs(histogram.by_exponent[span], edges, color=fill, fill=True, alpha=0.3)
        ax.stairs(histogram.by_exponent[span], edges, color=color, linestyle=linestyle, linewidth=1.4, label=label)
    else:
        ax.plot([], [], color=color, linestyle=linestyle, label=label)


def _shade_float16(ax: Axes) -> None:
    left, right = min(ax.get_xlim()[0], FLUSH_EXPONENT - 12), max(ax.get_xlim()[1], OVERFLOW_EXPONENT + 5)
    zones = [
        (left, FLUSH_EXPONENT, "0.8", f"zero (below {style.power_of_two(FLUSH_EXPONENT)})"),
        (FLUSH_EXPONENT, NORMAL_EXPONENT, "0.92", "subnormal"),
        (NORMAL_EXPONENT, NEAR_OVERFLOW_EXPONENT, None, "float16's normal range"),
        (NEAR_OVERFLOW_EXPONENT, OVERFLOW_EXPONENT, "#F6DDE0", f"within {NEAR_OVERFLOW_BITS} bits of overflow"),
        (OVERFLOW_EXPONENT, right, "#DDA0A8", "overflow"),
    ]
    for start, stop, color, label in zones:
        if color:
            ax.axvspan(start, stop, color=color, linewidth=0, zorder=0)
        _label_zone(ax, (start + stop) / 2, (stop - start) / (right - left), label)
    ax.set_xlim(left, right)


def _label_zone(ax: Axes, middle: float, share: float, label: str) -> None:
    """Writes the label horizontally, or vertically if the zone is too narrow for it."""
    points = share * ax.get_window_extent().width / ax.figure.dpi * 72
    fits = points > 0.56 * _ZONE_FONT_SIZE * len(re.sub(r"[${}^]", "", label))
    text = ax.text(middle, 0.985, label, transform=ax.get_xaxis_transform(), ha="center", va="top")
    text.set(rotation=0 if fits else 90, fontsize=_ZONE_FONT_SIZE, color=style.TEXT)
