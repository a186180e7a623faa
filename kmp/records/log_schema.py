"""The structure of a log, except that of a record; `kmp.records` documents the keys."""

from typing import Annotated, Literal, NotRequired, TypedDict

from msgspec import Meta

from kmp.records.exponent_histogram import BIN_COUNT
from kmp.utils import FLOAT32

SCHEMA = 1

# Steps on the axis of a plot are float64, which has half steps below 2^52; matplotlib needs four
# bits more.
Count = Annotated[int, Meta(ge=0, lt=2**48)]
PositiveInteger = Annotated[int, Meta(ge=1, le=2**63 - 1)]
# Below this is each count of a sample. The sum of the counts in 280 bins of 2^18 variables then
# fits int64.
MOST_ELEMENTS = 2**36
MOST_VARIABLES = Meta(max_length=2**18)

# Squares and ratios of these do not overflow float64, and no float32 computation exceeds them.
HIGHEST_NUMBER = 1e100
Number = Annotated[float, Meta(ge=-HIGHEST_NUMBER, le=HIGHEST_NUMBER)]
Norm = Annotated[float, Meta(ge=0, le=HIGHEST_NUMBER)]
Magnitude = Annotated[float, Meta(ge=0, le=FLOAT32.max)]
LossScale = Annotated[float, Meta(ge=FLOAT32.smallest_subnormal, le=FLOAT32.max)]
Text = Annotated[str, Meta(max_length=4096)]
Texts = Annotated[list[Text], Meta(max_length=100)]
CountByVariable = Annotated[dict[Text, Count], MOST_VARIABLES]


class Sample(TypedDict):
    """The gradient statistics of one step; `kmp.records.compact_sample` checks what the texts contain."""

    loss_scale: LossScale
    bins: Annotated[list[Annotated[int, Meta(ge=0, lt=BIN_COUNT)]], Meta(max_length=BIN_COUNT)]
    counts: str
    amax: NotRequired[str]
    norm: NotRequired[str]
    weight_norm: NotRequired[str]
    update_norm: NotRequired[str]
    updates: NotRequired[str]
    lost_updates: NotRequired[str]
    names: NotRequired[Annotated[list[Text], MOST_VARIABLES]]


class Settings(TypedDict, total=False):
    """The settings of a run."""

    rule: Text
    loss_scale: LossScale
    initial_scale: LossScale
    min_scale: LossScale
    max_scale: LossScale
    growth_interval: PositiveInteger
    growth_factor: Annotated[float, Meta(gt=1, le=FLOAT32.max)]
    backoff_factor: Annotated[float, Meta(gt=0, lt=1)]
    hysteresis: PositiveInteger
    model: Text
    policy: Text
    optimizer: Text
    is_keras_optimizer: bool
    settings_call: Text
    learning_rate: Number
    epsilon: Number
    beta_2: Number
    train_step: Text
    layers: Annotated[dict[Text, Text], MOST_VARIABLES]
    output_layers: Annotated[list[Text], MOST_VARIABLES]
    compute_dtypes: Texts
    variable_dtypes: Texts
    float32_variables: Annotated[list[Text], MOST_VARIABLES]
    own_dtype_variables: Annotated[list[Text], MOST_VARIABLES]
    replicas: PositiveInteger
    steps_per_execution: PositiveInteger
    parameters: Count


class Header(TypedDict):
    """The first line of a log."""

    schema: Annotated[int, Meta(ge=SCHEMA, le=SCHEMA)]
    kind: Literal["header"]
    started: NotRequired[Text]
    keras: NotRequired[Text]
    tensorflow: NotRequired[Text]
    numpy: NotRequired[Text]
    settings: NotRequired[Settings]
