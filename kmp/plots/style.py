"""What all plots share: axes, colours, titles, legends and names; and saving a figure."""

import math
import os
from pathlib import Path
from types import NoneType

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kmp.utils import validation
from kmp.utils.float_formats import is_power_of_two
from kmp.utils.names import printable, unique_names

# Distinguishable with colour blindness and in greyscale. Source: Paul Tol, "Colour Schemes"
# (SRON/EPS/TN/09-002, 2021), "high-contrast". DARK_LIGHT is LIGHT, darkened for lines on a grey
# background.
DARK, MIDDLE, LIGHT, DARK_LIGHT = "#004488", "#BB5566", "#DDAA33", "#8A6500"
TEXT = "0.25"
SMALL = 8.0
_LINE_HEIGHT = 1.35  # of a legend row, in font sizes


def axes(ax: Axes | None, title: str, x: str, y: str) -> Axes:
    """Returns `ax`, or new axes in a size that fits a notebook, with a title and axis labels."""
    validation.instance("ax", ax, (Axes, NoneType), "axes of matplotlib, or None for new ones")
    if ax is None:
        _, ax = plt.subplots(figsize=(8, 4.2), layout="constrained")
    ax.set_title(title, loc="left", fontsize="medium")
    ax.set_xlabel(x, fontsize="small")
    ax.set_ylabel(y, fontsize="small")
    ax.tick_params(labelsize=SMALL)
    return ax


def empty(ax: Axes, reason: str) -> Axes:
    """Writes why the plot is empty, and removes the ticks: there is no measured range."""
    ax.set_xticks([])
    ax.set_yticks([])
    ax.text(0.5, 0.5, reason, transform=ax.transAxes, ha="center", va="center", color=TEXT)
    return ax


def legend_above(ax: Axes, columns: int = 1, title: str | None = None) -> None:
    """Puts the legend between the title and the axes, so that it does not cover data.

    Args:
        ax: The axes.
        columns: The number of columns of the legend.
        title: A new title; by default the old one stays.
    """
    handles, labels = ax.get_legend_handles_labels()
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "borderpad": 0.2}
    size = {"fontsize": SMALL, "labelspacing": 0.25, "columnspacing": 1.2}
    # The title's pad reserves the space. Constrained layout would shrink the axes for a legend
    # wider than them.
    ax.legend(handles, labels, ncols=columns, frameon=False, **place, **size).set_in_layout(False)
    rows = math.ceil(len(handles) / columns)
    title = ax.get_title(loc="left") if title is None else title
    ax.set_title(title, loc="left", fontsize="medium", pad=6 + rows * _LINE_HEIGHT * SMALL)


def label_steps(ax: Axes, steps: np.ndarray) -> None:
    """Sets ticks at whole steps on an x axis of training steps."""
    if steps.size == 1:
        ax.set_xlim(steps[0] - 0.5, steps[0] + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))


def literal(text: str) -> str:
    """Returns a printable name for matplotlib, with dollar signs that begin no mathtext."""
    return printable(text).replace("$", r"\$")


def short_names(paths: list[str], length: int) -> list[str]:
    """Returns unique names for matplotlib, about `length` characters long.

    Names that are equal become longer, and if that does not help, numbered.
    """
    paths = [printable(path) for path in paths]
    shortened: list[str] = []
    for longer in range(11):
        shortened = [_shortened(path, length + longer) for path in paths]
        if len(set(shortened)) == len(paths):
            break
    return [literal(name) for name in unique_names(shortened)]


def _shortened(path: str, length: int) -> str:
    """Returns the first name and the last ones that fit, at least two, or both ends of the path."""
    if len(path) <= length:
        return path
    first, *rest = path.split("/")
    for index in range(1, len(rest) - 1):
        name = "/".join([first, "…", *rest[index:]])
        if len(name) <= length:
            return name
    tail = 2 * length // 3
    return f"{path[: length - 1 - tail]}…{path[-tail:]}"


def power_of_two(exponent: float) -> str:
    """Returns 2^`exponent` as matplotlib's mathtext."""
    return f"$2^{{{exponent:g}}}$"


def scale_name(scale: float) -> str:
    """Returns a loss scale as a power of two if it is one, else as a plain number."""
    return power_of_two(math.log2(scale)) if is_power_of_two(scale) else f"{scale:,g}"


def save(ax: Axes, path: Path) -> None:
    """Saves the figure of `ax` as a PNG file and closes it.

    Args:
        ax: The axes that a function of `kmp.plots` returned.
        path: The file.

    Raises:
        OSError: If the file cannot be written.

    Example:
    >>> import kmp, pathlib, tempfile
    >>> from kmp.records import Record, Run
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "loss_scale.png"
    >>> axes = kmp.plots.loss_scale(Run([Record(step=1, loss_scale=8.0)]))
    >>> kmp.plots.save(axes, file)
    >>> file.exists()
    True
    """
    expected = "axes of matplotlib, as the functions of kmp.plots return them"
    validation.instance("ax", ax, Axes, expected)
    validation.instance("path", path, (str, os.PathLike), "the path of the PNG file")
    figure = ax.get_figure(root=True)
    assert isinstance(figure, Figure)
    figure.savefig(path, dpi=120)
    plt.close(figure)
