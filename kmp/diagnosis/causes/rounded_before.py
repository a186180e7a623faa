"""Constants that were made in 16 bits outside of the step."""

from dataclasses import dataclass

from kmp.diagnosis.cause import ERROR, Cause
from kmp.diagnosis.causes.nonfinite_gradients import severity_of_overflows
from kmp.diagnosis.observations import Observations
from kmp.diagnosis.operations import divides_by_zero, function_of_negative, is_logarithm
from kmp.diagnosis.wording import counted, failed_steps, line_of
from kmp.records import Replay
from kmp.records.replay import NonfiniteOperation, RoundedConstant, RoundedConstants
from kmp.records.step_facts import CodeLine


@dataclass(frozen=True, kw_only=True)
class RoundedBefore(Cause):
    """Constants that were made in 16 bits outside of the step, so that float32 loses them too.

    Args:
        rounded: The constants, and the operation that they make NaN or Inf.
    """

    rounded: RoundedConstants

    @classmethod
    def in_loss(cls, run: Observations) -> "RoundedBefore | None":
        """Returns the cause if the forward pass shows it."""
        return cls._in(run, run.passes.failed_forward, ERROR)

    @classmethod
    def in_gradients(cls, run: Observations) -> "RoundedBefore | None":
        """Returns the cause if gradients of a finite loss show it."""
        return cls._in(run, run.passes.backward, severity_of_overflows(run))

    @classmethod
    def _in(cls, run: Observations, replay: Replay | None, severity: str) -> "RoundedBefore | None":
        if replay is None or replay.rounded is None or replay.is_finite_in_float32:
            return None
        operation = replay.rounded.operation
        return cls(
            run=run,
            name="constant",
            severity=severity,
            location=operation.layer if operation else "",
            rounded=replay.rounded,
        )

    @property
    def code(self) -> CodeLine | None:
        found = self.rounded.operation
        return found.code if found else None

    @property
    def _constant(self) -> str:
        first, *others = self.rounded.constants
        name = f"the constant {first.name!r}" if first.name else "a constant"
        return f"{name} and {counted(len(others), 'other')}" if others else name

    @property
    def _it(self) -> str:
        return "them" if len(self.rounded.constants) > 1 else "it"

    @property
    def _use(self) -> str:
        use = self.rounded.constants[0].use
        return _subject(use) or str(use)

    @property
    def title(self) -> str:
        found, first = self.rounded.operation, self.rounded.constants[0]
        made = (
            f"the program makes {self._constant} in {first.dtype}, before the training step gets"
            f" {self._it}"
        )
        if first.nonfinite:
            return f"{self._use} gets {first.nonfinite}: {made}."
        if found is None:
            return f"The training step returns NaN or Inf: {made}."
        place = f"{found.operation} in {self.run.model.describe(found.layer)}"
        return f"{_subject(found.code) or place} {_harm(found)}: {made}."

    @property
    def evidence(self) -> str:
        found, first = self.rounded.operation, self.rounded.constants[0]
        shown = ""
        if found:
            place = f"{found.operation} in {self.run.model.describe(found.layer)}"
            shown = f": {place}{line_of(found.code)} is the first to return {found.value}"
        tried = f"other numbers that {first.dtype} rounds to the same ones"
        if first.nonfinite:
            tried = "finite numbers"
        its = "their" if len(self.rounded.constants) > 1 else "its"
        return (
            f"{failed_steps(self.run)}; replayed in float32 it is not finite either{shown};"
            f" {self._use} gets {self._constant} ({_values_of(first)}), and with {tried} in {its}"
            " place the batch is finite"
        )

    @property
    def note(self) -> str:
        dtype = self.rounded.constants[0].dtype
        return (
            f"compute {self._it} with dtype='float32' from the beginning, in place of the compute"
            f" dtype: float32 does not bring back what {dtype} has lost. kmp promotes operations of"
            " float32 and 16-bit operands; not tried, as the exact numbers are not known"
        )


def _subject(code: CodeLine | None) -> str:
    """Returns an operation with its line, as the subject of a sentence; empty without a line."""
    return f"{code}," if code and code.file else ""


def _harm(found: NonfiniteOperation) -> str:
    """Returns what an operation does that returns NaN or Inf for its operands."""
    function = function_of_negative(found)
    if divides_by_zero(found):
        return "divides by 0"
    if function:
        return f"takes the {function} of a negative number"
    if is_logarithm(found) and found.smallest_input == 0.0:
        return "takes the logarithm of 0"
    return "returns NaN" if found.value == "nan" else "returns Inf"


def _values_of(constant: RoundedConstant) -> str:
    low, high = constant.smallest, constant.largest
    parts = [f"shape {tuple(constant.shape)}" if constant.shape else "a scalar"]
    if low is not None and high is not None:
        parts.append(f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}")
    if constant.nonfinite:
        parts.append(constant.nonfinite)
    return ", ".join(parts)
