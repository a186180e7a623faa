"""Renders a report for the terminal."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from kmp.advice import Finding
from kmp.report.run_comparison import comparison
from kmp.report.run_summary import RunSummary
from kmp.report.text_formats import code_lines
from kmp.report.text_table import Table
from kmp.utils import printable

_RUNS_PER_TABLE = 3  # columns that fit into 80 characters


def render(runs: Sequence[RunSummary]) -> RenderableType:
    """Returns the verdict, findings and counts of one run, or a comparison of several."""
    return Group(*(_comparison(runs) if len(runs) > 1 else _single_run(runs[0])))


def _single_run(summary: RunSummary) -> Iterator[RenderableType]:
    yield _heading(summary)
    yield _text(summary.advice.verdict, "bold")
    yield from _findings(summary)
    yield Text()
    yield _table(Table(("", ""), summary.numbers, ""))
    if summary.other_scales.rows:
        yield Text()
        yield _table(summary.other_scales)
    yield _text(summary.other_scales.note)


def _comparison(runs: Sequence[RunSummary]) -> Iterator[RenderableType]:
    for summary in runs:
        yield _heading(summary)
        yield Padding(_text(summary.advice.verdict, "bold"), (0, 0, 0, 2))
    for start in range(0, len(runs), _RUNS_PER_TABLE):
        yield Text()
        of_metrics, of_counts = comparison(runs[start : start + _RUNS_PER_TABLE])
        yield _table(replace(of_metrics, rows=of_metrics.rows + of_counts.rows))
        if of_metrics.note:
            yield _text(of_metrics.note)
    for summary in runs:
        if summary.advice:
            yield Text()
            yield _text(f"Findings in {summary.name}", "bold cyan")
            yield from _findings(summary)


def _findings(summary: RunSummary) -> Iterator[RenderableType]:
    for number, finding in enumerate(summary.advice, 1):
        yield Text()
        yield from _finding(number, finding)


def _finding(number: int, finding: Finding) -> Iterator[RenderableType]:
    grid = RichTable.grid(padding=(0, 1))
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(f"{number}.", _text(finding.title, "bold"))
    grid.add_row("", _text(f"Evidence: {finding.evidence}"))
    if finding.change:
        grid.add_row("", "Change:")
    for line in code_lines(finding.change):
        grid.add_row("", Padding(_text(line, "green"), (0, 0, 0, 2)))
    if finding.note:
        grid.add_row("", _text(f"Note: {finding.note}"))
    yield grid


def _table(table: Table) -> RichTable:
    rendered = RichTable(box=None, padding=(0, 2, 0, 0), show_header=any(table.columns), pad_edge=False)
    for index, name in enumerate(table.columns):
        rendered.add_column(
            _text(name), overflow="fold", justify="right" if index and len(table.columns) > 2 else "left"
        )
    for index, row in enumerate(table.rows):
        rendered.add_row(*map(_text, row), style="bold" if index == table.marked else None)
    return rendered


def _heading(summary: RunSummary) -> Text:
    return Text.assemble(_text(summary.name, "bold cyan"), _text(f": {summary.subtitle}"))


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style)
