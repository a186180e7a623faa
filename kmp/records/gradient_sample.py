"""What one training step tells of its gradients, variable by variable. Needs NumPy alone."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kmp.records.exponent_histogram import BIN_COUNT, INF_BIN, NAN_BIN, ExponentHistogram, pack, unpack
from kmp.utils import matching

_MEASURES = ("amax", "norm", "weight_norm", "update_norm")
_COUNTS = ("updates", "lost_updates")


@dataclass(frozen=True, eq=False)
class GradientSample:
    """The gradients of one training step, variable by variable.

    Every array has one row or entry for each variable. A variable that got no gradient has counted no elements.

    Args:
        step: The training step that was sampled, counted from 1.
        loss_scale: The scale that the gradients carry.
        names: Paths of the variables, or layers; from the input to the loss.
        counts: int64 of shape `(n, 280)`, as in `ExponentHistogram`; loss-scaled. On several replicas, of those of this
            process, added up. Of a sparse gradient, here and below, the rows as they come: those of an index that
            occurs twice count one by one.
        amax: float64 of shape `(n,)`, the largest magnitude of the loss-scaled gradient; inf or nan where it has one.
        norm: float64 of shape `(n,)`, the L2 norm of the gradient without the loss scale. On several replicas, the root
            of their summed squares.
        weight_norm: float64 of shape `(n,)`, the L2 norm of the variable before the step; nan if not measured.
        update_norm: float64 of shape `(n,)`, the L2 norm of what the step added to it, 0 if it was skipped; nan if not
            measured.
        updates: int64 of shape `(n,)`, elements of the variable that the step changed.
        lost_updates: int64 of shape `(n,)`, those that it changed by less than 2^-11 of their magnitude: in a float16
            weight most such updates are lost, those below 2^-12 all, which is why master weights are float32.
        unscaled_counts: int64 of shape `(n, 280)`, where the scale is no power of two.

    Source of the last two: Micikevicius et al., "Mixed Precision Training" (ICLR 2018), section 3.1.

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

    def __repr__(self) -> str:
        return f"<GradientSample step={self.step} loss_scale={self.loss_scale:g}: {len(self.names)} variables>"

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __getitem__(self, name: str) -> ExponentHistogram:
        """Returns the histogram of one variable or layer."""
        if name not in self.names:
            raise KeyError(f"{name!r} is not among {', '.join(map(repr, self.names))}")
        return self._histogram([self.names.index(name)])

    @property
    def histogram(self) -> ExponentHistogram:
        """The histogram of all variables together."""
        return self._histogram(range(len(self)))

    @property
    def update_ratio(self) -> np.ndarray:
        """Norm of update over norm of weight, float64 of shape `(n,)`: nan if not measured, or for weights of zeros."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.weight_norm > 0, self.update_norm / self.weight_norm, math.nan)

    @property
    def total_norm(self) -> float:
        """L2 norm of all gradients together, without the loss scale."""
        return math.sqrt(float(np.sum(self.norm**2)))

    def select(self, patterns: str | Sequence[str]) -> "GradientSample":
        """Returns the variables whose name is, or matches, one of the patterns (`*` and `?` as in a shell).

        Raises:
            ValueError: If a pattern matches none.
        """
        return self._grouped([[index] for index in matching(patterns, self.names)])

    def without(self, names: Iterable[str]) -> "GradientSample":
        """Returns the sample without some of its variables, those that it has."""
        left_out = set(names)
        return self._grouped([[index] for index, name in enumerate(self.names) if name not in left_out])

    def by_layer(self) -> "GradientSample":
        """Returns the sample with each layer's variables merged: those whose paths differ in the last name alone."""
        groups: dict[str, list[int]] = {}
        for index, name in enumerate(self.names):
            groups.setdefault(name.rpartition("/")[0] or name, []).append(index)
        return self._grouped(list(groups.values()), tuple(groups))

    def to_dict(self) -> dict[str, Any]:
        """Returns the sample as JSON has it; see `kmp.records` for the keys."""
        variables = {name: self._entry(index) for index, name in enumerate(self.names)}
        return {"loss_scale": self.loss_scale, "variables": variables}

    @classmethod
    def from_dict(cls, step: int, loss_scale: float, data: Mapping[str, Mapping[str, Any]]) -> "GradientSample":
        """The reverse of `to_dict`."""
        entries = list(data.values())
        counts = _stack([unpack(entry) for entry in entries])
        arrays = {key: np.array([_number(entry, key) for entry in entries], np.float64) for key in _MEASURES}
        whole = {key: np.array([int(entry.get(key, 0)) for entry in entries], np.int64) for key in _COUNTS}
        arrays["amax"] = np.where(counts[:, INF_BIN] > 0, math.inf, arrays["amax"])
        arrays["amax"] = np.where(counts[:, NAN_BIN] > 0, math.nan, arrays["amax"])
        unscaled = _stack([unpack(e["unscaled"]) for e in entries]) if any("unscaled" in e for e in entries) else None
        return cls(step, loss_scale, tuple(data), counts, unscaled_counts=unscaled, **arrays, **whole)

    def _histogram(self, rows: Sequence[int]) -> ExponentHistogram:
        unscaled = None if self.unscaled_counts is None else self.unscaled_counts[list(rows)].sum(0)
        return ExponentHistogram(self.counts[list(rows)].sum(0), self.step, self.loss_scale, unscaled)

    def _entry(self, index: int) -> dict[str, Any]:
        values = {key: float(getattr(self, key)[index]) for key in _MEASURES}
        whole = {key: int(getattr(self, key)[index]) for key in _COUNTS}
        unscaled = {} if self.unscaled_counts is None else {"unscaled": pack(self.unscaled_counts[index])}
        finite = {key: value for key, value in values.items() if math.isfinite(value)}
        return pack(self.counts[index]) | finite | whole | unscaled

    def _grouped(self, groups: list[list[int]], names: tuple[str, ...] | None = None) -> "GradientSample":
        def each(values: np.ndarray, merge: Any) -> np.ndarray:
            merged = [merge(values[group], axis=0) for group in groups]
            return np.array(merged, values.dtype).reshape(len(groups), *values.shape[1:])

        def root_sum_square(values: np.ndarray, axis: int) -> np.ndarray:
            return np.sqrt(np.sum(values**2, axis=axis))

        merged = {"counts": np.sum, "amax": np.max, **dict.fromkeys(_MEASURES[1:], root_sum_square)}
        merged |= dict.fromkeys(_COUNTS, np.sum)
        if self.unscaled_counts is not None:
            merged["unscaled_counts"] = np.sum
        arrays: dict[str, Any] = {key: each(getattr(self, key), merge) for key, merge in merged.items()}
        return replace(self, names=names or tuple(self.names[group[0]] for group in groups), **arrays)


def _number(entry: Mapping[str, Any], key: str) -> float:
    return float(entry.get(key, math.nan))


def _stack(rows: list[np.ndarray]) -> np.ndarray:
    return np.stack(rows) if rows else np.zeros((0, BIN_COUNT), np.int64)
