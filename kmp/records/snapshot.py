"""A snapshot of a `LossScaleOptimizer`, and what a log has of it. Needs no Keras."""

from dataclasses import dataclass, field
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from kmp.records.gradient_sample import GradientSample
from kmp.records.log_types import Count, CountByVariable, LossScale, Number, Text


@dataclass(frozen=True)
class Snapshot:
    """The counters and the state of a `LossScaleOptimizer`.

    Args:
        step: Training steps done, including skipped ones.
        loss_scale: The scale of the next step.
        clean_steps: Steps without an overflow since the scale last grew (or would have grown, if it
            is at its maximum) or the gradients of a finite loss last overflowed.
        overflow_count: Steps skipped since training began, without batches that had no rows.
        overflows_in_a_row: Steps skipped since the last applied step, without batches that had no
            rows.
        nonfinite_loss_count: Skipped steps whose loss was non-finite before scaling.
        nonfinite_losses_in_a_row: The steps in `overflows_in_a_row` whose loss was non-finite
            before scaling.
        overflows_at_min_scale: Skipped steps in which the rule backed off while the scale was at
            its minimum.
        overflow_origin: Path of the variable where the overflow of the last skipped step with a
            finite loss originated: of the variables with a non-finite gradient, the one nearest to
            the loss, because an overflow spreads from there to the layers before it. In graph mode,
            "nearest" follows the graph; in eager mode, the order of the model's variables. `None`
            before the first such step.
        last_loss: The loss of the last step before scaling, summed over replicas. `None` before the
            first step.
        highest_loss: The largest magnitude of a finite `last_loss` so far. `None` before the first
            step.
        overflows_by_variable: Number of steps in which a variable's gradient was non-finite, by
            variable path; zeros are omitted.
        overflow_origins_by_variable: Number of skipped steps with a finite loss in which a variable
            was the overflow origin, by variable path; zeros are omitted.
        loss_dtype: The dtype of the loss that `scale_loss` got last; `None` before the first one.
        sample: The last sample of gradients, or `None` if none was requested.

    Example:
    >>> import kmp
    >>> kmp.LossScaleOptimizer("sgd", initial_scale=8.0).snapshot().loss_scale
    8.0
    """

    step: int
    loss_scale: float
    clean_steps: int
    overflow_count: int
    overflows_in_a_row: int
    nonfinite_loss_count: int
    nonfinite_losses_in_a_row: int = 0
    overflows_at_min_scale: int = 0
    overflow_origin: str | None = None
    last_loss: float | None = None
    highest_loss: float | None = None
    overflows_by_variable: dict[str, int] = field(default_factory=dict)
    overflow_origins_by_variable: dict[str, int] = field(default_factory=dict)
    loss_dtype: str | None = None
    sample: GradientSample | None = None


_SAME = Meta(description="as in `Snapshot`")
_Count = Annotated[Count | UnsetType, _SAME]
_Number = Annotated[Number | UnsetType | None, _SAME]


class SnapshotRecord(Struct, kw_only=True, omit_defaults=True, repr_omit_defaults=True):
    """The part of a `kmp.records.Record` that comes from snapshots."""

    step: Annotated[Count, _SAME]
    loss_scale: Annotated[LossScale | UnsetType | None, _SAME] = UNSET
    clean_steps: _Count = UNSET
    overflow_count: _Count = UNSET
    overflow_rate: Annotated[
        Number | UnsetType | None,
        Meta(description="the fraction of steps skipped since the previous record"),
    ] = UNSET
    overflows_in_a_row: _Count = UNSET
    nonfinite_loss_count: _Count = UNSET
    nonfinite_losses_in_a_row: _Count = UNSET
    overflows_by_variable: Annotated[
        CountByVariable | UnsetType,
        Meta(
            description="as in `Snapshot`, in records in which this or the next key has changed;"
            " in a long run in some of them"
        ),
    ] = UNSET
    overflow_origins_by_variable: Annotated[CountByVariable | UnsetType, _SAME] = UNSET
    overflow_origin: Annotated[
        Text | UnsetType | None,
        Meta(description="as in `Snapshot`, in records after new such steps"),
    ] = UNSET
    last_loss: _Number = UNSET
    highest_loss: _Number = UNSET
    loss_dtype: Annotated[
        Text | UnsetType | None,
        Meta(description="as in `Snapshot`, in the first record and where it changed"),
    ] = UNSET
