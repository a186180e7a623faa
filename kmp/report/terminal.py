"""The summary for the terminal. Every text is escaped here, where it becomes a `rich` text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from kmp.records import Run
from kmp.report.format_table import both_formats
from kmp.report.run_comparison import comparison
from kmp.report.run_summary import RunSummary, summaries
from kmp.report.run_tables import other_scales
from kmp.report.texts import Table
from kmp.utils.names import printable

_RUNS_PER_TABLE = 3  # columns that fit into 80 characters


def summary(runs: Mapping[str, Run]) -> RenderableType:
    """Returns a summary to print with `rich`: verdict, findings and counts.

    The summary of several runs is a comparison.

    Args:
        runs: Runs by name, at least one.

    Returns:
        A renderable for `rich.print`.

    Raises:
        ValueError: If `runs` is empty.

    Example:
    >>> import kmp, rich
    >>> from kmp.records import Record, Run
    >>> rich.print(kmp.report.summary({"first": Run([Record(step=9)])}))  # doctest: +ELLIPSIS
    first: 9 steps
    It is not known whether float16 hurts this run. Measured: skipped steps were not
    ...
    """
    return summary_of(summaries(runs))


def summary_of(found: Sequence[RunSummary]) -> RenderableType:
    """Returns the same as `summary`, of runs that are summarized already."""
    return Group(*(_comparison(found) if len(found) > 1 else _single_run(found[0])))


def _single_run(run: RunSummary) -> Iterator[RenderableType]:
    yield _heading(run)
    yield _text(run.advice.verdict, "bold")
    yield from _findings(run)
    yield Text()
    yield from _table(Table(("", ""), run.numbers))
    scales = other_scales(run)  # empty unless the run is in float16
    if scales.rows:
        yield Text()
    yield from _table(scales)
    formats = both_formats(run)
    if formats.rows:
        yield Text()
    yield from _table(formats)


def _comparison(runs: Sequence[RunSummary]) -> Iterator[RenderableType]:
    for run in runs:
        yield _heading(run)
        yield Padding(_text(run.advice.verdict, "bold"), (0, 0, 0, 2))
    for start in range(0, len(runs), _RUNS_PER_TABLE):
        yield Text()
        of_metrics, of_counts = comparison(runs[start : start + _RUNS_PER_TABLE])
        yield from _table(replace(of_metrics, rows=of_metrics.rows + of_counts.rows))
    for run in runs:
        if run.advice:
            yield Text()
            yield _text(f"Findings in {run.name}", "bold cyan")
            yield from _findings(run)


def _heading(run: RunSummary) -> Text:
    return Text.assemble(_text(run.name, "bold cyan"), _text(f": {run.subtitle}"))


def _findings(run: RunSummary) -> Iterator[RenderableType]:
    for number, finding in enumerate(run.advice, 1):
        grid = RichTable.grid(padding=(0, 1))
        grid.add_column(justify="right", no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row(f"{number}.", _text(finding.title, "bold"))
        grid.add_row("", _text(f"Evidence: {finding.evidence}"))
        if finding.change:
            grid.add_row("", "Change:")
        for line in finding.change.splitlines():
            grid.add_row("", Padding(_text(line, "green"), (0, 0, 0, 2)))
        if finding.tried:
            grid.add_row("", _text(f"Tried: {finding.tried}"))
        if finding.note:
            grid.add_row("", _text(f"Note: {finding.note}"))
        yield Text()
        yield grid


def _table(table: Table) -> Iterator[RenderableType]:
    if table.intro:
        yield _text(table.intro)
    if table.rows:
        grid = RichTable(
            box=None, padding=(0, 2, 0, 0), show_header=any(table.columns), pad_edge=False
        )
        for index, name in enumerate(table.columns):
            is_number = index and len(table.columns) > 2
            widest = None
            if is_number and table.columns[0] == "layer":
                # The headings break between words, so that the names of layers need not.
                widest = max(map(len, [*name.split(), *(row[index] for row in table.rows)]))
            grid.add_column(
                _text(name),
                overflow="fold",
                justify="right" if is_number else "left",
                max_width=widest,
            )
        for index, row in enumerate(table.rows):
            grid.add_row(*map(_text, row), style="bold" if index == table.marked else None)
        yield grid
    if table.note:
        yield _text(table.note)


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style)
