"""Gradient statistics of one training step, per variable. Needs no Keras."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from kmp.records.exponent_histogram import INF_BIN, NAN_BIN, ExponentHistogram, pack, unpack_all
from kmp.utils import listed, matching_indices, validation

_NORMS = ("norm", "weight_norm", "update_norm")
_STATISTICS = ("amax", *_NORMS)
_COUNTS = ("updates", "lost_updates")


@dataclass(frozen=True, eq=False)
class GradientSample:
    """The gradient statistics of one training step, per variable.

    Every array has one row or element per variable. A variable without a gradient has only zero counts.

    Args:
        step: The sampled training step, counted from 1.
        loss_scale: The loss scale of the gradients.
        names: Paths of the variables or layers, in the order from the input to the loss.
        counts: int64 of shape `(n, 280)`, element counts of the loss-scaled gradients, as in `ExponentHistogram`. With
            several replicas, the sum over this process' replicas. Here and below, the rows of a sparse gradient are
            counted separately, even if they have the same index.
        amax: float64 of shape `(n,)`, the largest magnitude of the loss-scaled gradient; Inf or NaN if the gradient
            contains one.
        norm: float64 of shape `(n,)`, the L2 norm of the gradient without the loss scale. With several replicas, the
            square root of the sum of squares over replicas.
        weight_norm: float64 of shape `(n,)`, the L2 norm of the variable before the step; NaN if not measured.
        update_norm: float64 of shape `(n,)`, the L2 norm of the variable's change in the step; NaN if not measured, as
            in a step that updates no weights.
        updates: int64 of shape `(n,)`, the number of elements of the variable that the step changed.
        lost_updates: int64 of shape `(n,)`, the number of elements that changed by less than 2^-11 of their magnitude.
            A float16 weight loses most such updates, and all below 2^-12, which is why master weights are float32.
        unscaled_counts: int64 of shape `(n, 280)`, element counts without the loss scale, or `None` if the scale is a
            power of two.
        correction: int64 of shape `(280,)` or `None`. If the counts of each variable are rounded, as in a log, the
            exact counts of all variables together, minus the sum of the rounded ones.
        unscaled_correction: Same as `correction`, for `unscaled_counts`.

    Source of `lost_updates`: Micikevicius et al., "Mixed Precision Training" (ICLR 2018), section 3.1.

    Example:
    >>> gradient = {"zero": 3, "inf": 0, "nan": 0, "first": -20, "counts": [5, 8, 2], "amax": 2.0**-18, "norm": 1e-5}
    >>> sample = GradientSample.from_dict(1, 1024.0, {"dense/kernel": gradient, "dense/bias": gradient})
    >>> sample["dense/kernel"].zones["subnormal"], sample.by_layer()["dense"].zeros
    (15, 6)
    """

    step: int
    loss_scale: float
    names: tuple[str, ...]
    counts: np.ndarray
    amax: np.ndarray
    norm: np.ndarray
    weight_norm: np.ndarray
    update_norm: np.ndarray
    updates: np.ndarray
    lost_updates: np.ndarray
    unscaled_counts: np.ndarray | None = None
    correction: np.ndarray | None = None
    unscaled_correction: np.ndarray | None = None

    def __repr__(self) -> str:
        return f"<GradientSample step={self.step} loss_scale={self.loss_scale:g}: {len(self.names)} variables>"

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._indices

    def __getitem__(self, name: str) -> ExponentHistogram:
        """Returns the histogram of one variable or layer."""
        if name not in self._indices:
            raise KeyError(f"{name!r} is not among {listed(self.names)}")
        index = self._indices[name]
        unscaled = None if self.unscaled_counts is None else self.unscaled_counts[index]
        return ExponentHistogram(self.counts[index], self.step, self.loss_scale, unscaled)

    @cached_property
    def _indices(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names)}

    @property
    def histogram(self) -> ExponentHistogram:
        """The histogram of all variables together; exact, even if the counts of each are rounded."""
        return self.histogram_of(np.ones(len(self), bool))

    def histogram_of(self, is_selected: np.ndarray) -> ExponentHistogram:
        """Returns the histogram of the variables for which a bool array is true, together."""
        unscaled = None
        if self.unscaled_counts is not None:
            unscaled = _sum(self.unscaled_counts, is_selected, self.unscaled_correction)
        counts = _sum(self.counts, is_selected, self.correction)
        return ExponentHistogram(counts, self.step, self.loss_scale, unscaled)

    @property
    def update_ratio(self) -> np.ndarray:
        """`update_norm / weight_norm`, float64 of shape `(n,)`; NaN if not measured or if the weight norm is zero."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return np.where(self.weight_norm > 0, self.update_norm / self.weight_norm, math.nan)

    @property
    def total_norm(self) -> float:
        """L2 norm of all gradients together, without the loss scale."""
        return math.sqrt(float(np.sum(self.norm**2)))

    def select(self, patterns: str | Sequence[str]) -> "GradientSample":
        """Returns the sample of the variables whose name equals or matches a pattern (`*` and `?` as in a shell).

        Raises:
            TypeError: If `patterns` is neither a string nor several.
            ValueError: If a pattern matches no name.
        """
        is_several = isinstance(patterns, Iterable) and not isinstance(patterns, str)
        several: list[Any] = list(patterns) if is_several else [patterns]
        if not all(isinstance(pattern, str) for pattern in several):
            raise TypeError(validation.message("patterns", patterns, "a string or a list of strings"))
        selected = self._at(matching_indices(several, self.names))
        return replace(selected, correction=None, unscaled_correction=None)

    def without(self, names: Iterable[str]) -> "GradientSample":
        """Returns the sample without the named variables. Unknown names are ignored."""
        excluded = names if isinstance(names, Set) else set(names)
        kept = [index for index, name in enumerate(self.names) if name not in excluded]
        return self if len(kept) == len(self) else self._at(kept)

    def by_layer(self) -> "GradientSample":
        """Returns the sample with the variables of each layer merged: their paths differ only in the last component."""
        numbers: dict[str, int] = {}
        layers = np.array([numbers.setdefault(layer_of(name), len(numbers)) for name in self.names], np.int64)
        order = np.argsort(layers, kind="stable")
        starts = np.flatnonzero(np.diff(layers[order], prepend=-1))

        def merge(key: str, values: np.ndarray) -> np.ndarray:
            if key in _NORMS:
                return np.sqrt(np.add.reduceat(values[order] ** 2, starts))
            return (np.maximum if key == "amax" else np.add).reduceat(values[order], starts, axis=0)

        merged: dict[str, Any] = {key: merge(key, values) for key, values in self._arrays.items()}
        return replace(self, names=tuple(numbers), **merged)

    def to_dict(self) -> dict[str, Any]:
        """Returns the sample as a JSON-serializable dictionary; see `kmp.records` for the keys."""
        variables = {name: self._entry(index) for index, name in enumerate(self.names)}
        return {"loss_scale": self.loss_scale, "variables": variables}

    @classmethod
    def from_dict(cls, step: int, loss_scale: float, data: Mapping[str, Mapping[str, Any]]) -> "GradientSample":
        """Returns the sample for the `variables` of a dictionary from `to_dict`."""
        entries = list(data.values())
        counts = unpack_all(entries)
        arrays = {key: np.array([_number(entry, key) for entry in entries], np.float64) for key in _STATISTICS}
        integers = {key: np.array([int(entry.get(key, 0)) for entry in entries], np.int64) for key in _COUNTS}
        arrays["amax"][counts[:, INF_BIN] > 0] = math.inf
        arrays["amax"][counts[:, NAN_BIN] > 0] = math.nan
        has_unscaled = any("unscaled" in entry for entry in entries)
        unscaled = unpack_all([entry["unscaled"] for entry in entries]) if has_unscaled else None
        return cls(step, loss_scale, tuple(data), counts, unscaled_counts=unscaled, **arrays, **integers)

    def _entry(self, index: int) -> dict[str, Any]:
        values = {key: float(getattr(self, key)[index]) for key in _STATISTICS}
        integers = {key: int(getattr(self, key)[index]) for key in _COUNTS}
        unscaled = {} if self.unscaled_counts is None else {"unscaled": pack(self.unscaled_counts[index])}
        finite = {key: value for key, value in values.items() if math.isfinite(value)}
        return pack(self.counts[index]) | finite | integers | unscaled

    @property
    def _arrays(self) -> dict[str, np.ndarray]:
        unscaled = {} if self.unscaled_counts is None else {"unscaled_counts": self.unscaled_counts}
        return {key: getattr(self, key) for key in ("counts", *_STATISTICS, *_COUNTS)} | unscaled

    def _at(self, indices: Sequence[int]) -> "GradientSample":
        rows = np.array(indices, np.int64)
        selected: dict[str, Any] = {key: values[rows] for key, values in self._arrays.items()}
        return replace(self, names=tuple(self.names[index] for index in indices), **selected)


def layer_of(name: str) -> str:
    """Returns the path of a variable's layer: the path without its last component."""
    return name.rpartition("/")[0] or name


def _sum(counts: np.ndarray, is_selected: np.ndarray, correction: np.ndarray | None) -> np.ndarray:
    """Returns the counts of the selected variables together.

    The correction is that of all variables: with it, the result has the rounding errors of the variables that are not
    selected. It is left out if these have most of the elements, or if it exceeds a count.
    """
    rounded = np.asarray(is_selected @ counts)
    if correction is None or 2 * rounded.sum() < counts.sum() or (rounded + correction < 0).any():
        return rounded
    return rounded + correction


def _number(entry: Mapping[str, Any], key: str) -> float:
    return float(entry.get(key, math.nan))
