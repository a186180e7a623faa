"""Comparisons of runs, as tables."""

import math
from collections.abc import Sequence
from dataclasses import replace

from kmp.report.run_difference import first_differences
from kmp.report.run_summary import VALIDATION, RunSummary
from kmp.report.text_formats import MISSING, number, share
from kmp.report.text_table import MAX_ROWS, Table, with_omitted

_MUCH = 0.1  # of a metric, relative to its largest value


def comparison(runs: Sequence[RunSummary]) -> Table:
    """Returns metrics and counts of several runs, one column per run. The first row that differs is marked."""
    names = list(dict.fromkeys(name for summary in runs for name, _ in summary.counts))
    metrics = {name for summary in runs for name in summary.metrics_of_epochs}
    names.sort(key=lambda name: (name not in metrics, name in metrics and not name.startswith(VALIDATION)))
    rows = [(name, *(dict(summary.counts).get(name, MISSING) for summary in runs)) for name in names]
    rows.insert(len(metrics), ("findings", *(summary.findings_count for summary in runs)))
    marked = next((index for index, name in enumerate(names[: len(metrics)]) if _differs(name, runs)), None)
    note = "" if marked is None else f"The first metric that differs by more than 10 %: {names[marked]}."
    return Table(("", *(summary.name for summary in runs)), tuple(rows), note, marked)


def split_after_findings(table: Table) -> tuple[Table, Table]:
    """Returns the metrics and findings of a comparison, and its counts; without metrics, all in the first."""
    names = [row[0] for row in table.rows]
    count = names.index("findings") + 1
    if count == 1:
        return table, Table((), (), "")
    return replace(table, rows=table.rows[:count]), Table(table.columns, table.rows[count:], "")


def _differs(metric: str, runs: Sequence[RunSummary]) -> bool:
    values = [summary.metrics_of_epochs.get(metric, math.nan) for summary in runs]
    finite = [value for value in values if math.isfinite(value)]
    return len(finite) < len(values) or max(finite) - min(finite) > _MUCH * max(map(abs, finite))


def main_metrics(runs: Sequence[RunSummary]) -> list[str]:
    """Returns at most two metrics to draw: the first that is no loss, and a loss; those of the validation if known."""
    names = list(dict.fromkeys(name for summary in runs for name in summary.metrics_of_epochs))
    names.sort(key=lambda name: (not name.startswith(VALIDATION), name not in ("loss", "val_loss")))
    kinds = [[name for name in names if name.endswith("loss") is is_loss] for is_loss in (False, True)]
    return [kind[0] for kind in kinds if kind]


def difference(first: RunSummary, second: RunSummary) -> Table:
    """Returns the layers whose gradients differ in two runs, with the first sampled step in which they do."""
    found = first_differences(first.run, second.run)
    if found is None:
        return Table((), (), f"No layer was sampled in the same step of {first.name} and {second.name}.")
    if not found:
        return Table((), (), f"The gradients of {first.name} and {second.name} are alike in all sampled steps.")
    rows = [
        (layer, str(step), *map(share, zeros), *map(number, norms)) for layer, step, zeros, norms in found[:MAX_ROWS]
    ]
    columns = ("layer", "from step", *(f"{what}, {run.name}" for what in ("zero", "norm") for run in (first, second)))
    note = (
        "Layers of both runs, and the first sampled step from which on their gradients differ: 10 % more of the "
        "elements are zero, or the norm is four times as large. The norm is without the loss scale."
    )
    return Table(columns, tuple(rows), with_omitted(note, len(found)))
