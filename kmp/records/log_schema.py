"""The structure of a log; `kmp.records` documents the keys."""

from typing import Annotated, Literal, Required, TypedDict

from msgspec import Meta

from kmp.records.exponent_histogram import FIRST_EXPONENT, LAST_EXPONENT
from kmp.records.replay import Replay
from kmp.records.value_types import (
    MOST_VARIABLES,
    Count,
    CountByVariable,
    ElementCount,
    LossScale,
    Magnitude,
    Norm,
    Number,
    PositiveInteger,
    Text,
    Texts,
)
from kmp.utils import FLOAT32

READABLE_SCHEMAS = (2, 3, 4)
EXPONENT_COUNT = LAST_EXPONENT - FIRST_EXPONENT + 1
MOST_UNKNOWN_KEYS = 100  # in one log
MOST_METRICS = 1000  # in one record


class BinCounts(TypedDict):
    """Element counts by binary exponent, see `kmp.records.exponent_histogram.pack`."""

    zero: ElementCount
    inf: ElementCount
    nan: ElementCount
    first: Annotated[int, Meta(ge=FIRST_EXPONENT, le=LAST_EXPONENT)]
    counts: Annotated[list[ElementCount], Meta(max_length=EXPONENT_COUNT)]


class VariableStatistics(BinCounts, total=False):
    """The gradient statistics of one variable."""

    amax: Magnitude
    norm: Norm
    weight_norm: Norm
    update_norm: Norm
    updates: ElementCount
    lost_updates: ElementCount
    unscaled: BinCounts


class CompactBins(TypedDict, total=False):
    """The counts of a sample in compact form; `kmp.records.compact_sample` checks what the texts contain."""

    total: BinCounts
    zero: str
    inf: str
    nan: str
    counts: str


class Sample(CompactBins, total=False):
    """The gradient statistics of one step, in compact form or with `variables`."""

    loss_scale: Required[LossScale]
    variables: Annotated[dict[Text, VariableStatistics], MOST_VARIABLES]
    elements: str
    amax: str
    norm: str
    weight_norm: str
    update_norm: str
    updates: str
    lost_updates: str
    unscaled: CompactBins
    names: Annotated[list[Text], MOST_VARIABLES]


class Record(TypedDict, total=False):
    """A line of a log after the header, with the keys of all schemas."""

    step: Required[Count]
    loss_scale: LossScale | None
    clean_steps: Count
    overflow_count: Count
    overflow_rate: Number | None
    overflows_in_a_row: Count
    nonfinite_loss_count: Count
    nonfinite_losses_in_a_row: Count
    overflows_by_variable: CountByVariable
    overflow_origins_by_variable: CountByVariable
    culprits_by_variable: CountByVariable
    overflow_origin: Text | None
    culprit: Text | None
    last_loss: Number | None
    highest_loss: Number | None
    loss_dtype: Text | None
    epoch: Count
    metrics: Annotated[dict[Text, Number | None], Meta(max_length=MOST_METRICS)]
    grad_zeros: Number | None
    grad_norm: Norm | None
    sample: Sample
    reference: Sample
    replay: Replay
    replay_error: Text


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
    train_step: Text
    layers: Annotated[dict[Text, Text], MOST_VARIABLES]
    output_layers: Texts
    compute_dtypes: Texts
    variable_dtypes: Texts
    float32_variables: Annotated[list[Text], MOST_VARIABLES]
    own_dtype_variables: Annotated[list[Text], MOST_VARIABLES]
    replicas: PositiveInteger
    parameters: Count


class Header(TypedDict, total=False):
    """The first line of a log."""

    schema: Required[Literal[2, 3, 4]]
    kind: Required[Literal["header"]]
    started: Text
    keras: Text
    tensorflow: Text
    numpy: Text
    settings: Settings


# The values of unknown keys that are kept: a later version may write them.
UnknownNumber = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | float | None
UnknownSetting = UnknownNumber | bool | Text | Texts
