"""The floating-point formats of mixed precision, and their limits, such as 65504 and 2^-24."""

import math
from functools import cached_property
from typing import Any

import ml_dtypes


class FloatFormat:
    """A binary floating-point format. Its limits come from `ml_dtypes.finfo`.

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
        """Number of bits of the biased exponent."""
        return int(self._info.nexp)

    @property
    def fraction_bits(self) -> int:
        """Number of bits of the fraction, without the implicit leading bit."""
        return int(self._info.nmant)

    @property
    def max_exponent(self) -> int:
        """Binary exponent of the largest finite value, equal to the exponent bias."""
        return int(self._info.maxexp) - 1

    @property
    def min_exponent(self) -> int:
        """Binary exponent of the smallest normal value."""
        return int(self._info.minexp)

    @property
    def min_subnormal_exponent(self) -> int:
        """Binary exponent of the smallest positive subnormal value."""
        return self.min_exponent - self.fraction_bits

    @property
    def flush_exponent(self) -> int:
        """Exponent of the largest power of two that rounds to zero: half the smallest subnormal (tie to even)."""
        return self.min_subnormal_exponent - 1

    @property
    def max_exact_integer(self) -> int:
        """The largest n for which the format has every integer from 0 to n: 2048 in float16, 256 in bfloat16."""
        return int(2 ** (self.fraction_bits + 1))

    @property
    def max(self) -> float:
        """The largest finite value."""
        return float(self._info.max)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive normal value."""
        return float(self._info.smallest_normal)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive subnormal value."""
        return 2.0**self.min_subnormal_exponent


FLOAT16 = FloatFormat("float16")
BFLOAT16 = FloatFormat("bfloat16")
FLOAT32 = FloatFormat("float32")

FORMATS_16_BIT = {FLOAT16.name: FLOAT16, BFLOAT16.name: BFLOAT16}  # those of mixed precision
DTYPES_16_BIT = tuple(FORMATS_16_BIT)


def is_power_of_two(number: float) -> bool:
    """Whether a number is a power of two: multiplying by it is exact, unless the product leaves the normal range."""
    return math.frexp(number)[0] == 0.5


def as_power(number: float) -> str:
    """Formats a number; a power of two other than 1 is written as `2^k`.

    Example:
    >>> as_power(32768.0), as_power(1.0), as_power(1000.0)
    ('2^15', '1', '1000')
    """
    if number == 1 or not is_power_of_two(number):
        return f"{number:g}"
    return f"2^{math.frexp(number)[1] - 1}"
