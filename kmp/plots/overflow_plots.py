"""A plot of the variables whose gradients overflowed most."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from kmp.plots import style
from kmp.records import RUN_EXPECTED, Run
from kmp.utils import printable, unique_names, validation

_NAME_LENGTH = 38
_TITLE_LENGTH = 30
_ELLIPSIS = "…"


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
    overflows, overflow_origins = (run.last(key) for key in ("overflows_by_variable", "overflow_origins_by_variable"))
    if overflows is None and overflow_origins is None:
        return style.empty(ax, "Overflows were not counted by variable.")
    paths = _worst_first(overflows or {}, overflow_origins or {})
    if not paths:
        return style.empty(ax, "No overflow.")
    if len(paths) > top:
        ax.set_ylabel(f"variable (the worst {top} of {len(paths)})")
    _draw_bars(ax, paths[:top], overflows or {}, overflow_origins or {})
    count, name = (overflow_origins or {}).get(paths[0], 0), style.literal(shortened([paths[0]], _TITLE_LENGTH)[0])
    if count:
        total = sum((overflow_origins or {}).values())
        title = f"{count:,} of {total:,} overflows begin at {name}"
        ax.set_title(title, loc="left", fontsize="medium")
    style.legend_above(ax)
    return ax


def _worst_first(overflows: Mapping[str, int], overflow_origins: Mapping[str, int]) -> list[str]:
    paths = [
        path for path in {**overflows, **overflow_origins} if overflows.get(path, 0) or overflow_origins.get(path, 0)
    ]
    return sorted(paths, key=lambda path: (-overflow_origins.get(path, 0), -overflows.get(path, 0)))


def _draw_bars(
    ax: Axes, paths: Sequence[str], overflows: Mapping[str, int], overflow_origins: Mapping[str, int]
) -> None:
    positions, height = np.arange(len(paths)), 0.7 * min(1, len(paths) / 4)
    nonfinite = [max(overflows.get(path, 0), overflow_origins.get(path, 0)) for path in paths]
    origins = [overflow_origins.get(path, 0) for path in paths]
    ax.barh(positions, nonfinite, height, color="0.85", edgecolor="0.4", linewidth=0.8, label="gradient not finite")
    ax.barh(
        positions,
        origins,
        height,
        color=style.DARK,
        edgecolor="white",
        hatch="//",
        linewidth=0,
        label="overflow origin",
    )
    names = shortened([printable(path) for path in paths], _NAME_LENGTH)
    ax.set_yticks(positions, names, parse_math=False)  # a name may contain dollar signs
    ax.set_ylim(len(paths) - 0.4, -0.6)
    ax.set_xlim(0, max(nonfinite) * 1.05)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))


def shortened(paths: Sequence[str], length: int) -> list[str]:
    """Returns unique paths, with an ellipsis in the middle of those longer than `length`.

    Paths that would become equal keep up to ten more characters. If they are still equal, they are numbered.
    """
    lengths = dict.fromkeys(paths, length)
    for _ in range(10):
        counts = Counter(_shorten(path, lengths[path]) for path in paths)
        for path in paths:
            lengths[path] += counts[_shorten(path, lengths[path])] > 1
    return unique_names(_shorten(path, lengths[path]) for path in paths)


def _shorten(path: str, length: int) -> str:
    """Keeps the first name and as many of the last names as fit. If fewer than two fit, cuts the longest names."""
    first, *rest = path.split("/")
    shorter = ["/".join([first, _ELLIPSIS, *rest[index:]]) for index in range(1, len(rest) - 1)]
    fitting = next((name for name in [path, *shorter] if len(name) <= length), None)
    if fitting is not None:
        return fitting
    parts = [first, _ELLIPSIS, *rest[-3:]] if len(rest) > 3 else [first, *rest]
    widths = [len(part) for part in parts]
    while sum(widths) + len(parts) - 1 > length:
        widths[widths.index(max(widths))] -= 1
    return "/".join(_cut(part, width) for part, width in zip(parts, widths, strict=True))


def _cut(name: str, width: int) -> str:
    """Removes characters from the middle: layer names often differ in a number at the end."""
    if len(name) <= width:
        return name
    tail = width // 2
    return name[: width - 1 - tail] + _ELLIPSIS + name[len(name) - tail :]
