"""The axis of binary exponents: its label, and the limits of float16's range on it."""

from kmp.records import NEAR_OVERFLOW_BITS
from kmp.utils import FLOAT16

EXPONENT_LABEL = "binary exponent, floor(log2 |g|)"

FLUSH_EXPONENT = FLOAT16.flush_exponent
SMALLEST_EXPONENT = FLOAT16.min_subnormal_exponent
NORMAL_EXPONENT = FLOAT16.min_exponent
OVERFLOW_EXPONENT = FLOAT16.max_exponent + 1
NEAR_OVERFLOW_EXPONENT = OVERFLOW_EXPONENT - NEAR_OVERFLOW_BITS
