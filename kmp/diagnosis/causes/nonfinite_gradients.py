"""Gradients of a finite loss that are NaN or Inf in float32 too."""

from dataclasses import dataclass

from kmp.diagnosis.cause import ERROR, WARNING, Cause
from kmp.diagnosis.observations import Observations
from kmp.diagnosis.operations import is_slope
from kmp.diagnosis.wording import cast_by_hand, note_of_cast, skipped_with_finite_loss
from kmp.records.replay import NonfiniteOperation
from kmp.records.step_facts import CodeLine
from kmp.utils.float_formats import FLOAT32


@dataclass(frozen=True, kw_only=True)
class NonfiniteGradients(Cause):
    """Gradients of a finite loss that are NaN or Inf in float32 too: no loss scale helps.

    Args:
        operation: The first operation of the backward pass with NaN or Inf, if it is known.
        origin: The path of the variable in which most overflows originated; may be empty.
    """

    operation: NonfiniteOperation | None
    origin: str

    @classmethod
    def of(cls, run: Observations) -> "NonfiniteGradients | None":
        """Returns the cause if the run, with gradients that overflow, has it."""
        replay = run.passes.backward
        if replay is None or replay.is_finite_in_float32:
            return None
        operation = next((each for each in replay.operations if each.is_backward), None)
        origin, _ = run.skipped.main_origin
        return cls(
            run=run,
            name="backward_overflow",
            severity=severity_of_overflows(run),
            location=operation.layer if operation else origin,
            operation=operation,
            origin=origin,
        )

    @property
    def code(self) -> CodeLine | None:
        return self.operation.code if self.operation else None

    @property
    def is_slope(self) -> bool:
        """Whether the operation is the slope of a root, which is infinite at 0."""
        return self.operation is not None and is_slope(self.operation)

    @property
    def title(self) -> str:
        where = f"gradients near {self.origin or 'the loss'}"
        if self.operation:
            where = f"backward pass of {self.run.model.describe(self.operation.layer)}"
        cast = cast_by_hand(self.operation)
        if cast:
            return (
                f"NaN or Inf in the {where}, which computes in {cast} whatever the dtypes of the"
                " layers are."
            )
        too = "" if self.run.format is FLOAT32 else ", in float32 too"
        if self.is_slope:
            return f"The {where} divides by 0{too}: the slope of a root or a norm is infinite at 0."
        return f"NaN or Inf in the {where}{too}."

    @property
    def evidence(self) -> str:
        operation, found = "", self.operation
        if found:
            operation = f": {found.operation} is the first to return {found.value}"
        replayed = "replayed" if self.run.format is FLOAT32 else "replayed in float32"
        return (
            f"{skipped_with_finite_loss(self.run)}; {replayed}, the gradients are not finite either"
            f"{operation}"
        )

    @property
    def note(self) -> str:
        cast = cast_by_hand(self.operation)
        if cast:
            return note_of_cast(cast, self.run)
        if self.is_slope:
            return (
                "not a matter of precision: two equal inputs have the distance 0. Keep the root"
                " away from it: ops.sqrt(ops.maximum(x, 1e-4)), for a norm with x ="
                " ops.sum(ops.square(v), axis=-1); not tried"
            )
        operation = "that operation, and at " if self.operation else ""
        return f"not a matter of precision: look at {operation}what the batch contains"


def severity_of_overflows(run: Observations) -> str:
    """Returns a warning if few steps overflow in the backward pass: the others train."""
    are_few = run.skipped.are_few(run.skipped.gradient_overflows)
    return WARNING if are_few and not run.skipped.is_stuck else ERROR
