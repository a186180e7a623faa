"""Benchmark results as tables and as a figure."""

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

from kmp.bench.timing import Measurement
from kmp.plots import style

_COLOURS = (style.MIDDLE, style.DARK, style.LIGHT)
_MARKERS = ("X", "o", "s")
_MAX_COLUMNS = 4
_TIMES = "\N{MULTIPLICATION SIGN}"
_LEGEND_WIDTH, _MARKER_WIDTH = 84, 6  # in characters
_TICKS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0)


def show_header(console: Console, header: dict[str, Any]) -> None:
    """Prints the versions and the hardware."""
    for name, value in header.items():
        text = ", ".join(f"{k}: {v}" for k, v in value.items()) if isinstance(value, dict) else value
        console.print(f"{name}: {', '.join(text) or 'none' if isinstance(text, list) else text}", highlight=False)


def show(console: Console, results: Sequence[Measurement]) -> None:
    """Prints a table for each section: a row for each case and mode, a column for each variant.

    A section of more than `_MAX_COLUMNS` variants has a table for each case: a row for each variant, a column for each
    mode.
    """
    for section in _unique(result.section for result in results):
        in_section = [result for result in results if result.section == section]
        if len(_unique(result.variant for result in in_section)) <= _MAX_COLUMNS:
            console.print(_table_of_cases(section, in_section))
            continue
        for case in _unique(result.case for result in in_section):
            of_case = [result for result in in_section if result.case == case]
            console.print(_table_of_variants(f"{section}: {case}", of_case))


def _table_of_cases(title: str, results: Sequence[Measurement]) -> Table:
    variants = _unique(result.variant for result in results)
    cells = {(result.case, result.mode, result.variant): _cell(result) for result in results}
    table = _table(title, ["on", "mode"], variants)
    for case, mode in _cases(results):
        table.add_row(case, mode, *(cells.get((case, mode, variant), "") for variant in variants))
    return table


def _table_of_variants(title: str, results: Sequence[Measurement]) -> Table:
    modes = _unique(result.mode for result in results)
    cells = {(result.mode, result.variant): _cell(result) for result in results}
    table = _table(title, [""], modes)
    for variant in _unique(result.variant for result in results):
        table.add_row(variant, *(cells.get((mode, variant), "") for mode in modes))
    return table


def _table(title: str, label_columns: Sequence[str], value_columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in label_columns:
        table.add_column(name, no_wrap=True)
    for name in value_columns:
        table.add_column(name, justify="right", overflow="fold")
    return table


def in_words(results: Sequence[Measurement]) -> str:
    """Returns one comparison as a line of text, to print while the benchmark runs."""
    first = results[0]
    values = "; ".join(f"{result.variant} {_cell(result)}" for result in results)
    return f"{first.section}, {first.case}, {first.mode}: {values}"


def ratio_figure(results: Sequence[Measurement]) -> Figure:
    """Draws the ratios, with a panel for each section that has any."""
    sections = _unique(result.section for result in results if result.ratio is not None)
    by_section = [[result for result in results if result.section == section] for section in sections]
    rows = [len(_cases(in_section)) for in_section in by_section]
    names = [_variants_with_ratio(in_section) for in_section in by_section]
    legend_rows = sum(math.ceil(len(variants) / _legend_columns(variants)) for variants in names)
    size = (8, 1.2 + 0.28 * sum(rows) + 0.4 * len(rows) + 0.2 * legend_rows)
    figure, panels = plt.subplots(
        len(sections), figsize=size, layout="constrained", squeeze=False, height_ratios=[row + 1 for row in rows]
    )
    for ax, section, in_section in zip(panels[:, 0], sections, by_section, strict=True):
        _draw(ax, section, in_section)
    return figure


def save_figure(results: Sequence[Measurement], file: Path) -> None:
    """Draws the ratios into a file."""
    figure = ratio_figure(results)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _draw(ax: Axes, section: str, results: Sequence[Measurement]) -> None:
    cases, variants = _cases(results), _variants_with_ratio(results)
    for index, variant in enumerate(variants):
        points = {(r.case, r.mode): r.ratio for r in results if r.variant == variant and r.ratio is not None}
        ratios = [points.get(case, np.nan) for case in cases]
        marker = _MARKERS[(index + index // 3) % 3]  # with the colour: nine different pairs
        options: dict[str, Any] = {"color": _COLOURS[index % 3], "marker": marker, "label": variant}
        ax.plot(ratios, np.arange(len(cases)), linestyle="none", markersize=6, **options)
    ax.axvline(1.0, color=style.TEXT, linewidth=1)
    style.label(ax, section, f"ratio to {results[0].variant}", "")
    ax.set_xscale("log")
    ratios = [result.ratio for result in results if result.ratio is not None]
    low, high = min([0.9, *ratios]) / 1.05, max([1.5, *ratios]) * 1.05
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    ax.set_xticks(ticks, [f"{_TIMES}{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.set_xlim(low, high)
    ax.set_yticks(range(len(cases)), [f"{case}, {mode}" for case, mode in cases])
    ax.set_ylim(len(cases) - 0.5, -0.5)
    ax.grid(axis="x", color="0.9")
    style.legend_above(ax, columns=_legend_columns(variants))


def _variants_with_ratio(results: Iterable[Measurement]) -> list[str]:
    return _unique(result.variant for result in results if result.ratio is not None)


def _legend_columns(names: Iterable[str]) -> int:
    """Returns the number of columns for which the legend is wide enough, at most 4."""
    return max(1, min(4, _LEGEND_WIDTH // (max(map(len, names)) + _MARKER_WIDTH)))


def _cases(results: Iterable[Measurement]) -> list[tuple[str, str]]:
    return _unique((result.case, result.mode) for result in results)


def _cell(result: Measurement) -> str:
    ratio = "" if result.ratio is None else f" {_TIMES}{result.ratio:.2f}"
    return f"{_amount(result.value, result.unit)}{ratio}"


def _amount(value: float, unit: str) -> str:
    if unit == "B":
        return f"{value / 2**20:.0f} MiB"
    if unit == "s":
        return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms"
    return f"{value:,.0f} {unit}"


def _unique(values: Iterable[Any]) -> list[Any]:
    """Returns the distinct values in the order of their first occurrence."""
    return list(dict.fromkeys(values))
