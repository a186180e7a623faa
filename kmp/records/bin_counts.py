"""Element counts of several variables by binary exponent. Needs no Keras."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kmp.records.exponent_histogram import BIN_COUNT


@dataclass(frozen=True, eq=False)
class BinCounts:
    """Element counts of several variables in the bins of `ExponentHistogram`. Use `BinCounts.of`.

    Stores only the bins that have a count, in the smallest dtype: a run holds hundreds of samples, and most of the 280
    bins of a sample are empty.

    Args:
        bins: int64 of shape `(k,)`, the bins that are stored, in ascending order.
        values: Unsigned integers of shape `(n, k)`, the counts of `n` variables in these bins.

    Example:
    >>> counts = np.zeros((2, 280), np.int64)
    >>> counts[:, 130], counts[0, 140] = (5, 6), 9
    >>> stored = BinCounts.of(counts)
    >>> stored.bins.tolist(), stored.values.tolist(), int(stored.total(np.array([True, True]))[130])
    ([130, 140], [[5, 9], [6, 0]], 11)
    """

    bins: np.ndarray
    values: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", self.values.astype(np.min_scalar_type(self.values.max(initial=0))))

    @classmethod
    def of(cls, counts: np.ndarray) -> "BinCounts":
        """Returns the counts for an integer array of shape `(n, 280)`."""
        bins = np.flatnonzero(counts.any(axis=0))
        return cls(bins, counts[:, bins])

    def __len__(self) -> int:
        return len(self.values)

    def dense(self, rows: int | slice = slice(None)) -> np.ndarray:
        """Returns the counts of all variables, int64 of shape `(n, 280)`, or of one, of shape `(280,)`."""
        values = self.values[rows]
        counts = np.zeros((*values.shape[:-1], BIN_COUNT), np.int64)
        counts[..., self.bins] = values
        return counts

    def between(self, first: int, stop: int) -> np.ndarray:
        """Returns the number of elements of each variable in the bins from `first` to below `stop`, int64."""
        is_counted = (self.bins >= first) & (self.bins < stop)
        return np.asarray(self.values[:, is_counted].sum(axis=1, dtype=np.int64))

    def at(self, rows: Sequence[int] | np.ndarray) -> "BinCounts":
        """Returns the counts of some variables."""
        return replace(self, values=self.values[np.asarray(rows, np.int64)])

    def merged(self, order: np.ndarray, starts: np.ndarray) -> "BinCounts":
        """Returns the sums over groups of variables: those of `order`, where a group begins at each of `starts`."""
        return replace(self, values=np.add.reduceat(self.values[order], starts, axis=0, dtype=np.int64))

    def total(self, is_selected: np.ndarray) -> np.ndarray:
        """Returns the counts of the selected variables together, int64 of shape `(280,)`."""
        total = np.zeros(BIN_COUNT, np.int64)
        total[self.bins] = self.values[is_selected].sum(axis=0, dtype=np.int64)
        return total
