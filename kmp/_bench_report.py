"""A benchmark's figures as tables and as a picture."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from kmp import _plot_style as style
from kmp._bench_clock import Measured

_COLOURS = (style.MIDDLE, style.DARK, style.LIGHT)
_MARKERS = ("X", "o", "s")
_MOST_COLUMNS = 4
_TIMES = "\N{MULTIPLICATION SIGN}"
_TICKS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0)


def show_header(console: Console, header: dict[str, Any]) -> None:
    """Prints what is measured on."""
    for name, value in header.items():
        text = ", ".join(f"{k}: {v}" for k, v in value.items()) if isinstance(value, dict) else value
        console.print(f"{name}: {', '.join(text) or 'none' if isinstance(text, list) else text}", highlight=False)


def show(console: Console, results: Sequence[Measured]) -> None:
    """Prints a table for each section: a row for each case and mode, a column for each way; many ways are the rows."""
    for section in _each(result.section for result in results):
        console.print(_table(section, [result for result in results if result.section == section]))


def _table(section: str, found: Sequence[Measured]) -> Table:
    ways, cases = _each(result.way for result in found), _cases(found, section)
    cells = {(result.case, result.mode, result.way): _cell(result) for result in found}
    table = Table(title=section, title_justify="left")
    if len(ways) > _MOST_COLUMNS:
        table.add_column("")
        for case, mode in cases:
            table.add_column(f"{case}, {mode}", justify="right")
        for way in ways:
            table.add_row(way, *(cells.get((case, mode, way), "") for case, mode in cases))
        return table
    for name in ("on", "mode"):
        table.add_column(name)
    for way in ways:
        table.add_column(way, justify="right")
    for case, mode in cases:
        table.add_row(case, mode, *(cells.get((case, mode, way), "") for way in ways))
    return table


def in_words(results: Sequence[Measured]) -> str:
    """Returns one comparison as a line, for a benchmark that is still running."""
    first = results[0]
    return f"{first.section}, {first.case}, {first.mode}: " + "; ".join(f"{r.way} {_cell(r)}" for r in results)


def picture(results: Sequence[Measured]) -> Figure:
    """Draws the ratios, a panel for each section that has some."""
    sections = _each(result.section for result in results if result.ratio is not None)
    rows = [len(_cases(results, section)) for section in sections]
    size = (8, 1.2 + 0.28 * sum(rows) + 0.6 * len(rows))
    figure, panels = plt.subplots(
        len(sections), figsize=size, layout="constrained", squeeze=False, height_ratios=[row + 1 for row in rows]
    )
    for ax, section in zip(panels[:, 0], sections, strict=True):
        _draw(ax, section, [result for result in results if result.section == section])
    return figure


def save_picture(results: Sequence[Measured], file: Path) -> None:
    """Writes the picture and forgets it."""
    figure = picture(results)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _draw(ax: Axes, section: str, found: Sequence[Measured]) -> None:
    cases = _cases(found, section)
    for number, way in enumerate(_each(result.way for result in found if result.ratio is not None)):
        points = {(r.case, r.mode): r.ratio for r in found if r.way == way and r.ratio is not None}
        ratios = [points.get(case, np.nan) for case in cases]
        marker = _MARKERS[(number + number // 3) % 3]  # nine pairs with a colour
        options = {"color": _COLOURS[number % 3], "marker": marker, "label": way}
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
    style.legend_above(ax, columns=4)


def _cases(results: Iterable[Measured], section: str) -> list[tuple[str, str]]:
    return _each((result.case, result.mode) for result in results if result.section == section)


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
