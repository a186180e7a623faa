"""Saves a figure to a file."""

import os
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kmp.utils import validation


def save(ax: Axes, path: Path) -> None:
    """Saves the figure of `ax` as a PNG file and closes it.

    Args:
        ax: The axes that a function of `kmp.plots` returned.
        path: The file.

    Raises:
        OSError: If the file cannot be written.
        TypeError: If an argument has the wrong type.

    Example:
    >>> import tempfile
    >>> from kmp.plots import loss_scale
    >>> from kmp.records import Run
    >>> file = Path(tempfile.mkdtemp()) / "loss_scale.png"
    >>> save(loss_scale(Run([{"step": 1, "loss_scale": 8.0}])), file)
    >>> file.exists()
    True
    """
    validation.instance("ax", ax, Axes, "axes of matplotlib, as the functions of kmp.plots return them")
    validation.instance("path", path, (str, os.PathLike), "the path of the PNG file")
    figure = ax.get_figure(root=True)
    assert isinstance(figure, Figure)
    figure.savefig(path, dpi=120)
    plt.close(figure)
