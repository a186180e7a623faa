"""The types and ranges of single values in a log."""

from typing import Annotated

from msgspec import Meta

from kmp.utils import FLOAT32

# Steps on the axis of a plot are float64, which has half steps below 2^52; matplotlib needs four bits more.
Count = Annotated[int, Meta(ge=0, lt=2**48)]
PositiveInteger = Annotated[int, Meta(ge=1, le=2**63 - 1)]
# The number of elements in 280 bins of 2^18 variables then fits int64.
MOST_ELEMENTS = 2**36
ElementCount = Annotated[int, Meta(ge=0, lt=MOST_ELEMENTS)]
MOST_VARIABLES = Meta(max_length=2**18)

# Squares and ratios of these do not overflow float64, and no float32 computation exceeds them.
HIGHEST_NUMBER = HIGHEST_NORM = 1e100
Number = Annotated[float, Meta(ge=-HIGHEST_NUMBER, le=HIGHEST_NUMBER)]
Norm = Annotated[float, Meta(ge=0, le=HIGHEST_NORM)]
Magnitude = Annotated[float, Meta(ge=0, le=FLOAT32.max)]
LossScale = Annotated[float, Meta(ge=FLOAT32.smallest_subnormal, le=FLOAT32.max)]
Text = Annotated[str, Meta(max_length=4096)]
Texts = Annotated[list[Text], Meta(max_length=100)]
CountByVariable = Annotated[dict[Text, Count], MOST_VARIABLES]
