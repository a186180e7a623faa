"""The precision rule of one layer or operation, and the rules of constants, which both have."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kmp.utils.float_formats import FORMATS_16_BIT

RUNS_IN_16_BITS = "16 bits"
FOLLOWS_INPUTS = "follows its inputs"
NEEDS_FLOAT32 = "float32"

_SOURCE_OF_FORMAT = {"float16": "IEEE 754 binary16", "bfloat16": "bfloat16's format"}


@dataclass(frozen=True)
class OpRule:
    """The precision rule for one layer or operation.

    Args:
        category: `RUNS_IN_16_BITS`, `FOLLOWS_INPUTS` (safe in the dtype of its inputs) or
            `NEEDS_FLOAT32`.
        reason: Why, as shown to users; may be empty.
        source: The source of the rule.
    """

    category: str
    reason: str = ""
    source: str = ""

    def category_in(self, dtype: str) -> str:
        """Returns the category as users see it, who ask for one of the 16-bit dtypes."""
        return dtype if self.category == RUNS_IN_16_BITS else self.category


def rules_of_constants(constants: Iterable[float], dtype: str) -> Iterator[OpRule]:
    """Yields a rule for each constant that is Inf or 0 in a 16-bit dtype."""
    number_format = FORMATS_16_BIT[dtype]
    for constant in constants:
        magnitude = abs(constant)
        reason = ""
        if math.isfinite(magnitude) and magnitude > number_format.max:
            reason = f"exceeds {number_format.max:g} and overflows in {dtype}"
        elif 0.0 < magnitude <= 2.0**number_format.flush_exponent:
            reason = f"is below {number_format.smallest_subnormal:.0g} and is zero in {dtype}"
        if reason:
            text = f"the constant {constant:g} {reason}"
            yield OpRule(NEEDS_FLOAT32, text, _SOURCE_OF_FORMAT[dtype])
