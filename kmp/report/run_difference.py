"""Where the gradients of two runs differ first."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kmp.records import GradientSample, Run, stable_name, stable_names

_MANY_ZEROS = 0.1  # more zeros than in the other run, as a share of all elements
_NORM_FACTOR = 4.0
_MOST_STEPS = 100


class Difference(NamedTuple):
    """The first sampled step in which the gradients of a layer differ in two runs.

    Attributes:
        layer: The name of the layer, see `kmp.records.stable_names`.
        step: The step.
        zeros: The shares of elements that are zero, in both runs.
        norms: The norms of the gradients without the loss scale, in both runs.
    """

    layer: str
    step: int
    zeros: tuple[float, float]
    norms: tuple[float, float]


def first_differences(first: Run, second: Run) -> list[Difference] | None:
    """Returns for each layer the first difference of two runs, earliest first; `None` if nothing can be compared.

    Gradients differ if 10 % more of the elements are zero, or if the norm is four times as large, in two samples of the
    same step in a row or in the last one: one sample alone may differ by chance.
    """
    names = [stable_names(run.settings.get("layers", {})) for run in (first, second)]
    steps = sorted({sample.step for sample in first.samples} & {sample.step for sample in second.samples})
    steps = steps[:: len(steps) // _MOST_STEPS + 1]
    runs = [_by_step(run, known, steps) for run, known in zip((first, second), names, strict=True)]
    before: dict[str, Difference] = {}
    found: dict[str, Difference] = {}
    compared = [step for step in steps if step in runs[0] and step in runs[1]]
    for step in compared:
        differing = {}
        for layer in runs[0][step].keys() & runs[1][step].keys():
            (zeros, norm), (other_zeros, other_norm) = runs[0][step][layer], runs[1][step][layer]
            low, high = sorted((norm, other_norm))
            if abs(zeros - other_zeros) > _MANY_ZEROS or high > _NORM_FACTOR * low:
                differing[layer] = Difference(layer, step, (zeros, other_zeros), (norm, other_norm))
        for layer in differing.keys() & before.keys():
            found.setdefault(layer, before[layer])
        before = differing
    found = before | found
    is_compared = any(runs[0][step].keys() & runs[1][step].keys() for step in compared)
    return sorted(found.values(), key=lambda difference: (difference.step, difference.layer)) if is_compared else None


def _by_step(run: Run, names: Mapping[str, str], steps: Sequence[int]) -> dict[int, dict[str, tuple[float, float]]]:
    """Returns the share of zeros and the norm of each layer with a gradient, for the steps with finite gradients."""
    wanted = set(steps)
    samples = (sample for sample in run.samples if sample.step in wanted)
    return {sample.step: _by_layer(sample, names) for sample in samples if sample.histogram.is_finite}


def _by_layer(sample: GradientSample, names: Mapping[str, str]) -> dict[str, tuple[float, float]]:
    layers = sample.by_layer()
    columns = zip(
        layers.names, layers.elements.tolist(), layers.zeros.tolist(), np.nan_to_num(layers.norm).tolist(), strict=True
    )
    return {stable_name(name, names): (zero / total, norm) for name, total, zero, norm in columns if total}
