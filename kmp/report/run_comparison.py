"""Comparisons of runs, as tables."""

import math
from collections.abc import Sequence

from kmp.report.run_difference import first_differences
from kmp.report.run_summary import VALIDATION, RunSummary
from kmp.report.text_formats import MISSING, number, share
from kmp.report.text_table import MAX_ROWS, Table, with_omitted

_MUCH = 0.1  # of a metric, relative to its largest value


def comparison(runs: Sequence[RunSummary]) -> tuple[Table, Table]:
    """Returns two tables of several runs, one column per run: metrics and findings, and counts.

    Of the metrics, those of the validation come first, and the first that differs is marked. Without metrics, the
    second table is empty and the first has all.
    """
    metrics = list(dict.fromkeys(name for summary in runs for name in summary.metrics_of_epochs))
    metrics.sort(key=lambda name: not name.startswith(VALIDATION))
    of_metrics = [(name, *(_metric(summary, name) for summary in runs)) for name in metrics]
    of_metrics.append(("findings", *(summary.findings_count for summary in runs)))
    names = list(dict.fromkeys(name for summary in runs for name, _ in summary.counts))
    of_counts = [(name, *(dict(summary.counts).get(name, MISSING) for summary in runs)) for name in names]
    marked = next((index for index, name in enumerate(metrics) if _differs(name, runs)), None)
    note = "" if marked is None else f"The first metric that differs by more than 10 %: {metrics[marked]}."
    columns = ("", *(summary.name for summary in runs))
    if not metrics:
        return Table(columns, (*of_metrics, *of_counts), ""), Table((), (), "")
    return Table(columns, tuple(of_metrics), note, marked), Table(columns, tuple(of_counts), "")


def _metric(summary: RunSummary, name: str) -> str:
    value = summary.metrics_of_epochs.get(name)
    return MISSING if value is None else number(value)


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
