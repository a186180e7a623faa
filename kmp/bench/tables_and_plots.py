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
_COARSE_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)


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
    return f"{_joined(first.section, first.case, first.mode)}: {values}"


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
        of_variant = {(result.case, result.mode): result for result in results if result.variant == variant}
        _draw_variant(ax, index, variant, [of_variant.get(case) for case in cases])
    ax.axvline(1.0, color=style.TEXT, linewidth=1)
    style.label(ax, section, f"ratio to {results[0].variant}", "")
    ax.set_xscale("log")
    ratios = [ratio for result in results for ratio in (result.ratio, *(result.ratio_range or ())) if ratio]
    ratios = [ratio for ratio in ratios if ratio > 0]  # noise may make a difference of two times negative
    low, high = min([0.9, *ratios]) / 1.05, max([1.5, *ratios]) * 1.05
    ticks = [tick for tick in (_TICKS if high < 6 * low else _COARSE_TICKS) if low <= tick <= high]
    ax.set_xticks(ticks, [f"{_TIMES}{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.set_xlim(low, high)
    ax.set_yticks(range(len(cases)), [_joined(case, mode) for case, mode in cases])
    ax.set_ylim(len(cases) - 0.5, -0.5)
    ax.grid(axis="x", color="0.9")
    style.legend_above(ax, columns=_legend_columns(variants))


def _draw_variant(ax: Axes, index: int, variant: str, rows: Sequence[Measurement | None]) -> None:
    """Draws the ratios of a variant, and their ranges as lines.

    Args:
        ax: The panel.
        index: The number of the variant.
        variant: Its name, for the legend.
        rows: The result in each row of the panel; `None` if the variant has none there.
    """
    ratios = [np.nan if result is None or result.ratio is None else result.ratio for result in rows]
    ranges = [(row, *result.ratio_range) for row, result in enumerate(rows) if result and result.ratio_range]
    colour, marker = _COLOURS[index % 3], _MARKERS[(index + index // 3) % 3]  # nine different pairs
    ax.hlines(*np.reshape(ranges, (-1, 3)).T, color=colour, linewidth=1, alpha=0.6)
    ax.plot(ratios, np.arange(len(rows)), linestyle="none", markersize=6, color=colour, marker=marker, label=variant)


def _variants_with_ratio(results: Iterable[Measurement]) -> list[str]:
    return _unique(result.variant for result in results if result.ratio is not None)


def _legend_columns(names: Iterable[str]) -> int:
    """Returns the number of columns for which the legend is wide enough, at most 4."""
    return max(1, min(4, _LEGEND_WIDTH // (max(map(len, names)) + _MARKER_WIDTH)))


def _cases(results: Iterable[Measurement]) -> list[tuple[str, str]]:
    return _unique((result.case, result.mode) for result in results)


def _cell(result: Measurement) -> str:
    """Returns the value, and the ratio with its range, such as "20.00 ms x1.60 (1.55-1.71)"."""
    ratio = "" if result.ratio is None else f" {_TIMES}{result.ratio:.2f}"
    spread = "" if result.ratio_range is None else f" ({result.ratio_range[0]:.2f}-{result.ratio_range[1]:.2f})"
    return f"{_amount(result.value, result.unit)}{ratio}{spread}"


def _joined(*names: str) -> str:
    return ", ".join(name for name in names if name)


def _amount(value: float, unit: str) -> str:
    if unit == "B":
        return f"{value / 2**20:.0f} MiB" if value >= 2**20 or not value else f"{value / 2**10:.1f} KiB"
    if unit == "s":
        return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms"
    return f"{value:,.0f} {unit}"


def _unique(values: Iterable[Any]) -> list[Any]:
    """Returns the distinct values in the order of their first occurrence."""
    return list(dict.fromkeys(values))
