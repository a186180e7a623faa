"""A batch with NaN, Inf or values that are too large."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kmp.diagnosis import changes, thresholds
from kmp.diagnosis.bad_batches import keep_examples, severity_of_batches
from kmp.diagnosis.cause import Cause
from kmp.diagnosis.edits import Change
from kmp.diagnosis.observations import Observations
from kmp.diagnosis.wording import capitalized, failed_steps, finite_results, largest_value
from kmp.records import Replay
from kmp.records.replay import BATCH_X, BATCH_Y, NonfinitePart
from kmp.utils.float_formats import FLOAT16


@dataclass(frozen=True, kw_only=True)
class BadData(Cause):
    """NaN, Inf or too large values in the batch.

    Args:
        largest: The magnitude beyond which values are too large, if there are only such values;
            0 if there are NaN or Inf.
        array: The array, or a part of it, as Python source.
        is_borne: Whether the values are beyond float16's maximum, and layers in float32 bear them,
            as a replay has shown.
    """

    names: ClassVar[Mapping[str, str]] = {
        "data": "inputs with NaN or Inf, or beyond the range of the format",
    }

    largest: float
    array: str
    is_borne: bool

    @classmethod
    def of(cls, run: Observations) -> "BadData | None":
        """Returns the cause if the run has it."""
        replay = run.passes.forward
        part = replay.batch.nonfinite if replay else None
        if replay is None or part is None or not _makes_nonfinite(run, replay, part):
            return None
        location = part.part + part.key
        array = location.partition("'s ")[2]

        # Other formats than float16 take a few operations to overflow.
        highest = FLOAT16.max if run.format is FLOAT16 else thresholds.OVERFLOWS_FLOAT32
        is_in_range = part.is_too_large and replay.is_finite_in_float32
        condition = f"np.isfinite({array})"
        if part.part == BATCH_X:
            condition = f"np.abs({array}) <= {highest:g}"
        change = Change((keep_examples(array, condition, replay),))
        if is_in_range:
            change = Change((changes.normalized(array),))
            if replay.float32_layers:
                change = changes.replayed(run, replay, finite_results(replay))
        return cls(
            run=run,
            name="targets" if part.part == BATCH_Y else "data",
            severity=severity_of_batches(run),
            location=location,
            change=change,
            largest=highest if part.is_too_large else 0.0,
            array=array,
            is_borne=is_in_range and run.format is FLOAT16 and bool(replay.float32_layers),
        )

    @property
    def is_cured_by_float32(self) -> bool:
        return self.is_borne

    @property
    def _values(self) -> str:
        if not self.largest:
            return "NaN or Inf"
        if self.run.format is FLOAT16:
            return f"values beyond {largest_value(self.run)}"
        return f"values beyond {self.largest:g}, whose products overflow float32"

    @property
    def title(self) -> str:
        return f"{capitalized(self.location)} contains {self._values}."

    @property
    def evidence(self) -> str:
        where = f"in the last such step {self.location} had {self._values}"
        return f"{failed_steps(self.run)}; {where}"

    @property
    def note(self) -> str:
        if not self.largest:
            return ""
        how = "with the same mean and deviation in training and later"
        if self.change.edits == (changes.normalized(self.array),):
            return how
        return f"or normalize {self.array}, {how}"


def _makes_nonfinite(run: Observations, replay: Replay, part: NonfinitePart) -> bool:
    """Whether what stands in the batch makes the loss or the gradients non-finite."""
    is_finite_in_float32 = replay.is_finite_in_float32
    if is_finite_in_float32 and part.part != BATCH_X and not replay.is_forward_only:
        return False  # the loss ignores these targets
    if not part.is_too_large:
        return True
    # Values that are too large have to overflow when they are read. A layer that gets them in
    # float32 may fail later, without such a cast. Fill values, say, overflow float32 too; unlike
    # NaN weights, or a root.
    operations = replay.operations
    if is_finite_in_float32:
        is_cast = any(each.operation == "Cast" and not each.is_backward for each in operations)
        return run.format is FLOAT16 and is_cast
    if replay.batch.nonfinite_variables or not operations:
        return False
    first = operations[0]
    return first.value == "inf" and first.largest_input > thresholds.OVERFLOWS_FLOAT32
