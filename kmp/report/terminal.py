"""A report in the terminal."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from kmp.advice import Finding
from kmp.report.run_summary import RunSummary, Table, code_lines, comparison

_SIDE_BY_SIDE = 3  # columns of runs that 80 characters hold


def render(runs: Sequence[RunSummary]) -> RenderableType:
    """Returns one run's verdict, findings and counts, or those of several, compared."""
    return Group(*(_several(runs) if len(runs) > 1 else _one(runs[0])))


def _one(facts: RunSummary) -> Iterator[RenderableType]:
    yield Text.assemble((facts.name, "bold cyan"), f": {facts.subtitle}")
    yield Text(facts.advice.verdict, "bold")
    yield from _findings(facts)
    yield Text()
    yield _table(Table(("", ""), facts.counts, ""))
    if facts.other_scales.rows:
        yield Text()
        yield _table(facts.other_scales)
    yield Text(facts.other_scales.note)


def _several(runs: Sequence[RunSummary]) -> Iterator[RenderableType]:
    for facts in runs:
        yield Text.assemble((facts.name, "bold cyan"), f": {facts.subtitle}")
        yield Padding(Text(facts.advice.verdict, "bold"), (0, 0, 0, 2))
    for start in range(0, len(runs), _SIDE_BY_SIDE):
        yield Text()
        yield _table(comparison(runs[start : start + _SIDE_BY_SIDE]))
    for facts in runs:
        if facts.advice:
            yield Text()
            yield Text(f"What was found in {facts.name}", "bold cyan")
            yield from _findings(facts)


def _findings(facts: RunSummary) -> Iterator[RenderableType]:
    for place, finding in enumerate(facts.advice, 1):
        yield Text()
        yield from _finding(place, finding)


def _finding(place: int, finding: Finding) -> Iterator[RenderableType]:
    grid = RichTable.grid(padding=(0, 1))
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(f"{place}.", Text(finding.title, "bold"))
    grid.add_row("", Text(f"RunMetrics: {finding.evidence}"))
    grid.add_row("", "Change:")
    for line in code_lines(finding.change):
        grid.add_row("", Padding(Text(line, "green"), (0, 0, 0, 2)))
    yield grid


def _table(table: Table) -> RichTable:
    shown = RichTable(box=None, padding=(0, 2, 0, 0), show_header=any(table.columns), pad_edge=False)
    for place, name in enumerate(table.columns):
        shown.add_column(Text(name), overflow="fold", justify="right" if place and len(table.columns) > 2 else "left")
    for row in table.rows:
        shown.add_row(*map(Text, row))
    return shown
