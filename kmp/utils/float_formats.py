"""The floating-point formats of mixed precision, and their limits, such as 65504 and 2^-24."""

import math
from collections.abc import Collection
from dataclasses import dataclass

import ml_dtypes


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format and its limits, which are those of `ml_dtypes.finfo`."""

    name: str  # of the dtype, in NumPy, TensorFlow and Keras
    exponent_bits: int
    fraction_bits: int  # without the implicit leading bit
    max: float
    max_exponent: int  # of the largest finite value: the exponent bias
    # The format has every integer from 0 to this: 2048 in float16, 256 in bfloat16.
    max_exact_integer: int
    smallest_normal: float
    min_exponent: int  # of the smallest normal value
    smallest_subnormal: float
    min_subnormal_exponent: int
    # That of the largest power of two that rounds to zero: half the smallest subnormal, which a tie
    # to even rounds down.
    flush_exponent: int

    @classmethod
    def of(cls, name: str) -> "FloatFormat":
        """Returns the format of a dtype."""
        info = ml_dtypes.finfo(name)
        lowest = int(info.minexp) - int(info.nmant)
        return cls(
            name,
            exponent_bits=int(info.nexp),
            fraction_bits=int(info.nmant),
            max=float(info.max),
            max_exponent=int(info.maxexp) - 1,
            max_exact_integer=2 ** (int(info.nmant) + 1),
            smallest_normal=float(info.smallest_normal),
            min_exponent=int(info.minexp),
            smallest_subnormal=2.0**lowest,
            min_subnormal_exponent=lowest,
            flush_exponent=lowest - 1,
        )


FLOAT16, BFLOAT16, FLOAT32 = map(FloatFormat.of, ("float16", "bfloat16", "float32"))
FORMATS_16_BIT = {FLOAT16.name: FLOAT16, BFLOAT16.name: BFLOAT16}  # those of mixed precision
DTYPES_16_BIT = tuple(FORMATS_16_BIT)
FORMATS = (*FORMATS_16_BIT.values(), FLOAT32)  # the least range first


def computing_format(dtypes: Collection[str]) -> FloatFormat:
    """Returns the format of `FORMATS` that limits a model whose layers compute in these dtypes.

    Example:
    >>> from kmp.utils.float_formats import computing_format
    >>> computing_format(["bfloat16", "float32"]).name
    'bfloat16'
    """
    return next((each for each in FORMATS if each.name in dtypes), FLOAT32)


def is_power_of_two(number: float) -> bool:
    """Whether a number is a power of two.

    Multiplying by it is exact, unless the product leaves the normal range.
    """
    return math.frexp(number)[0] == 0.5


def as_power(number: float) -> str:
    """Formats a number; a power of two other than 1 is written as `2^k`.

    Example:
    >>> from kmp.utils.float_formats import as_power
    >>> as_power(32768.0), as_power(1.0), as_power(1000.0)
    ('2^15', '1', '1000')
    """
    if number == 1 or not is_power_of_two(number):
        return f"{number:g}"
    return f"2^{math.frexp(number)[1] - 1}"
