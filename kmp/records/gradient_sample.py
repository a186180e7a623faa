"""Gradient statistics of one training step, per variable. Needs no Keras."""

import math
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import numpy as np

from kmp.records.exponent_histogram import BIN_COUNT, INF_BIN, ZERO_BIN, ExponentHistogram
from kmp.utils import validation
from kmp.utils.names import listed, matching_indices

# The columns of a sample have one number per variable. How those of a layer are merged, and how a
# log has them, follows from the kind.
Kind = Literal["magnitude", "norm", "count"]
Magnitudes = Annotated[np.ndarray, "magnitude"]  # float64, the largest; only these may be Inf
Norms = Annotated[np.ndarray, "norm"]  # float64, the L2 norm
Counts = Annotated[np.ndarray, "count"]  # int64, a number of elements


@dataclass(frozen=True, eq=False)
class GradientSample:
    """The gradient statistics of one training step, per variable.

    Every array has one row or element per variable. A variable without a gradient has only zero
    counts.

    Args:
        step: The sampled training step, counted from 1.
        loss_scale: The loss scale of the gradients.
        names: Paths of the variables or layers, in the order from the input to the loss.
        bin_counts: Integers of shape `(n, k)`, element counts of the loss-scaled gradients, one
            column per bin of `bins`. Empty bins are removed, which most of the 280 are, and the
            smallest dtype is used: a run holds hundreds of samples. With several replicas, the sum
            over this process' replicas. Here and below, the rows of a sparse gradient are counted
            separately, even if they have the same index.
        amax: float64 of shape `(n,)`, the largest magnitude of the loss-scaled gradient; Inf or NaN
            if the gradient contains one.
        norm: float64 of shape `(n,)`, the L2 norm of the gradient without the loss scale. With
            several replicas, the square root of the sum of squares over replicas.
        weight_norm: float64 of shape `(n,)`, the L2 norm of the variable before the step; NaN, the
            default, if not measured.
        update_norm: float64 of shape `(n,)`, the L2 norm of the variable's change in the step; NaN
            if not measured, as in a step that updates no weights.
        updates: int64 of shape `(n,)`, the number of elements of the variable that the step
            changed.
        lost_updates: int64 of shape `(n,)`, the number of elements that changed by less than 2^-11
            of their magnitude. A float16 weight loses most such updates, and all below 2^-12, which
            is why master weights are float32.
        bins: int64 of shape `(k,)`, the bins of `ExponentHistogram` that are counted, in ascending
            order. Defaults to all 280.

    Source of `lost_updates`: Micikevicius et al., "Mixed Precision Training" (ICLR 2018), section
    3.1.

    Example:
    >>> import numpy as np
    >>> from kmp.records import GradientSample
    >>> counts = np.zeros((2, 280), np.int64)
    >>> counts[:, 0] = 3  # zeros
    >>> counts[:, 129:132] = 5, 8, 2  # elements from 2^-21 to below 2^-18
    >>> amax, norm = np.full(2, 2.0**-18.5), np.full(2, 1e-5)
    >>> sample = GradientSample(1, 1024.0, ("dense/kernel", "dense/bias"), counts, amax, norm)
    >>> sample["dense/kernel"].zones["subnormal"], sample.by_layer()["dense"].zeros
    (15, 6)
    """

    step: int
    loss_scale: float
    names: tuple[str, ...]
    bin_counts: np.ndarray
    amax: Magnitudes
    norm: Norms
    weight_norm: Norms = field(default_factory=lambda: np.array(math.nan))
    update_norm: Norms = field(default_factory=lambda: np.array(math.nan))
    updates: Counts = field(default_factory=lambda: np.array(0))
    lost_updates: Counts = field(default_factory=lambda: np.array(0))
    bins: np.ndarray = field(default_factory=lambda: np.arange(BIN_COUNT))

    def __post_init__(self) -> None:
        counts, is_filled = self.bin_counts, self.bin_counts.any(axis=0)
        if not is_filled.all():
            counts = counts[:, is_filled]
            object.__setattr__(self, "bins", self.bins[is_filled])
        smallest_dtype = np.min_scalar_type(counts.max(initial=0))
        object.__setattr__(self, "bin_counts", counts.astype(smallest_dtype))
        shape = (len(self.names),)
        for key in COLUMNS:
            value = getattr(self, key)
            if np.shape(value) != shape:
                object.__setattr__(self, key, np.broadcast_to(value, shape))

    def __repr__(self) -> str:
        return (
            f"<GradientSample step={self.step} loss_scale={self.loss_scale:g}: {len(self.names)}"
            " variables>"
        )

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
        return self._histogram_of([self._indices[name]])

    @cached_property
    def _indices(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names)}

    @property
    def counts(self) -> np.ndarray:
        """Element counts of the loss-scaled gradients, int64 of shape `(n, 280)`.

        The bins are those of `ExponentHistogram`.
        """
        counts = np.zeros((len(self), BIN_COUNT), np.int64)
        counts[:, self.bins] = self.bin_counts
        return counts

    def between(self, first: int, stop: int) -> np.ndarray:
        """Returns the number of elements of each gradient in a range of bins, int64.

        The range is from `first` to below `stop`.
        """
        start, end = self.bins.searchsorted((first, stop))
        return np.asarray(self.bin_counts[:, start:end].sum(axis=1, dtype=np.int64))

    @property
    def elements(self) -> np.ndarray:
        """Number of elements of each gradient, int64 of shape `(n,)`."""
        return self.between(0, BIN_COUNT)

    @property
    def zeros(self) -> np.ndarray:
        """Number of elements of each gradient that are exactly zero, int64 of shape `(n,)`."""
        return self.between(ZERO_BIN, ZERO_BIN + 1)

    @property
    def is_finite(self) -> bool:
        """Whether no element is Inf or NaN."""
        return not self.bins.size or bool(self.bins[-1] < INF_BIN)

    @property
    def has_update(self) -> bool:
        """Whether the update of the weights was measured."""
        return not np.isnan(self.update_norm).all()

    @property
    def histogram(self) -> ExponentHistogram:
        """The histogram of all variables together."""
        return self._histogram_of(slice(None))

    def _histogram_of(self, rows: slice | list[int]) -> ExponentHistogram:
        counts = np.zeros(BIN_COUNT, np.int64)
        counts[self.bins] = self.bin_counts[rows].sum(axis=0, dtype=np.int64)
        return ExponentHistogram(counts, self.step, self.loss_scale)

    @property
    def update_ratio(self) -> np.ndarray:
        """`update_norm / weight_norm`, float64 of shape `(n,)`.

        NaN if it was not measured, or if the weight norm is zero.
        """
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return np.where(self.weight_norm > 0, self.update_norm / self.weight_norm, math.nan)

    @property
    def total_norm(self) -> float:
        """L2 norm of all gradients together, without the loss scale."""
        return math.sqrt(float(np.sum(self.norm**2)))

    def select(self, patterns: str | Sequence[str]) -> "GradientSample":
        """Returns the sample of the variables whose name equals or matches a pattern.

        `*` and `?` mean what they mean in a shell.

        Raises:
            TypeError: If `patterns` is neither a string nor several.
            ValueError: If a pattern matches no name.
        """
        is_several = isinstance(patterns, Iterable) and not isinstance(patterns, str)
        several: list[Any] = list(patterns) if is_several else [patterns]
        if not all(isinstance(pattern, str) for pattern in several):
            raise TypeError(
                validation.message("patterns", patterns, "a string or a list of strings")
            )
        return self._at(matching_indices(several, self.names))

    def without(self, names: Iterable[str]) -> "GradientSample":
        """Returns the sample without the named variables. Unknown names are ignored."""
        excluded = names if isinstance(names, Set) else set(names)
        if not excluded:
            return self
        kept = [index for index, name in enumerate(self.names) if name not in excluded]
        return self if len(kept) == len(self) else self._at(kept)

    def by_layer(self) -> "GradientSample":
        """Returns the sample with the variables of each layer merged.

        The paths of such variables differ only in the last component.
        """
        numbers: dict[str, int] = {}
        layers = np.array(
            [numbers.setdefault(layer_of(name), len(numbers)) for name in self.names], np.int64
        )
        order = np.argsort(layers, kind="stable")
        starts = np.flatnonzero(np.diff(layers[order], prepend=-1))

        def merge(key: str) -> np.ndarray:
            values, kind = getattr(self, key)[order], COLUMNS.get(key, "count")
            if kind == "magnitude":
                return np.maximum.reduceat(values, starts)
            if kind == "norm":
                return np.sqrt(np.add.reduceat(values**2, starts))
            return np.add.reduceat(values, starts, dtype=np.int64)

        columns: dict[str, Any] = {key: merge(key) for key in ("bin_counts", *COLUMNS)}
        return replace(self, names=tuple(numbers), **columns)

    def _at(self, indices: Sequence[int]) -> "GradientSample":
        rows = np.array(indices, np.int64)
        columns: dict[str, Any] = {
            key: getattr(self, key)[rows] for key in ("bin_counts", *COLUMNS)
        }
        return replace(self, names=tuple(self.names[index] for index in indices), **columns)


COLUMNS: dict[str, Kind] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(GradientSample, include_extras=True).items()
    if get_origin(hint) is Annotated
}


def layer_of(name: str) -> str:
    """Returns the path of a variable's layer: the path without its last component."""
    return name.rpartition("/")[0] or name
