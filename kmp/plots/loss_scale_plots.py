"""Plots of the loss scale over the steps, and of underflow and overflow at other loss scales."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from kmp.advice import WhatIf
from kmp.advice import what_if as compute_what_if
from kmp.plots import style
from kmp.records import RUN_EXPECTED, Run
from kmp.utils import validation

_MANY_MARKS = 60
_MOST_MARKS = 2000
_MOST_DECADES = 5
_DASHES = (0.0, (2.0, 1.2))


def loss_scale(run: Run, ax: Axes | None = None) -> Axes:
    """Draws the loss scale over the steps, with a mark where steps were skipped.

    Args:
        run: A run with `loss_scale` and, for the marks, `overflow_rate` and `overflow_count`.
        ax: Axes to draw on; new ones by default.

    Returns:
        The axes: training steps along x, the loss scale along y on a log2 axis.

    Example:
    >>> loss_scale(Run([{"step": 1, "loss_scale": 8.0}, {"step": 2, "loss_scale": 16.0}])).get_title(loc="left")
    'The loss scale ends at $2^{4}$'
    """
    validation.instance("run", run, Run, RUN_EXPECTED)
    ax = style.label(style.axes(ax), "Loss scale", "training step", "loss scale")
    steps, scales = style.by_step(run, "loss_scale")
    if not steps.size:
        return style.empty(ax, "No loss scale was recorded.")
    marker = "o" if steps.size == 1 else ""
    ax.plot(steps, scales, drawstyle="steps-post", marker=marker, color=style.DARK, label=_scale_label(scales))
    highest = _mark_overflows(ax, run, steps, scales)
    ax.set_title(_title(run, scales[-1]), loc="left", fontsize="medium")
    # A margin of two bits gives the axis several ticks even if the line is flat.
    style.scale_in_powers_of_two(ax, scales.min() / 4, max(scales.max(), highest) * 4)
    style.label_steps(ax, steps)
    style.legend_above(ax)
    return ax


def what_if(run_or_curve: Run | WhatIf, ax: Axes | None = None) -> Axes:
    """Draws what float16 would lose at every loss scale, computed from sampled gradients.

    Args:
        run_or_curve: A run with samples, or the result of `kmp.what_if`.
        ax: Axes to draw on; new ones by default.

    Returns:
        The axes: loss scales along x, as powers of two; along y the share of gradient elements lost to underflow and
        overflow, and the share of sampled steps that would be skipped. The y axis is linear below the smallest share,
        so that it includes zero. Extrapolated values are dashed.

    Example:
    >>> from kmp.records import BinCounts, GradientSample
    >>> counts = BinCounts.of(np.bincount([0] * 3 + [130] * 5 + [131] * 8, minlength=280)[None])
    >>> sample = GradientSample(1, 1024.0, ("dense/kernel",), counts, np.array([2.0**-18]), np.array([1e-5]))
    >>> run = Run([{"step": 1, "sample": sample}])
    >>> what_if(run).get_xlabel()
    'loss scale'
    """
    validation.instance("run_or_curve", run_or_curve, (Run, WhatIf), f"{RUN_EXPECTED}, or a kmp.advice.WhatIf")
    title = "Underflow and overflow at other loss scales"
    ax = style.label(style.axes(ax), title, "loss scale", "share of elements, or of steps")
    try:
        curve = compute_what_if(run_or_curve) if isinstance(run_or_curve, Run) else run_or_curve
    except ValueError:
        return style.empty(ax, "No finite gradients were sampled.")
    _draw_underflow(ax, curve)
    _draw_curve(ax, curve, curve.overflow, style.MIDDLE, 1.5, "overflow: share of elements")
    _draw_curve(ax, curve, curve.skipped, style.LIGHT, 3.0, "skipped: share of sampled steps")
    in_use = f"in use: {style.scale_name(2.0**curve.in_use)}"
    ax.axvline(curve.in_use, color="black", linewidth=1, linestyle=":", label=in_use)
    _shade_recommended(ax, curve)
    _label_extrapolation(ax, curve)
    ax.set_title(_what_if_title(curve), loc="left", fontsize="medium")
    _set_share_axis(ax, curve)
    ax.set_xlim(curve.log2_scales[0], curve.log2_scales[-1])
    style.label_exponents(ax)
    style.legend_above(ax, columns=2)
    return ax


def _scale_label(scales: np.ndarray) -> str:
    is_flat = scales.size > 1 and np.ptp(scales) == 0
    return f"loss scale, {style.scale_name(scales[0])} throughout" if is_flat else "loss scale"


def _title(run: Run, scale: float) -> str:
    count, last = run.last("overflow_count"), max(row["step"] for row in run.rows)
    skipped = "" if count is None else f"; {count:,} of {last:,} steps {'was' if count == 1 else 'were'} skipped"
    return f"The loss scale ends at {style.scale_name(scale)}{skipped}"


def _mark_overflows(ax: Axes, run: Run, scale_steps: np.ndarray, scales: np.ndarray) -> float:
    """Marks the overflows, and returns the highest loss scale at which one is marked.

    A record has the number of skipped steps since the record before, and of the steps since the last of them or since
    the scale grew. Where it cannot have grown since, that is the step, and the scale was that before it backed off.
    """
    settings, losses = run.settings, dict(zip(*style.by_step(run, "nonfinite_loss_count"), strict=True))
    growth_interval, lowest = settings.get("growth_interval", np.inf), settings.get("min_scale", 0.0)
    steps, rates = style.by_step(run, "overflow_rate")
    clean = dict(zip(*style.by_step(run, "clean_steps"), strict=True))
    backoff = 1.0 if settings.get("rule") == "FixedScale" else settings.get("backoff_factor", 0.5)
    before = np.append(0, steps[:-1])
    marks = []
    for previous, step in zip(before[rates > 0], steps[rates > 0], strict=True):
        scale = scales[max(np.searchsorted(scale_steps, step, side="right") - 1, 0)]
        is_known = (
            clean.get(step, np.inf) < step - previous < growth_interval
            and settings.get("hysteresis", 1) == 1
            and losses.get(step, 0) == losses.get(previous, 0)
            and scale > lowest
        )
        marks.append((step - clean[step], scale / backoff) if is_known else (step, scale))
    marks = marks[:: len(marks) // _MOST_MARKS + 1]  # more would cover each other
    if not marks:
        return 0.0
    count = run.last("overflow_count")
    label = "last skipped step of each record" + ("" if count is None else f" ({count:,} steps in total)")
    size = 6 if len(marks) <= _MANY_MARKS else 3
    at, heights = np.array(marks).T
    ax.plot(at, heights, "x", color=style.MIDDLE, markersize=size, label=label, zorder=3)
    return float(heights.max())


def _shade_recommended(ax: Axes, curve: WhatIf) -> None:
    if curve.recommended is None:
        ax.plot([], [], " ", label="no scale is recommended")
        return
    low, high = curve.recommended
    scales = [style.power_of_two(exponent) for exponent in (low, high)[high == low :]]
    label = f"recommended: {' to '.join(scales) if curve.is_lowest_known else f'at most {scales[-1]}'}"
    # A single scale has no width: half a bit on either side makes it visible.
    margin = 0.0 if high > low else 0.5
    span = ax.axvspan(low - margin, high + margin, label=label, zorder=0)
    span.set(facecolor="0.9", edgecolor="0.7", hatch="..", linewidth=0)


def _what_if_title(curve: WhatIf) -> str:
    in_use = style.scale_name(2.0**curve.in_use)
    lost = curve.at(float(np.clip(curve.in_use, curve.log2_scales[0], curve.log2_scales[-1])))["underflow"]
    return f"At {in_use}, in use, float16 flushes {lost:.1%} of gradients"


def _draw_underflow(ax: Axes, curve: WhatIf) -> None:
    _draw_curve(ax, curve, curve.underflow, style.DARK, 1.8, "underflow: share of elements")
    if not np.array_equal(curve.underflow, curve.underflow_bound):
        label = "underflow if all zeros were flushed"
        band = ax.fill_between(curve.log2_scales, curve.underflow, curve.underflow_bound, label=label, zorder=1)
        band.set(facecolor="#CCDAE7", edgecolor=style.DARK, linewidth=0.5, alpha=0.7)


def _draw_curve(ax: Axes, curve: WhatIf, shares: np.ndarray, color: str, width: float, label: str) -> None:
    scales, is_observed = curve.log2_scales, ~curve.is_extrapolated
    # Thinner lines lie on top of thicker ones, so that none is hidden where all are zero.
    zorder = 3 - width / 4
    ax.plot(scales[is_observed], shares[is_observed], color=color, linewidth=width, label=label, zorder=zorder)
    # Starts at the last observed point, so that there is no gap.
    extrapolated = slice(max(int(is_observed.sum()) - 1, 0), None)
    if not is_observed.all():
        ax.plot(
            scales[extrapolated], shares[extrapolated], color=color, linewidth=width, linestyle=_DASHES, zorder=zorder
        )


def _label_extrapolation(ax: Axes, curve: WhatIf) -> None:
    if curve.is_extrapolated.any():
        ax.plot([], [], color="0.3", linestyle=_DASHES, label="dashed: extrapolation")


def _one_digit(value: float) -> str:
    return np.format_float_positional(value, precision=1, unique=False, fractional=False, trim="-")


def _set_share_axis(ax: Axes, curve: WhatIf) -> None:
    shares = np.concatenate([curve.underflow, curve.underflow_bound, curve.overflow, curve.skipped])
    smallest = shares[shares > 0].min(initial=1e-2)
    threshold = 10.0 ** np.clip(np.floor(np.log10(smallest)), -8, -2)
    ax.set_yscale("symlog", linthresh=threshold, linscale=0.4)
    decades = np.arange(round(np.log10(threshold)), 1)
    ticks = 10.0 ** decades[:: -(-decades.size // _MOST_DECADES)]
    ax.set_yticks([0.0, *ticks], ["0", *(f"{_one_digit(100 * tick)} %" for tick in ticks)])
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_ylim(-0.1 * threshold, 1.6)
