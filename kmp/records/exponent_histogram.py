"""Histograms of gradient elements by binary exponent. Needs no Keras."""

import math
from dataclasses import dataclass

import numpy as np

from kmp.utils.float_formats import FLOAT16, FLOAT32

# Bins: zero, one per binary exponent of the finite float32 values, Inf, NaN.
ZERO_BIN = 0
FIRST_EXPONENT = FLOAT32.min_subnormal_exponent
LAST_EXPONENT = FLOAT32.max_exponent
INF_BIN = LAST_EXPONENT - FIRST_EXPONENT + 2
NAN_BIN = INF_BIN + 1
BIN_COUNT = NAN_BIN + 1
"""The number of bins of an `ExponentHistogram`: 280."""
NEAR_OVERFLOW_BITS = 3


@dataclass(frozen=True, eq=False)
class ExponentHistogram:
    """Counts of gradient elements by binary exponent, from one training step.

    Args:
        counts: Integer array of shape `(280,)`, element counts of the loss-scaled gradient that the
            backward pass computed: zeros; one bin per exponent, floor(log2|g|), from -149 to 127;
            Inf; NaN.
        step: The sampled training step, counted from 1.
        loss_scale: The loss scale of the gradients.

    Example:
    >>> import numpy as np
    >>> from kmp.records import ExponentHistogram
    >>> counts = np.bincount([0] * 9 + [140] * 5, minlength=280)
    >>> histogram = ExponentHistogram(counts, step=1, loss_scale=1024.0)
    >>> histogram.zeros, histogram.total, histogram.zones["normal"]
    (9, 14, 5)
    >>> histogram.exponents[histogram.by_exponent > 0].tolist()
    [-10]
    >>> histogram.exponents[histogram.unscaled.by_exponent > 0].tolist()
    [-20]
    """

    counts: np.ndarray
    step: int
    loss_scale: float

    def __post_init__(self) -> None:
        counts = np.asarray(self.counts, np.int64)
        if counts.shape != (BIN_COUNT,):
            raise ValueError(
                f"`counts` must have shape ({BIN_COUNT},). Received: shape {counts.shape}"
            )
        object.__setattr__(self, "counts", counts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExponentHistogram) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    @property
    def _content(self) -> tuple[object, ...]:
        return self.step, self.loss_scale, self.counts.tobytes()

    def __repr__(self) -> str:
        details = f"{self.zeros} zero, {self.infs} inf, {self.nans} nan"
        return (
            f"<ExponentHistogram step={self.step} loss_scale={self.loss_scale:g}: {self.total}"
            f" elements, {details}>"
        )

    @property
    def total(self) -> int:
        """Number of elements."""
        return int(self.counts.sum())

    @property
    def zeros(self) -> int:
        """Number of elements that are exactly zero."""
        return int(self.counts[ZERO_BIN])

    @property
    def infs(self) -> int:
        """Number of elements that are Inf or -Inf."""
        return int(self.counts[INF_BIN])

    @property
    def nans(self) -> int:
        """Number of elements that are NaN."""
        return int(self.counts[NAN_BIN])

    @property
    def is_finite(self) -> bool:
        """Whether no element is Inf or NaN."""
        return not self.infs and not self.nans

    @property
    def zero_fraction(self) -> float:
        """Fraction of elements that are exactly zero.

        An upper bound of the fraction that was flushed to zero.
        """
        return self.zeros / self.total if self.total else math.nan

    @property
    def by_exponent(self) -> np.ndarray:
        """Counts of the finite nonzero elements, shape `(277,)`, matching `exponents`."""
        return self.counts[ZERO_BIN + 1 : INF_BIN]

    @property
    def exponents(self) -> np.ndarray:
        """The binary exponents -149 to 127, shape `(277,)`."""
        return np.arange(FIRST_EXPONENT, LAST_EXPONENT + 1)

    def log2_buckets(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the counts of the finite nonzero elements by binary exponent, for plotting tools.

        They are `n + 1` edges and `n` counts. If all finite elements are zero, they are in one
        bucket below the smallest exponent, from -150 to -149: tools draw a histogram without
        buckets as if all values were 1.
        """
        filled = np.flatnonzero(self.by_exponent)
        if not filled.size:
            return np.array([FIRST_EXPONENT - 1, FIRST_EXPONENT]), np.array([self.zeros])
        first, end = filled[0], filled[-1] + 1
        return np.arange(first, end + 1) + FIRST_EXPONENT, self.by_exponent[first:end]

    @property
    def unscaled(self) -> "ExponentHistogram":
        """The histogram of the gradient without the loss scale, which the inner optimizer receives.

        It is shifted by log2 of the loss scale. If the scale is not a power of two, this is
        rounded, and an element may be in the bin next to its own.
        """
        counts = np.zeros_like(self.counts)
        counts[[ZERO_BIN, INF_BIN, NAN_BIN]] = self.counts[[ZERO_BIN, INF_BIN, NAN_BIN]]
        # What underflows in float32 counts as zero, what overflows as Inf.
        bins = np.arange(ZERO_BIN + 1, INF_BIN) - round(math.log2(self.loss_scale))
        np.add.at(counts, np.clip(bins, ZERO_BIN, INF_BIN), self.by_exponent)
        return ExponentHistogram(counts, self.step, 1.0)

    @property
    def zones(self) -> dict[str, int]:
        """Element counts by the range of float16 that the magnitude lies in.

        `zero`; `below_subnormal` (above zero and below 2^-24; float32 only); `subnormal` (below
        2^-14: fewer than 11 bits of precision); `normal`; `near_overflow` (from 2^13: within 3 bits
        of overflow); `beyond` (from 2^16; float32 only); `inf`; `nan`.
        """
        edges = (
            FLOAT16.min_subnormal_exponent,
            FLOAT16.min_exponent,
            FLOAT16.max_exponent + 1 - NEAR_OVERFLOW_BITS,
            FLOAT16.max_exponent + 1,
        )
        zone_counts = np.split(self.by_exponent, np.array(edges) - FIRST_EXPONENT)
        names = ("below_subnormal", "subnormal", "normal", "near_overflow", "beyond")
        finite = {name: int(counts.sum()) for name, counts in zip(names, zone_counts, strict=True)}
        return {"zero": self.zeros, **finite, "inf": self.infs, "nan": self.nans}
