"""What is known of the values of a tensor without any batch: their range and their error."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

INFINITY = math.inf


@dataclass(frozen=True)
class Value:
    """The range of a tensor, and a bound of its rounding error.

    Each element x of the tensor is between `low` and `high`, and is off by at most
    `relative * abs(x) + absolute`.

    With infinite bounds the data decide how large it is. Its errors are then those for ordinary
    data, of magnitude 1, for which it has the magnitude `size`.

    Args:
        low: The smallest value.
        high: The largest value.
        degree: How the magnitude grows with that of the data, if it has no bound: 1 as the data,
            2 as their squares, Inf exponentially, or as the reciprocal of something small.
        relative: The part of the error that is relative to each value.
        absolute: The part that is the same for all values.
        size: The largest magnitude for ordinary data, if it has no bound.
    """

    low: float = -INFINITY
    high: float = INFINITY
    degree: float = 1.0
    relative: float = 0.0
    absolute: float = 0.0
    size: float = 1.0

    @property
    def magnitude(self) -> float:
        """The largest magnitude; Inf if the data decide it."""
        return max(abs(self.low), abs(self.high))

    @property
    def smallest_magnitude(self) -> float:
        """The smallest magnitude; 0 for a range with both signs."""
        if self.low <= 0.0 <= self.high:
            return 0.0
        return min(abs(self.low), abs(self.high))

    @property
    def ordinary(self) -> tuple[float, float]:
        """The range for ordinary data."""
        low = -max(self.size, -self.high) if self.low == -INFINITY else self.low
        high = max(self.size, self.low) if self.high == INFINITY else self.high
        return low, high

    def within(self, other: "Value") -> "Value":
        """Returns it with no other values than those in a range that is finite.

        Errors that are relative to the data become those of data of that size.
        """
        low, high = max(self.low, other.low), min(self.high, other.high)
        if low > high:
            low, high = other.low, other.high
        absolute = self.absolute
        if not self.is_bounded and self.size:
            absolute *= other.magnitude / self.size
        return replace(self, low=low, high=high, degree=0.0, absolute=absolute)

    def with_headroom(self, factor: float) -> "Value":
        """Returns the range of values that are up to so many times as large or as small."""
        low = self.low * factor if self.low < 0.0 else self.low / factor
        high = self.high * factor if self.high > 0.0 else self.high / factor
        return replace(self, low=low, high=high)

    @property
    def ordinary_magnitude(self) -> float:
        """The largest magnitude for ordinary data."""
        return max(map(abs, self.ordinary))

    @property
    def is_bounded(self) -> bool:
        """Whether the range is finite, whatever the data."""
        return self.low > -INFINITY and self.high < INFINITY

    @property
    def has_one_sign(self) -> bool:
        """Whether no two values have different signs."""
        return self.low >= 0.0 or self.high <= 0.0

    @property
    def growth(self) -> float:
        """The degree; 0 of a range that is finite."""
        return 0.0 if self.is_bounded else self.degree

    @property
    def error(self) -> float:
        """A bound of the error of any value; relative to the data if they decide the range."""
        if not self.is_bounded:
            return self.relative + self.absolute
        return self.relative * self.magnitude + self.absolute

    @property
    def ordinary_error(self) -> float:
        """A bound of the error of any value for ordinary data."""
        return self.relative * self.ordinary_magnitude + self.absolute


DATA = Value()


def between(low: float, high: float) -> Value:
    """Returns an exact value in a range."""
    return Value(low, high, degree=0.0 if math.isfinite(max(abs(low), abs(high))) else 1.0)


def constant(values: Iterable[float] | float) -> Value:
    """Returns the range of constants, which are exact; of NaN and of none it is that of data."""
    array = np.asarray(values, "float64")
    if not array.size or np.isnan(array).any():
        return DATA
    return between(float(array.min()), float(array.max()))


def extremes(values: Iterable[float]) -> tuple[float, ...]:
    """Returns the constants other than 0 of the smallest and the largest magnitude, if any."""
    array = np.asarray(values, "float64").ravel()
    array = array[np.isfinite(array) & (array != 0.0)]
    if not array.size:
        return ()
    sizes = np.abs(array)
    return float(array[sizes.argmin()]), float(array[sizes.argmax()])


def union(values: Iterable[Value]) -> Value:
    """Returns a value that may be any of these."""
    values = list(values)
    if not values:
        return DATA
    return Value(
        low=min(each.low for each in values),
        high=max(each.high for each in values),
        degree=max(each.growth for each in values),
        relative=max(each.relative for each in values),
        absolute=max(each.absolute for each in values),
        # Not of what is chosen where there are no data, such as the number of a mask.
        size=max((each.size for each in values if not each.is_bounded), default=1.0),
    )
