"""Comparisons of runs, as tables."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kmp.diagnosis import thresholds
from kmp.records import GradientSample, Run
from kmp.records.layer_names import stable_name, stable_names
from kmp.report.run_summary import VALIDATION, RunSummary
from kmp.report.texts import MAX_ROWS, Table, TextRow, number, share, with_omitted

_MOST_STEPS = 100


class _Layer(NamedTuple):
    """What a sample has of a layer: the share of zeros, and the norm."""

    zeros: float
    norm: float


class _Difference(NamedTuple):
    """The step from which a layer differs in two runs, and its values in that step."""

    step: int
    first: _Layer
    second: _Layer


def comparison(runs: Sequence[RunSummary]) -> tuple[Table, Table]:
    """Returns two tables of several runs, one column per run: metrics and findings, and counts.

    The metrics of the validation come first, and the first metric that differs is marked.
    Without metrics, the second table is empty and the first has all.
    """
    columns = ("", *(run.name for run in runs))

    metrics = _names_of_metrics(runs)
    of_metrics: list[TextRow] = []
    for name in metrics:
        values = [number(run.metrics_of_epochs.get(name)) for run in runs]
        of_metrics.append((name, *values))
    of_metrics.append(("findings", *(run.findings_count for run in runs)))

    counts = [dict(run.counts) for run in runs]
    of_counts: list[TextRow] = []
    for name in max(counts, key=len):  # a run without a loss scale has one less
        of_counts.append((name, *(each.get(name, "none") for each in counts)))

    if not metrics:
        return Table(columns, (*of_metrics, *of_counts)), Table()
    second = Table(columns, tuple(of_counts))
    for index, name in enumerate(metrics):
        if _differs(name, runs):
            least = f"{100 * thresholds.DIFFERENT_METRIC:.0f} %"
            note = f"The first metric that differs by more than {least}: {name}."
            return Table(columns, tuple(of_metrics), note, marked=index), second
    return Table(columns, tuple(of_metrics)), second


def _names_of_metrics(runs: Sequence[RunSummary]) -> list[str]:
    names = dict.fromkeys(name for run in runs for name in run.metrics_of_epochs)
    return sorted(names, key=lambda name: not name.startswith(VALIDATION))


def _differs(metric: str, runs: Sequence[RunSummary]) -> bool:
    values = [run.metrics_of_epochs.get(metric, math.nan) for run in runs]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return False
    if len(finite) < len(values):
        return True
    return max(finite) - min(finite) > thresholds.DIFFERENT_METRIC * max(map(abs, finite))


def main_metrics(runs: Sequence[RunSummary]) -> list[str]:
    """Returns at most two metrics to draw: the first that is no loss, and a loss.

    Metrics of the validation are preferred, and a loss of the model is preferred to that of one
    output.
    """
    names = _names_of_metrics(runs)
    names.sort(key=lambda name: (not name.startswith(VALIDATION), name not in ("loss", "val_loss")))
    losses = [name for name in names if name.endswith("loss")]
    others = [name for name in names if not name.endswith("loss")]
    return others[:1] + losses[:1]


def difference(first: RunSummary, second: RunSummary) -> Table:
    """Returns the layers whose gradients differ in two runs, and the first such step."""
    found = _first_differences(first.run, second.run)
    both = f"{first.name} and {second.name}"
    if found is None:
        return Table(note=f"No layer was sampled in the same step of {both}.")
    if not found:
        return Table(note=f"The gradients of {both} are alike in all sampled steps.")
    rows = []
    for layer, each in sorted(found.items(), key=lambda item: (item[1].step, item[0]))[:MAX_ROWS]:
        zeros = share(each.first.zeros), share(each.second.zeros)
        norms = number(each.first.norm), number(each.second.norm)
        rows.append((layer, str(each.step), *zeros, *norms))
    columns = (
        "layer",
        "from step",
        f"zero in {first.name}",
        f"zero in {second.name}",
        f"norm in {first.name}",
        f"norm in {second.name}",
    )
    note = (
        "Layers of both runs, and the first sampled step from which on their gradients differ:"
        f" {100 * thresholds.MORE_ZEROS:.0f} % more of the elements are zero, or the norm is"
        f" {thresholds.LARGER_NORM:.0f} times as large. The norm is without the loss scale."
    )
    return Table(columns, tuple(rows), with_omitted(note, len(found)))


def _first_differences(first: Run, second: Run) -> dict[str, _Difference] | None:
    """Returns for each layer the first difference of two runs; `None` if nothing can be compared.

    Gradients differ if many more of the elements are zero, or if the norm is much larger, in two
    samples of the same step in a row or in the last one: one sample alone may differ by chance.
    """
    names = stable_names(first.settings.layers)
    other_names = stable_names(second.settings.layers)
    samples = {sample.step: sample for sample in first.samples}
    other_samples = {sample.step: sample for sample in second.samples}
    steps = sorted(samples.keys() & other_samples.keys())
    found: dict[str, _Difference] = {}
    before: dict[str, _Difference] = {}
    is_compared = False
    for step in steps[:: len(steps) // _MOST_STEPS + 1]:
        sample, other = samples[step], other_samples[step]
        if not (sample.is_finite and other.is_finite):
            continue
        layers, other_layers = _layers(sample, names), _layers(other, other_names)
        is_compared = is_compared or bool(layers.keys() & other_layers.keys())
        differing = _differences(step, layers, other_layers)
        for layer in differing.keys() & before.keys():
            found.setdefault(layer, before[layer])
        before = differing
    return {**before, **found} if is_compared else None


def _differences(
    step: int, layers: Mapping[str, _Layer], others: Mapping[str, _Layer]
) -> dict[str, _Difference]:
    found = {}
    for name in layers.keys() & others.keys():
        layer, other = layers[name], others[name]
        has_more_zeros = abs(layer.zeros - other.zeros) > thresholds.MORE_ZEROS
        low, high = sorted((layer.norm, other.norm))
        if has_more_zeros or high > thresholds.LARGER_NORM * low:
            found[name] = _Difference(step, layer, other)
    return found


def _layers(sample: GradientSample, names: Mapping[str, str]) -> dict[str, _Layer]:
    """Returns what a sample has of each layer with a gradient, by its name in `names`."""
    layers = sample.by_layer()
    totals, zeros = layers.elements.tolist(), layers.zeros.tolist()
    norms = np.nan_to_num(layers.norm).tolist()
    found = {}
    for name, total, zero, norm in zip(layers.names, totals, zeros, norms, strict=True):
        if total:
            found[stable_name(name, names)] = _Layer(zero / total, norm)
    return found
