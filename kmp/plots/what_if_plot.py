"""A plot of underflow and overflow at other loss scales."""

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from kmp.advice import WhatIf
from kmp.advice import what_if as compute_what_if
from kmp.plots import style
from kmp.records import Run
from kmp.records.run import RUN_EXPECTED
from kmp.utils import validation

_MOST_DECADES = 5
_DASHES = (0.0, (2.0, 1.2))


def what_if(run_or_curve: Run | WhatIf, ax: Axes | None = None) -> Axes:
    """Draws what float16 would lose at every loss scale, computed from sampled gradients.

    Args:
        run_or_curve: A run with samples, or the result of `kmp.what_if`.
        ax: Axes to draw on; new ones by default.

    Returns:
        The axes: loss scales along x, as powers of two; along y the share of gradient elements lost
        to underflow and overflow, and the share of sampled steps that would be skipped. The y axis
        is linear below the smallest share, so that it includes zero. Extrapolated values are
        dashed.

    Example:
    >>> import kmp, numpy as np
    >>> from kmp.records import GradientSample, Record, Run
    >>> counts = np.bincount([0] * 3 + [130] * 5 + [131] * 8, minlength=280)[None]
    >>> amax, norm = np.array([2.0**-18]), np.array([1e-5])
    >>> sample = GradientSample(1, 1024.0, ("dense/kernel",), counts, amax, norm)
    >>> run = Run([Record(step=1, sample=sample)])
    >>> kmp.plots.what_if(run).get_xlabel()
    'loss scale'
    """
    expected = f"{RUN_EXPECTED}, or a kmp.advice.WhatIf"
    validation.instance("run_or_curve", run_or_curve, (Run, WhatIf), expected)
    title = "Underflow and overflow at other loss scales"
    ax = style.axes(ax, title, "loss scale", "share of elements, or of steps")
    try:
        curve = compute_what_if(run_or_curve) if isinstance(run_or_curve, Run) else run_or_curve
    except ValueError:
        return style.empty(ax, "No finite gradients were sampled.")
    _draw_shares(ax, curve)
    in_use = style.scale_name(2.0**curve.in_use)
    ax.axvline(curve.in_use, color="black", linewidth=1, linestyle=":", label=f"in use: {in_use}")
    _shade_recommended(ax, curve)
    scales = curve.log2_scales
    ax.set_xlim(scales[0], scales[-1])
    ax.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, steps=[1, 2, 4, 5, 10]))
    ax.xaxis.set_major_formatter("$2^{{{x:g}}}$")
    drawn = [curve.underflow, curve.underflow_bound, curve.overflow, curve.skipped]
    _set_share_axis(ax, np.concatenate(drawn))
    known = float(np.clip(curve.in_use, scales[0], scales[-1]))
    lost = curve.at(known)["underflow"]
    title = f"At {in_use}, in use, float16 flushes {lost:.1%} of gradients"
    style.legend_above(ax, columns=2, title=title)
    return ax


def _draw_shares(ax: Axes, curve: WhatIf) -> None:
    """Draws the shares that are known as solid lines, and the extrapolated ones dashed."""
    scales, is_dashed = curve.log2_scales, curve.is_extrapolated
    for shares, color, width, label in (
        (curve.underflow, style.DARK, 1.8, "underflow: share of elements"),
        (curve.overflow, style.MIDDLE, 1.5, "overflow: share of elements"),
        (curve.skipped, style.LIGHT, 3.0, "skipped: share of sampled steps"),
    ):
        # Thinner lines lie on top of thicker ones, so that none is hidden where all are zero.
        lines = ax.plot(scales[~is_dashed], shares[~is_dashed], label=label)
        if is_dashed.any():
            # From the last known point, so that there is no gap.
            start = max(np.argmax(is_dashed) - 1, 0)
            lines += ax.plot(scales[start:], shares[start:], linestyle=_DASHES)
        for line in lines:
            line.set(color=color, linewidth=width, zorder=3 - width / 4)
    if not np.array_equal(curve.underflow, curve.underflow_bound):
        label = "underflow if all zeros were flushed"
        band = ax.fill_between(scales, curve.underflow, curve.underflow_bound, label=label)
        band.set(zorder=1)
        band.set(facecolor="#CCDAE7", edgecolor=style.DARK, linewidth=0.5, alpha=0.7)
    if is_dashed.any():
        ax.plot([], [], color="0.3", linestyle=_DASHES, label="dashed: extrapolation")


def _shade_recommended(ax: Axes, curve: WhatIf) -> None:
    if curve.recommended is None:
        ax.plot([], [], " ", label="no scale is recommended")
        return
    low, high = curve.recommended
    label = style.power_of_two(high)
    if not curve.is_lowest_known:
        label = f"at most {label}"
    elif low < high:
        label = f"{style.power_of_two(low)} to {label}"
    # A single scale has no width: half a bit on either side makes it visible.
    margin = 0.0 if high > low else 0.5
    span = ax.axvspan(low - margin, high + margin, label=f"recommended: {label}", zorder=0)
    span.set(facecolor="0.9", edgecolor="0.7", hatch="..", linewidth=0)


def _set_share_axis(ax: Axes, shares: np.ndarray) -> None:
    """Makes y a logarithmic axis of shares, with a linear part that includes 0.

    The linear part ends at the power of ten below the smallest share.
    """
    smallest = shares[shares > 0].min(initial=1e-2)
    lowest = int(np.clip(np.floor(np.log10(smallest)), -8, -2))
    stride = math.ceil((1 - lowest) / _MOST_DECADES)
    ticks, labels = [0.0], ["0"]
    for decade in range(lowest, 1, stride):
        ticks.append(10.0**decade)
        percent = np.format_float_positional(10.0 ** (decade + 2), trim="-")
        labels.append(f"{percent} %")
    ax.set_yscale("symlog", linthresh=10.0**lowest, linscale=0.4)
    ax.set_yticks(ticks, labels)
    ax.minorticks_off()
    ax.set_ylim(-0.1 * 10.0**lowest, 1.6)
