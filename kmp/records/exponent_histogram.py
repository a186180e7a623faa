"""Gradient elements counted by binary exponent. Needs NumPy alone."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kmp.utils import FLOAT16, FLOAT32, is_power_of_two

# One bin for zero, one for each binary exponent of a finite float32, one each for inf and nan.
ZERO_BIN = 0
FIRST_EXPONENT = FLOAT32.min_subnormal_exponent
LAST_EXPONENT = FLOAT32.max_exponent
INF_BIN = LAST_EXPONENT - FIRST_EXPONENT + 2
NAN_BIN = INF_BIN + 1
BIN_COUNT = NAN_BIN + 1
NEAR_OVERFLOW_BITS = 3


@dataclass(frozen=True, eq=False)
class ExponentHistogram:
    """Gradient elements counted by binary exponent, from one training step.

    Args:
        counts: Integer array of shape `(280,)`: elements that are zero; one bin for each exponent, floor(log2|g|), from
            -149 to 127; then inf; then nan. Of the loss-scaled gradient, as the backward pass made it.
        step: The training step that was sampled, counted from 1.
        loss_scale: The scale that the gradients carry.
        unscaled_counts: The same of the gradient without the scale; needed only if the scale is no power of two,
            because otherwise it is `counts`, shifted.

    Example:
    >>> histogram = ExponentHistogram(np.bincount([0] * 9 + [140] * 5, minlength=280), step=1, loss_scale=1024.0)
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
    unscaled_counts: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name in ("counts", "unscaled_counts"):
            value = getattr(self, name)
            if value is not None:
                counts = np.asarray(value, np.int64)
                if counts.shape != (BIN_COUNT,):
                    raise ValueError(f"`{name}` must have shape ({BIN_COUNT},). Received: shape {counts.shape}")
                object.__setattr__(self, name, counts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExponentHistogram) and self.to_dict() == other.to_dict()

    def __repr__(self) -> str:
        special = f"{self.zeros} zero, {self.infs} inf, {self.nans} nan"
        return f"<ExponentHistogram step={self.step} loss_scale={self.loss_scale:g}: {self.total} elements, {special}>"

    def __hash__(self) -> int:
        return hash((self.step, self.loss_scale))

    @property
    def total(self) -> int:
        """All elements counted."""
        return int(self.counts.sum())

    @property
    def zeros(self) -> int:
        """Elements that are exactly zero."""
        return int(self.counts[ZERO_BIN])

    @property
    def infs(self) -> int:
        """Elements that are inf or -inf."""
        return int(self.counts[INF_BIN])

    @property
    def nans(self) -> int:
        """Elements that are nan."""
        return int(self.counts[NAN_BIN])

    @property
    def is_finite(self) -> bool:
        """Whether there is neither inf nor nan."""
        return not self.infs and not self.nans

    @property
    def zero_fraction(self) -> float:
        """Share of elements that are exactly zero: an upper bound on what float16 flushed."""
        return self.zeros / self.total if self.total else math.nan

    @property
    def by_exponent(self) -> np.ndarray:
        """Counts of the finite nonzero elements, shape `(277,)`, matching `exponents`."""
        return self.counts[ZERO_BIN + 1 : INF_BIN]

    @property
    def exponents(self) -> np.ndarray:
        """The binary exponents -149 to 127, shape `(277,)`."""
        return np.arange(FIRST_EXPONENT, LAST_EXPONENT + 1)

    @property
    def unscaled(self) -> "ExponentHistogram":
        """The histogram of the gradient without the loss scale, as the inner optimizer gets it.

        Raises:
            ValueError: If the scale is no power of two, and `unscaled_counts` were not counted.
        """
        if self.unscaled_counts is not None:
            return ExponentHistogram(self.unscaled_counts, self.step, 1.0)
        if not is_power_of_two(self.loss_scale):
            raise ValueError(f"No `unscaled_counts`, and the loss scale is no power of two: {self.loss_scale}")
        return ExponentHistogram(shifted(self.counts, 1 - math.frexp(self.loss_scale)[1]), self.step, 1.0)

    @property
    def zones(self) -> dict[str, int]:
        """Element counts by what float16 makes of such a magnitude.

        `zero`; `below_subnormal` (above zero, below 2^-24; only gradients computed in float32 have it); `subnormal`
        (below 2^-14: fewer than 11 bits); `normal`; `near_overflow` (2^13 and more: within 3 bits of it); `beyond`
        (2^16 and more, in float32); `inf`; `nan`.
        """
        edges = (
            FLOAT16.min_subnormal_exponent,
            FLOAT16.min_exponent,
            FLOAT16.max_exponent + 1 - NEAR_OVERFLOW_BITS,
            FLOAT16.max_exponent + 1,
        )
        parts = np.split(self.by_exponent, np.array(edges) - FIRST_EXPONENT)
        names = ("below_subnormal", "subnormal", "normal", "near_overflow", "beyond")
        finite = {name: int(part.sum()) for name, part in zip(names, parts, strict=True)}
        return {"zero": self.zeros, **finite, "inf": self.infs, "nan": self.nans}

    def to_dict(self) -> dict[str, Any]:
        """Returns the histogram as JSON has it; see `kmp.records` for the keys."""
        data = {"step": self.step, "loss_scale": self.loss_scale, **pack(self.counts)}
        return data if self.unscaled_counts is None else data | {"unscaled": pack(self.unscaled_counts)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ExponentHistogram":
        """The reverse of `to_dict`."""
        unscaled = unpack(data["unscaled"]) if "unscaled" in data else None
        return cls(unpack(data), int(data["step"]), float(data["loss_scale"]), unscaled)


def shifted(counts: np.ndarray, by: int) -> np.ndarray:
    """Returns the counts of gradients times 2^`by`; what leaves float32's range is counted as zero, or as inf."""
    result = np.zeros_like(counts)
    result[[ZERO_BIN, INF_BIN, NAN_BIN]] = counts[[ZERO_BIN, INF_BIN, NAN_BIN]]
    moved = np.arange(ZERO_BIN + 1, INF_BIN) + by
    np.add.at(result, np.clip(moved, ZERO_BIN, INF_BIN), counts[ZERO_BIN + 1 : INF_BIN])
    return result


def pack(counts: np.ndarray) -> dict[str, Any]:
    """Returns 280 counts as JSON has them: `zero`, `inf`, `nan`, and those from exponent `first` on."""
    filled = np.flatnonzero(counts[ZERO_BIN + 1 : INF_BIN])
    first, last = (int(filled[0]), int(filled[-1])) if filled.size else (0, -1)
    span = counts[ZERO_BIN + 1 + first : ZERO_BIN + 2 + last]
    special = {"zero": int(counts[ZERO_BIN]), "inf": int(counts[INF_BIN]), "nan": int(counts[NAN_BIN])}
    return special | {"first": first + FIRST_EXPONENT, "counts": [int(n) for n in span]}


def unpack(data: Mapping[str, Any]) -> np.ndarray:
    """The reverse of `pack`.

    Raises:
        ValueError: If an exponent lies outside float32's.
    """
    counts = np.zeros(BIN_COUNT, np.int64)
    counts[[ZERO_BIN, INF_BIN, NAN_BIN]] = data["zero"], data["inf"], data["nan"]
    first = int(data["first"]) - FIRST_EXPONENT
    if first < 0 or first + len(data["counts"]) > LAST_EXPONENT - FIRST_EXPONENT + 1:
        raise ValueError(f"exponents must lie between {FIRST_EXPONENT} and {LAST_EXPONENT}")
    counts[ZERO_BIN + 1 + first : ZERO_BIN + 1 + first + len(data["counts"])] = data["counts"]
    return counts
