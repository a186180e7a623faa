"""A forward pass that float32 does not make finite either."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kmp.diagnosis.cause import Cause
from kmp.diagnosis.observations import Observations
from kmp.diagnosis.wording import cast_by_hand, failed_steps, line_of, note_of_cast
from kmp.records.replay import NonfiniteOperation
from kmp.records.step_facts import CodeLine
from kmp.utils.float_formats import FLOAT32


@dataclass(frozen=True, kw_only=True)
class NonfiniteInFloat32(Cause):
    """A loss that float32 does not make finite either, with finite weights.

    Args:
        operation: The first operation with NaN or Inf, if it is known.
    """

    names: ClassVar[Mapping[str, str]] = {
        "loss": "the loss is NaN or Inf in float32 too, or no replay shows why",
    }

    operation: NonfiniteOperation | None

    @classmethod
    def of(cls, run: Observations) -> "NonfiniteInFloat32 | None":
        """Returns the cause if the run has it."""
        replay = run.passes.failed_forward
        if replay is None or replay.is_finite_in_float32:
            return None
        first = replay.operations[0] if replay.operations else None
        return cls(run=run, name="loss", location=first.layer if first else "", operation=first)

    @property
    def code(self) -> CodeLine | None:
        return self.operation.code if self.operation else None

    @property
    def _first(self) -> str:
        found = self.operation
        if found is None:
            return ""
        where = f"{self.run.model.describe(found.layer)}{line_of(found.code)}"
        return f": {found.operation} in {where} is the first to return {found.value}"

    @property
    def title(self) -> str:
        cast = cast_by_hand(self.operation)
        if self.run.format is FLOAT32:
            return f"The loss is NaN or Inf{self._first}."
        if cast:
            return (
                f"The loss is NaN or Inf, computed in {cast} whatever the dtypes of the layers are."
            )
        return "The loss is NaN or Inf in float32 too."

    @property
    def evidence(self) -> str:
        if self.run.format is FLOAT32:
            return f"{failed_steps(self.run)}; replayed, it is not finite either"
        how = "with layers in float32" if cast_by_hand(self.operation) else "in float32"
        return f"{failed_steps(self.run)}; replayed {how} it is not finite either{self._first}"

    @property
    def note(self) -> str:
        cast = cast_by_hand(self.operation)
        operation = "that operation, and at " if self.operation else ""
        look = f"look at {operation}what the batch contains"
        if self.run.format is FLOAT32:
            return look
        return note_of_cast(cast, self.run) if cast else f"not a matter of precision: {look}"
