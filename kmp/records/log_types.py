"""The types of the values in a log, with their ranges. Needs no Keras."""

from typing import Annotated

from msgspec import Meta

from kmp.records.exponent_histogram import BIN_COUNT
from kmp.utils.float_formats import FLOAT32

# Steps on the axis of a plot are float64, which has half steps below 2^52; matplotlib needs four
# bits more.
Count = Annotated[int, Meta(ge=0, lt=2**48)]
PositiveInteger = Annotated[int, Meta(ge=1, le=2**63 - 1)]
# Below this is each count of a sample. The sum of the counts in 280 bins of 2^18 variables then
# fits int64.
MOST_ELEMENTS = 2**36
MOST_VARIABLES = Meta(max_length=2**18)
MOST_METRICS = 1000  # in one record

# Squares and ratios of these do not overflow float64, and no float32 computation exceeds them.
HIGHEST_NUMBER = 1e100
Number = Annotated[float, Meta(ge=-HIGHEST_NUMBER, le=HIGHEST_NUMBER)]
Norm = Annotated[float, Meta(ge=0, le=HIGHEST_NUMBER)]
Magnitude = Annotated[float, Meta(ge=0, le=FLOAT32.max)]
LossScale = Annotated[float, Meta(ge=FLOAT32.smallest_subnormal, le=FLOAT32.max)]
Factor = Annotated[float, Meta(gt=1, le=FLOAT32.max)]
Fraction = Annotated[float, Meta(gt=0, lt=1)]
Text = Annotated[str, Meta(max_length=4096)]
Texts = Annotated[list[Text], Meta(max_length=100)]
Names = Annotated[list[Text], MOST_VARIABLES]
TextByPath = Annotated[dict[Text, Text], MOST_VARIABLES]
NamesByPath = Annotated[dict[Text, Names], MOST_VARIABLES]
CountByVariable = Annotated[dict[Text, Count], MOST_VARIABLES]
Metrics = Annotated[dict[Text, Number | None], Meta(max_length=MOST_METRICS)]
Bins = Annotated[list[Annotated[int, Meta(ge=0, lt=BIN_COUNT)]], Meta(max_length=BIN_COUNT)]
