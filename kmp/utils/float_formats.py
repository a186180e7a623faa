"""The floating-point formats of mixed precision: the one source of numbers such as 65504 and 2^-24."""

import math
from functools import cached_property
from typing import Any

import ml_dtypes


class FloatFormat:
    """A binary floating-point format, as `ml_dtypes.finfo` describes it.

    Args:
        name: The dtype's name in NumPy, TensorFlow and Keras.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @cached_property
    def _info(self) -> Any:
        return ml_dtypes.finfo(self.name)

    @property
    def exponent_bits(self) -> int:
        """Width of the biased exponent."""
        return int(self._info.nexp)

    @property
    def fraction_bits(self) -> int:
        """Width of the fraction, without the implicit leading one."""
        return int(self._info.nmant)

    @property
    def max_exponent(self) -> int:
        """Binary exponent of the largest finite value; also the bias."""
        return int(self._info.maxexp) - 1

    @property
    def min_exponent(self) -> int:
        """Binary exponent of the smallest normal value."""
        return int(self._info.minexp)

    @property
    def min_subnormal_exponent(self) -> int:
        """Binary exponent of the smallest value above zero."""
        return self.min_exponent - self.fraction_bits

    @property
    def flush_exponent(self) -> int:
        """Binary exponent of the largest power of two that rounds to zero: half the smallest value, a tie to even."""
        return self.min_subnormal_exponent - 1

    @property
    def max(self) -> float:
        """The largest finite value."""
        return float(self._info.max)

    @property
    def smallest_normal(self) -> float:
        """The smallest value with a full-precision fraction."""
        return float(self._info.smallest_normal)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest value above zero."""
        return 2.0**self.min_subnormal_exponent


FLOAT16 = FloatFormat("float16")
BFLOAT16 = FloatFormat("bfloat16")
FLOAT32 = FloatFormat("float32")

HALF = (FLOAT16.name, BFLOAT16.name)  # the 16-bit dtypes of mixed precision


def is_power_of_two(number: float) -> bool:
    """Whether a number is a power of two: floats multiplied by it are not rounded, while they stay in range."""
    return math.frexp(number)[0] == 0.5


def as_power(number: float) -> str:
    """Returns a number as text, as a power of two where it is one.

    Example:
    >>> as_power(32768.0), as_power(1.0), as_power(1000.0)
    ('2^15', '1', '1000')
    """
    if number == 1 or not is_power_of_two(number):
        return f"{number:g}"
    return f"2^{math.frexp(number)[1] - 1}"
