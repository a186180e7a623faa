"""Comparisons of runs, as tables."""

import math
from collections.abc import Sequence

import numpy as np

from kmp.records import GradientSample, Run, stable_name, stable_names
from kmp.report.run_summary import VALIDATION, RunSummary
from kmp.report.texts import MAX_ROWS, Table, number, share, with_omitted

_MUCH = 0.1  # of a metric, relative to its largest value
_MANY_ZEROS = 0.1  # more zeros than in the other run, as a share of all elements
_NORM_FACTOR = 4.0
_MOST_STEPS = 100

_Difference = tuple[
    int, float, float, float, float
]  # the step, the zeros of both runs, and their norms


def comparison(runs: Sequence[RunSummary]) -> tuple[Table, Table]:
    """Returns two tables of several runs, one column per run: metrics and findings, and counts.

    Of the metrics, those of the validation come first, and the first that differs is marked.
    Without metrics, the second table is empty and the first has all.
    """
    columns = ("", *(run.name for run in runs))
    metrics = _names_of_metrics(runs)
    of_metrics = [
        (name, *(number(run.metrics_of_epochs.get(name)) for run in runs)) for name in metrics
    ]
    of_metrics.append(("findings", *(run.findings_count for run in runs)))
    counts = zip(*(run.counts for run in runs), strict=True)  # all runs have the same ones
    of_counts = [(of_runs[0][0], *(value for _, value in of_runs)) for of_runs in counts]
    if not metrics:
        return Table(columns, (*of_metrics, *of_counts)), Table()
    marked = next((index for index, name in enumerate(metrics) if _differs(name, runs)), None)
    note = (
        ""
        if marked is None
        else f"The first metric that differs by more than 10 %: {metrics[marked]}."
    )
    return Table(columns, tuple(of_metrics), note, marked), Table(columns, tuple(of_counts))


def _names_of_metrics(runs: Sequence[RunSummary]) -> list[str]:
    names = dict.fromkeys(name for run in runs for name in run.metrics_of_epochs)
    return sorted(names, key=lambda name: not name.startswith(VALIDATION))


def _differs(metric: str, runs: Sequence[RunSummary]) -> bool:
    values = [run.metrics_of_epochs.get(metric, math.nan) for run in runs]
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and (
        len(finite) < len(values) or max(finite) - min(finite) > _MUCH * max(map(abs, finite))
    )


def main_metrics(runs: Sequence[RunSummary]) -> list[str]:
    """Returns at most two metrics to draw: the first that is no loss, and a loss; those of the validation if known."""
    names = _names_of_metrics(runs)
    names.sort(key=lambda name: (not name.startswith(VALIDATION), name not in ("loss", "val_loss")))
    kinds = [
        [name for name in names if name.endswith("loss") is is_loss] for is_loss in (False, True)
    ]
    return [kind[0] for kind in kinds if kind]


def difference(first: RunSummary, second: RunSummary) -> Table:
    """Returns the layers whose gradients differ in two runs, with the first sampled step in which they do."""
    found = _first_differences(first.run, second.run)
    if found is None:
        return Table(
            note=f"No layer was sampled in the same step of {first.name} and {second.name}."
        )
    if not found:
        return Table(
            note=f"The gradients of {first.name} and {second.name} are alike in all sampled steps."
        )
    earliest = sorted((step, layer, values) for layer, (step, *values) in found.items())[:MAX_ROWS]
    rows = [
        (layer, str(step), *map(share, values[:2]), *map(number, values[2:]))
        for step, layer, values in earliest
    ]
    columns = (
        "layer",
        "from step",
        *(f"{what} in {run.name}" for what in ("zero", "norm") for run in (first, second)),
    )
    note = (
        "Layers of both runs, and the first sampled step from which on their gradients differ: 10 %"
        " more of the elements are zero, or the norm is four times as large. The norm is without"
        " the loss scale."
    )
    return Table(columns, tuple(rows), with_omitted(note, len(found)))


def _first_differences(first: Run, second: Run) -> dict[str, _Difference] | None:
    """Returns for each layer the first difference of two runs; `None` if nothing can be compared.

    Gradients differ if 10 % more of the elements are zero, or if the norm is four times as large,
    in two samples of the same step in a row or in the last one: one sample alone may differ by
    chance.
    """
    names = [stable_names(run.settings.get("layers", {})) for run in (first, second)]
    samples = [{sample.step: sample for sample in run.samples} for run in (first, second)]
    steps = sorted(samples[0].keys() & samples[1].keys())
    found: dict[str, _Difference] = {}
    before: dict[str, _Difference] = {}
    is_compared = False
    for step in steps[:: len(steps) // _MOST_STEPS + 1]:
        pair = [of_run[step] for of_run in samples]
        if not all(sample.histogram.is_finite for sample in pair):
            continue
        layers, others = map(_zeros_and_norms, pair, names)
        differing = {}
        for layer in layers.keys() & others.keys():
            is_compared = True
            (zeros, norm), (other_zeros, other_norm) = layers[layer], others[layer]
            low, high = sorted((norm, other_norm))
            if abs(zeros - other_zeros) > _MANY_ZEROS or high > _NORM_FACTOR * low:
                differing[layer] = (step, zeros, other_zeros, norm, other_norm)
        found = {layer: before[layer] for layer in differing.keys() & before.keys()} | found
        before = differing
    return before | found if is_compared else None


def _zeros_and_norms(
    sample: GradientSample, names: dict[str, str]
) -> dict[str, tuple[float, float]]:
    """Returns the share of zeros and the norm of each layer with a gradient, by its name in `names`."""
    layers = sample.by_layer()
    columns = (layers.elements.tolist(), layers.zeros.tolist(), np.nan_to_num(layers.norm).tolist())
    rows = zip(layers.names, *columns, strict=True)
    return {
        stable_name(name, names): (zeros / total, norm)
        for name, total, zeros, norm in rows
        if total
    }
