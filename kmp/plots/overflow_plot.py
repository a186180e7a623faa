"""A plot of the variables whose gradients overflowed most."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from kmp.plots import style
from kmp.records import RUN_EXPECTED, Run
from kmp.utils import validation

_NAME_LENGTH = 38
_TITLE_LENGTH = 30


def overflowing_variables(run: Run, ax: Axes | None = None, top: int = 10) -> Axes:
    """Draws how often each variable's gradient was not finite, and how often it was the overflow origin.

    An overflow spreads to all variables nearer the input. Its origin is the variable where it began.

    Args:
        run: A run with `overflows_by_variable` and `overflow_origins_by_variable`. The newest records are drawn.
        ax: Axes to draw on; new ones by default.
        top: Number of variables to draw. They are ordered by how often they were the overflow origin, then by how
            often their gradient was not finite.

    Returns:
        The axes: variables along y, with the worst at the top; number of training steps since the start along x.

    Raises:
        TypeError: If `run` is not a `kmp.records.Run`, or `top` is not an integer.
        ValueError: If `top` is not positive.

    Example:
    >>> counts = {"overflows_by_variable": {"dense/kernel": 4, "dense/bias": 4}}
    >>> run = Run([{"step": 9, "overflow_origins_by_variable": {"dense/bias": 4}} | counts])
    >>> [label.get_text() for label in overflowing_variables(run).get_yticklabels()]
    ['dense/bias', 'dense/kernel']
    """
    validation.instance("run", run, Run, RUN_EXPECTED)
    top = validation.positive_integer("top", top)
    ax = style.label(style.axes(ax), "Variables that overflowed", "training steps", "variable")
    overflows, origins = (run.last(key) for key in ("overflows_by_variable", "overflow_origins_by_variable"))
    if overflows is None and origins is None:
        return style.empty(ax, "Overflows were not counted by variable.")
    overflows, origins = overflows or {}, origins or {}
    # By path: the steps in which it was the origin, and those in which its gradient was not finite.
    counts = {path: (origins.get(path, 0), overflows.get(path, 0)) for path in {**overflows, **origins}}
    paths = sorted((path for path in counts if any(counts[path])), key=lambda path: counts[path], reverse=True)
    if not paths:
        return style.empty(ax, "No overflow.")
    if len(paths) > top:
        ax.set_ylabel(f"variable (the worst {top} of {len(paths)})")

    shown, height = paths[:top], 0.7 * min(1, min(len(paths), top) / 4)
    nonfinite, origin = [max(counts[path]) for path in shown], [counts[path][0] for path in shown]
    positions = np.arange(len(shown))
    ax.barh(positions, nonfinite, height, color="0.85", edgecolor="0.4", linewidth=0.8, label="gradient not finite")
    bars = ax.barh(positions, origin, height, color=style.DARK, linewidth=0, label="overflow origin")
    for bar in bars:
        bar.set(edgecolor="white", hatch="//")
    ax.set_yticks(positions, style.short_names(shown, _NAME_LENGTH))
    ax.set_ylim(len(shown) - 0.4, -0.6)
    ax.set_xlim(0, max(nonfinite) * 1.05)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    title = None
    if origin[0]:
        (name,) = style.short_names(shown[:1], _TITLE_LENGTH)
        # In two lines: long names of variables leave little width for the axes.
        title = f"{origin[0]:,} of {sum(origins.values()):,} overflows begin at\n{name}"
    style.legend_above(ax, title=title)
    return ax
