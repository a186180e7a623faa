"""Pictures of a run; each function draws on the axes it is given and returns them.

Imports matplotlib, so `import kmp` leaves it out; `kmp.plots` imports it when it is first used.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kmp._formats import FLOAT16
from kmp.records import ExponentHistogram, Run

_UNSCALED, _SCALED, _MARK = "#0072b2", "#d55e00", "#cc3311"


def gradient_exponents(histogram: ExponentHistogram, ax: Axes | None = None) -> Axes:
    """Draws gradient magnitudes against float16's range, with the loss scale and without it.

    The scaled gradient is what the backward pass computed. Its zeros cannot be drawn on a logarithmic axis; the legend
    has their share. Source: the figure of Micikevicius et al., "Mixed Precision Training" (ICLR 2018), section 3.2.

    Args:
        histogram: One sampled histogram.
        ax: Axes to draw on; new ones by default.

    Returns:
        The axes: binary exponents along x, element counts along y, on a log axis.
    """
    ax = ax or plt.subplots(figsize=(9, 4.5), layout="constrained")[1]
    shift = np.log2(histogram.loss_scale)
    if shift:
        _draw_counts(ax, histogram, -shift, _UNSCALED, "gradient")
    scaled = f"gradient times loss scale $2^{{{shift:g}}}$" if shift else "gradient (loss scale 1)"
    _draw_counts(ax, histogram, 0.0, _SCALED, f"{scaled}; {histogram.zero_fraction:.1%} are zero")
    _shade_float16(ax)
    ax.set_yscale("log")
    ax.set_ylim(bottom=0.8)
    ax.set_xlabel("binary exponent of the magnitude, floor(log2 |g|)")
    ax.set_ylabel("gradient elements")
    ax.set_title(f"Gradient magnitudes in training step {histogram.step}")
    ax.legend(loc="upper left", fontsize="small")
    return ax


def loss_scale(run: Run, ax: Axes | None = None) -> Axes:
    """Draws the loss scale over the steps, with a mark where steps were skipped.

    Args:
        run: Readings with `loss_scale` and, for the marks, `overflow_rate` and `overflow_count`.
        ax: Axes to draw on; new ones by default.

    Returns:
        The axes: training steps along x, the scale along y, on a log2 axis.
    """
    ax = ax or plt.subplots(figsize=(9, 4.5), layout="constrained")[1]
    steps, scales = run.series("loss_scale")
    ax.plot(steps, scales, drawstyle="steps-post", color=_UNSCALED, label="loss scale")
    _mark_overflows(ax, run)
    ax.set_yscale("log", base=2)
    ax.set_xlabel("training step")
    ax.set_ylabel("loss scale")
    ax.set_title("Loss scale")
    ax.legend(loc="best", fontsize="small")
    return ax


def save(ax: Axes, path: Path) -> None:
    """Writes the figure that `ax` is on to a PNG file, and closes it."""
    figure = ax.get_figure(root=True)
    assert isinstance(figure, Figure)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_counts(ax: Axes, histogram: ExponentHistogram, shift: float, color: str, label: str) -> None:
    filled = np.flatnonzero(histogram.by_exponent)
    if filled.size:
        span = slice(filled[0], filled[-1] + 1)
        edges = np.append(histogram.exponents[span], histogram.exponents[span][-1] + 1) + shift
        ax.stairs(histogram.by_exponent[span], edges, color=color, fill=True, alpha=0.25)
        ax.stairs(histogram.by_exponent[span], edges, color=color, label=label)
    else:
        ax.plot([], [], color=color, label=label)


def _shade_float16(ax: Axes) -> None:
    low, normal, high = FLOAT16.flush_exponent, FLOAT16.min_exponent, FLOAT16.max_exponent + 1
    left, right = min(ax.get_xlim()[0], low - 6), max(ax.get_xlim()[1], high + 5)
    zones = [
        (left, low, "0.55", f"zero (below $2^{{{low}}}$)"),
        (low, normal, "0.8", "subnormal"),
        (high, right, _MARK, "overflow"),
    ]
    for start, stop, color, name in zones:
        ax.axvspan(start, stop, color=color, alpha=0.25, linewidth=0)
        _name_zone(ax, start, stop, name)
    _name_zone(ax, normal, high, "float16's normal range")
    ax.set_xlim(left, right)


def _name_zone(ax: Axes, start: float, stop: float, name: str) -> None:
    middle, at = (start + stop) / 2, ax.get_xaxis_transform()
    ax.text(middle, 0.01, name, transform=at, ha="center", va="bottom", fontsize="small", color="0.25")


def _mark_overflows(ax: Axes, run: Run) -> None:
    steps, rates = run.series("overflow_rate")
    new = rates > 0
    scale_steps, scales = run.series("loss_scale")
    if new.any() and scale_steps.size:
        at = np.clip(np.searchsorted(scale_steps, steps[new], side="right") - 1, 0, None)
        label = f"readings that saw skipped steps ({run.series('overflow_count')[1][-1]:.0f} steps in all)"
        ax.plot(steps[new], scales[at], "x", color=_MARK, label=label, zorder=3)
