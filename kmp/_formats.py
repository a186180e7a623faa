"""The floating-point formats of mixed precision, derived from their bit layout.

The one source of numbers such as 65504 and 2^-24. Source: IEEE 754-2019, section 3.4; bfloat16 is float32 with the
fraction cut to 7 bits.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: one sign bit, an exponent, a fraction.

    Args:
        name: The dtype's name in NumPy, TensorFlow and Keras.
        exponent_bits: Width of the biased exponent.
        fraction_bits: Width of the fraction, without the implicit leading one.
    """

    name: str
    exponent_bits: int
    fraction_bits: int

    @property
    def max_exponent(self) -> int:
        """Binary exponent of the largest finite value; also the bias."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def min_exponent(self) -> int:
        """Binary exponent of the smallest normal value."""
        return 1 - self.max_exponent

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
        return (2.0 - 2.0**-self.fraction_bits) * 2.0**self.max_exponent

    @property
    def smallest_normal(self) -> float:
        """The smallest value with a full-precision fraction."""
        return 2.0**self.min_exponent

    @property
    def smallest_subnormal(self) -> float:
        """The smallest value above zero."""
        return 2.0**self.min_subnormal_exponent


FLOAT16 = Format("float16", exponent_bits=5, fraction_bits=10)
BFLOAT16 = Format("bfloat16", exponent_bits=8, fraction_bits=7)
FLOAT32 = Format("float32", exponent_bits=8, fraction_bits=23)

# The dtypes of mixed precision's computations.
HALF = (FLOAT16.name, BFLOAT16.name)


def is_power_of_two(number: float) -> bool:
    """Whether a number is a power of two: floats multiplied by it are not rounded, while they stay in range."""
    return math.frexp(number)[0] == 0.5


def as_power(number: float) -> str:
    """Returns a number in words, as a power of two where it is one.

    Example:
    >>> as_power(32768.0), as_power(1.0), as_power(1000.0)
    ('2^15', '1', '1000')
    """
    if number == 1 or not is_power_of_two(number):
        return f"{number:g}"
    return f"2^{math.frexp(number)[1] - 1}"
