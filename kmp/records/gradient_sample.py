"""Gradient statistics of one training step, per variable. Needs no Keras."""

import math
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from kmp.records.bin_counts import BinCounts
from kmp.records.exponent_histogram import BIN_COUNT, ZERO_BIN, ExponentHistogram
from kmp.utils import listed, matching_indices, validation

NORMS = ("norm", "weight_norm", "update_norm")
UPDATE_COUNTS = ("updates", "lost_updates")
_COLUMNS = ("amax", *NORMS, *UPDATE_COUNTS)


@dataclass(frozen=True, eq=False)
class GradientSample:
    """The gradient statistics of one training step, per variable.

    Every array has one row or element per variable. A variable without a gradient has only zero counts.

    Args:
        step: The sampled training step, counted from 1.
        loss_scale: The loss scale of the gradients.
        names: Paths of the variables or layers, in the order from the input to the loss.
        bin_counts: Element counts of the loss-scaled gradients. With several replicas, the sum over this process'
            replicas. Here and below, the rows of a sparse gradient are counted separately, even if they have the same
            index.
        amax: float64 of shape `(n,)`, the largest magnitude of the loss-scaled gradient; Inf or NaN if the gradient
            contains one.
        norm: float64 of shape `(n,)`, the L2 norm of the gradient without the loss scale. With several replicas, the
            square root of the sum of squares over replicas.
        weight_norm: float64 of shape `(n,)`, the L2 norm of the variable before the step; NaN, the default, if not
            measured.
        update_norm: float64 of shape `(n,)`, the L2 norm of the variable's change in the step; NaN if not measured, as
            in a step that updates no weights.
        updates: int64 of shape `(n,)`, the number of elements of the variable that the step changed.
        lost_updates: int64 of shape `(n,)`, the number of elements that changed by less than 2^-11 of their magnitude.
            A float16 weight loses most such updates, and all below 2^-12, which is why master weights are float32.

    Source of `lost_updates`: Micikevicius et al., "Mixed Precision Training" (ICLR 2018), section 3.1.

    Example:
    >>> counts = np.zeros((2, 280), np.int64)
    >>> counts[:, 0], counts[:, 129:132] = 3, (5, 8, 2)  # zeros, and elements from 2^-21 to below 2^-18
    >>> amax, norm = np.full(2, 2.0**-18.5), np.full(2, 1e-5)
    >>> sample = GradientSample(1, 1024.0, ("dense/kernel", "dense/bias"), BinCounts.of(counts), amax, norm)
    >>> sample["dense/kernel"].zones["subnormal"], sample.by_layer()["dense"].zeros
    (15, 6)
    """

    step: int
    loss_scale: float
    names: tuple[str, ...]
    bin_counts: BinCounts
    amax: np.ndarray
    norm: np.ndarray
    weight_norm: np.ndarray = field(default_factory=lambda: np.array(math.nan))
    update_norm: np.ndarray = field(default_factory=lambda: np.array(math.nan))
    updates: np.ndarray = field(default_factory=lambda: np.array(0))
    lost_updates: np.ndarray = field(default_factory=lambda: np.array(0))

    def __post_init__(self) -> None:
        for key in _COLUMNS:
            object.__setattr__(self, key, np.broadcast_to(getattr(self, key), len(self.names)))

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
        return self.histogram_of(np.array([self._indices[name]]))

    @cached_property
    def _indices(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names)}

    @property
    def counts(self) -> np.ndarray:
        """Element counts of the loss-scaled gradients, int64 of shape `(n, 280)`, with the bins of a histogram."""
        return self.bin_counts.dense()

    @property
    def elements(self) -> np.ndarray:
        """Number of elements of each gradient, int64 of shape `(n,)`."""
        return self.bin_counts.between(0, BIN_COUNT)

    @property
    def zeros(self) -> np.ndarray:
        """Number of elements of each gradient that are exactly zero, int64 of shape `(n,)`."""
        return self.bin_counts.between(ZERO_BIN, ZERO_BIN + 1)

    @property
    def has_update(self) -> bool:
        """Whether the update of the weights was measured."""
        return not np.isnan(self.update_norm).all()

    @property
    def histogram(self) -> ExponentHistogram:
        """The histogram of all variables together."""
        return self.histogram_of(np.ones(len(self), bool))

    def histogram_of(self, is_selected: np.ndarray) -> ExponentHistogram:
        """Returns the histogram of the variables that a bool array or indices select, together."""
        return ExponentHistogram(self.bin_counts.total(is_selected), self.step, self.loss_scale)

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
        return self._at(matching_indices(several, self.names))

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
            if key in NORMS:
                return np.sqrt(np.add.reduceat(values[order] ** 2, starts))
            return (np.maximum if key == "amax" else np.add).reduceat(values[order], starts)

        columns: dict[str, Any] = {key: merge(key, getattr(self, key)) for key in _COLUMNS}
        return replace(self, names=tuple(numbers), bin_counts=self.bin_counts.merged(order, starts), **columns)

    def _at(self, indices: Sequence[int]) -> "GradientSample":
        rows = np.array(indices, np.int64)
        columns: dict[str, Any] = {key: getattr(self, key)[rows] for key in _COLUMNS}
        names = tuple(self.names[index] for index in indices)
        return replace(self, names=names, bin_counts=self.bin_counts.at(rows), **columns)


def layer_of(name: str) -> str:
    """Returns the path of a variable's layer: the path without its last component."""
    return name.rpartition("/")[0] or name
