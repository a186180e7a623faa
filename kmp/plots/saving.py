"""Writing a figure to a file."""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def save(ax: Axes, path: Path) -> None:
    """Writes the figure that `ax` is on to a PNG file, and closes it.

    Args:
        ax: What one of these functions returned.
        path: The file.

    Raises:
        OSError: If it cannot be written.

    Example:
    >>> import tempfile
    >>> from kmp.records import Run
    >>> picture = Path(tempfile.mkdtemp()) / "loss_scale.png"
    >>> save(loss_scale(Run([{"step": 1, "loss_scale": 8.0}])), picture)
    >>> picture.exists()
    True
    """
    figure = ax.get_figure(root=True)
    assert isinstance(figure, Figure)
    figure.savefig(path, dpi=120)
    plt.close(figure)
