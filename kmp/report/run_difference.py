"""Where the gradients of two runs differ first."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from kmp.records import ZERO_BIN, GradientSample, Run, iterate_samples, layer_of, stable_name, stable_names

_MANY_ZEROS = 0.1  # more zeros than in the other run, as a share of all elements
_NORM_FACTOR = 4.0


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
    newest = {sample.step: sample for sample in iterate_samples(first.rows)}
    before: dict[str, Difference] = {}
    found: dict[str, Difference] = {}
    is_compared = False
    for other in iterate_samples(second.rows):
        one = newest.get(other.step)
        if one is None or not (one.histogram.is_finite and other.histogram.is_finite):
            continue
        differing = {}
        layers = [_by_layer(sample, known) for sample, known in zip((one, other), names, strict=True)]
        for layer in layers[0].keys() & layers[1].keys():
            is_compared = True
            (zeros, norm), (other_zeros, other_norm) = layers[0][layer], layers[1][layer]
            low, high = sorted((norm, other_norm))
            if abs(zeros - other_zeros) > _MANY_ZEROS or high > _NORM_FACTOR * low:
                differing[layer] = Difference(layer, other.step, (zeros, other_zeros), (norm, other_norm))
        for layer in differing.keys() & before.keys():
            found.setdefault(layer, before[layer])
        before = differing
    found = before | found
    return sorted(found.values(), key=lambda difference: (difference.step, difference.layer)) if is_compared else None


def _by_layer(sample: GradientSample, names: Mapping[str, str]) -> dict[str, tuple[float, float]]:
    """Returns the share of zeros and the norm of each layer with a gradient."""
    totals: dict[str, np.ndarray] = {}
    columns = zip(sample.names, sample.counts[:, ZERO_BIN], sample.counts.sum(1), sample.norm, strict=True)
    for name, zeros, elements, norm in columns:
        layer = stable_name(layer_of(name), names)
        totals[layer] = totals.get(layer, np.zeros(3)) + np.array([zeros, elements, np.nan_to_num(norm) ** 2])
    return {
        layer: (float(zeros / elements), float(np.sqrt(squares)))
        for layer, (zeros, elements, squares) in totals.items()
        if elements
    }
