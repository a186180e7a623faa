"""Shared style of all plots: axes, colours, titles, legends, labels of powers of two."""

import math
from types import NoneType

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from kmp.records import Run
from kmp.utils import is_power_of_two, printable, validation

# Distinguishable with colour blindness and in greyscale. Source: Paul Tol, "Colour Schemes" (SRON/EPS/TN/09-002, 2021),
# "high-contrast". DARK_LIGHT is LIGHT, darkened for lines on a grey background.
DARK, MIDDLE, LIGHT, DARK_LIGHT = "#004488", "#BB5566", "#DDAA33", "#8A6500"
TEXT = "0.25"
_LINE_HEIGHT = 1.35  # of a legend row, in font sizes
SMALL = 8.0


def axes(ax: Axes | None) -> Axes:
    """Returns `ax`, or new axes in a size that fits a notebook.

    Raises:
        TypeError: If `ax` is neither axes of matplotlib nor `None`.
    """
    validation.instance("ax", ax, (Axes, NoneType), "axes of matplotlib, or None for new ones")
    return plt.subplots(figsize=(8, 4.2), layout="constrained")[1] if ax is None else ax


def label(ax: Axes, title: str, x: str, y: str) -> Axes:
    """Sets the title and the axis labels."""
    ax.set_title(title, loc="left", fontsize="medium")
    ax.set_xlabel(x, fontsize="small")
    ax.set_ylabel(y, fontsize="small")
    ax.tick_params(labelsize=SMALL)
    return ax


def empty(ax: Axes, reason: str) -> Axes:
    """Writes the reason why the plot is empty, and removes the ticks: there is no measured range."""
    ax.set_xticks([])
    ax.set_yticks([])
    ax.text(0.5, 0.5, reason, transform=ax.transAxes, ha="center", va="center", color=TEXT)
    return ax


def legend_above(ax: Axes, columns: int = 1) -> None:
    """Puts the legend between title and axes, so that it does not cover data."""
    handles, labels = ax.get_legend_handles_labels()
    rows = math.ceil(len(handles) / columns)
    legend = ax.legend(
        handles,
        labels,
        ncols=columns,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0.2,
        borderpad=0.2,
        labelspacing=0.25,
        columnspacing=1.2,
        fontsize=SMALL,
        frameon=False,
    )
    # The title's pad reserves the space. Constrained layout would shrink the axes for a legend wider than them.
    legend.set_in_layout(False)
    ax.set_title(ax.get_title(loc="left"), loc="left", fontsize="medium", pad=6 + rows * _LINE_HEIGHT * SMALL)


def literal(text: str) -> str:
    """Returns a name for a title or legend: printable, and without matplotlib's mathtext."""
    return printable(text).replace("$", r"\$")


def power_of_two(exponent: float) -> str:
    """Returns 2^`exponent` as matplotlib's mathtext."""
    return f"$2^{{{exponent:g}}}$"


def scale_name(scale: float) -> str:
    """Returns a loss scale as a power of two if it is one, else as a plain number."""
    return power_of_two(math.log2(scale)) if is_power_of_two(scale) else f"{scale:,g}"


def label_steps(ax: Axes, steps: np.ndarray) -> None:
    """Sets ticks at whole steps on an x axis of training steps."""
    if steps.size == 1:
        ax.set_xlim(steps[0] - 0.5, steps[0] + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))


def label_exponents(ax: Axes) -> None:
    """Labels an x axis of binary exponents k with 2^k."""
    ax.xaxis.set_major_locator(_integer_locator(12))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda k, _: power_of_two(k)))


def scale_in_powers_of_two(ax: Axes, low: float, high: float) -> None:
    """Makes y a log2 axis from `low` to `high`, with ticks at integer powers of two."""
    ax.set_yscale("log", base=2)
    ax.set_yticks(np.exp2(_integer_locator(8).tick_values(math.log2(low), math.log2(high))))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_ylim(low, high)


def _integer_locator(max_bins: int) -> MaxNLocator:
    return MaxNLocator(nbins=max_bins, integer=True, steps=[1, 2, 4, 5, 10])


def by_step(run: Run, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps and the finite values of `key`, ordered by step, with the newest value of each step.

    A run that was resumed from a checkpoint contains some steps twice.
    """
    steps, values = run.series(key)
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order].astype(np.float64)
    is_newest = np.append(steps[1:] != steps[:-1], np.ones(min(1, steps.size), bool))
    kept = is_newest & np.isfinite(values)
    return steps[kept], values[kept]
