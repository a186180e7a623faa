"""A benchmark's figures as tables and as a picture."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from kmp.bench.timing import Measured
from kmp.plots import style

_COLOURS = (style.MIDDLE, style.DARK, style.LIGHT)
_MARKERS = ("X", "o", "s")
_MOST_COLUMNS = 4
_TIMES = "\N{MULTIPLICATION SIGN}"
_LEGEND_WIDTH, _MARKER_WIDTH = 84, 6  # in letters
_TICKS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0)


def show_header(console: Console, header: dict[str, Any]) -> None:
    """Prints what is measured on."""
    for name, value in header.items():
        text = ", ".join(f"{k}: {v}" for k, v in value.items()) if isinstance(value, dict) else value
        console.print(f"{name}: {', '.join(text) or 'none' if isinstance(text, list) else text}", highlight=False)


def show(console: Console, results: Sequence[Measured]) -> None:
    """Prints a table for each section: a row for each case and mode, a column for each way.

    Many ways are the rows of a table for each case, with a column for each mode.
    """
    for section in _each(result.section for result in results):
        found = [result for result in results if result.section == section]
        if len(_each(result.way for result in found)) <= _MOST_COLUMNS:
            console.print(_table_of_cases(section, found))
            continue
        for case in _each(result.case for result in found):
            console.print(_table_of_ways(f"{section}: {case}", [result for result in found if result.case == case]))


def _table_of_cases(title: str, found: Sequence[Measured]) -> Table:
    ways, cells = _each(result.way for result in found), {(r.case, r.mode, r.way): _cell(r) for r in found}
    table = _table(title, ["on", "mode"], ways)
    for case, mode in _cases(found):
        table.add_row(case, mode, *(cells.get((case, mode, way), "") for way in ways))
    return table


def _table_of_ways(title: str, found: Sequence[Measured]) -> Table:
    modes, cells = _each(result.mode for result in found), {(r.mode, r.way): _cell(r) for r in found}
    table = _table(title, [""], modes)
    for way in _each(result.way for result in found):
        table.add_row(way, *(cells.get((mode, way), "") for mode in modes))
    return table


def _table(title: str, names: Sequence[str], figures: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in figures:
        table.add_column(name, justify="right", overflow="fold")
    return table


def in_words(results: Sequence[Measured]) -> str:
    """Returns one comparison as a line, for a benchmark that is still running."""
    first = results[0]
    return f"{first.section}, {first.case}, {first.mode}: " + "; ".join(f"{r.way} {_cell(r)}" for r in results)


def picture(results: Sequence[Measured]) -> Figure:
    """Draws the ratios, a panel for each section that has some."""
    sections = _each(result.section for result in results if result.ratio is not None)
    found = [[result for result in results if result.section == section] for section in sections]
    rows = [len(_cases(each)) for each in found]
    legends = sum(math.ceil(len(_drawn(each)) / _columns(_drawn(each))) for each in found)
    size = (8, 1.2 + 0.28 * sum(rows) + 0.4 * len(rows) + 0.2 * legends)
    figure, panels = plt.subplots(
        len(sections), figsize=size, layout="constrained", squeeze=False, height_ratios=[row + 1 for row in rows]
    )
    for ax, section, each in zip(panels[:, 0], sections, found, strict=True):
        _draw(ax, section, each)
    return figure


def save_picture(results: Sequence[Measured], file: Path) -> None:
    """Writes the picture and forgets it."""
    figure = picture(results)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _draw(ax: Axes, section: str, found: Sequence[Measured]) -> None:
    cases, ways = _cases(found), _drawn(found)
    for number, way in enumerate(ways):
        points = {(r.case, r.mode): r.ratio for r in found if r.way == way and r.ratio is not None}
        ratios = [points.get(case, np.nan) for case in cases]
        marker = _MARKERS[(number + number // 3) % 3]  # nine pairs with a colour
        options: dict[str, Any] = {"color": _COLOURS[number % 3], "marker": marker, "label": way}
        ax.plot(ratios, np.arange(len(cases)), linestyle="none", markersize=6, **options)
    ax.axvline(1.0, color=style.TEXT, linewidth=1)
    style.label(ax, section, f"ratio to {found[0].way}", "")
    ax.set_xscale("log")
    ratios = [result.ratio for result in found if result.ratio is not None]
    low, high = min([0.9, *ratios]) / 1.05, max([1.5, *ratios]) * 1.05
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    ax.set_xticks(ticks, [f"{_TIMES}{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.set_xlim(low, high)
    ax.set_yticks(range(len(cases)), [f"{case}, {mode}" for case, mode in cases])
    ax.set_ylim(len(cases) - 0.5, -0.5)
    ax.grid(axis="x", color="0.9")
    style.legend_above(ax, columns=_columns(ways))


def _drawn(found: Iterable[Measured]) -> list[str]:
    """Returns the ways that are compared with the first."""
    return _each(result.way for result in found if result.ratio is not None)


def _columns(names: Iterable[str]) -> int:
    """Returns how many columns of a legend fit beside each other."""
    return max(1, min(4, _LEGEND_WIDTH // (max(map(len, names)) + _MARKER_WIDTH)))


def _cases(results: Iterable[Measured]) -> list[tuple[str, str]]:
    return _each((result.case, result.mode) for result in results)


def _cell(result: Measured) -> str:
    ratio = "" if result.ratio is None else f" {_TIMES}{result.ratio:.2f}"
    return f"{_amount(result.value, result.unit)}{ratio}"


def _amount(value: float, unit: str) -> str:
    if unit == "B":
        return f"{value / 2**20:.0f} MiB"
    if unit == "s":
        return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms"
    return f"{value:,.0f} {unit}"


def _each(values: Iterable[Any]) -> list[Any]:
    """Returns what differs, in the order in which it comes first."""
    return list(dict.fromkeys(values))
