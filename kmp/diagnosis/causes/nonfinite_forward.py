"""A forward pass that 16 bits make NaN or Inf: an overflow, a division by 0, a logarithm of 0."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from kmp.diagnosis import changes, soundness
from kmp.diagnosis.cause import Cause
from kmp.diagnosis.observations import Observations
from kmp.diagnosis.operations import (
    divides_by_zero,
    function_of_negative,
    is_logarithm,
    lost_constants,
)
from kmp.diagnosis.wording import (
    capitalized,
    failed_steps,
    finite_results,
    is_zero_because,
    largest_value,
    line_of,
)
from kmp.records import Replay
from kmp.records.replay import LOSS_FUNCTION, NonfiniteOperation
from kmp.records.step_facts import CodeLine
from kmp.utils.float_formats import FLOAT32, FORMATS_16_BIT


@dataclass(frozen=True, kw_only=True)
class NonfiniteForward(Cause):
    """A forward pass that 16 bits make NaN or Inf.

    Its name is `"constant"`, `"rounding"`, `"forward_underflow"`, `"forward_overflow"` or
    `"loss_overflow"`.

    Args:
        replay: The replay that shows it.
        operation: The first operation that returns NaN or Inf; `None` if only the step as XLA
            compiles it does so.
        constant: The scalar operand that the format makes infinite, or that it rounds to a divisor
            of 0; `None` if it is not known.
        is_division: Whether the operation divides by 0.
    """

    names: ClassVar[Mapping[str, str]] = {
        "constant": "a constant of the program that the format rounds to 0 or Inf",
        "forward_overflow": "a result of the forward pass exceeds the range",
        "forward_underflow": "a result of the forward pass is rounded to 0, and a later one is Inf",
        "rounding": "a result is rounded below 0, outside the domain of the next operation",
        "loss_overflow": "the loss, or a term of it, exceeds the range",
    }

    replay: Replay
    operation: NonfiniteOperation | None
    constant: float | None = None
    is_division: bool = False

    @classmethod
    def of(cls, run: Observations) -> "NonfiniteForward | None":
        """Returns the cause if the run has it."""
        replay = run.passes.failed_forward
        if run.format is FLOAT32 or replay is None or not replay.is_finite_in_float32:
            return None
        if replay.is_forward_only and replay.is_finite:
            return None  # what was replayed, without the loss
        # Operations of other layers may be masks.
        first = next(iter(soundness.forward_operations(replay)), None)
        found = soundness.overflow_inside(replay) or first
        if found is not None:
            return cls.in_operation(run, found, replay)
        if not (replay.float32_layers and replay.overflow and replay.overflow.outputs):
            return None
        return cls(
            run=run,
            name="forward_overflow",
            location=replay.float32_layers[0],
            change=changes.replayed(run, replay, finite_results(replay)),
            replay=replay,
            operation=None,
        )

    @classmethod
    def in_operation(
        cls, run: Observations, found: NonfiniteOperation, replay: Replay
    ) -> "NonfiniteForward":
        """Returns the cause of an operation of the forward pass that 16 bits make NaN or Inf."""
        kind = _kind(run, found, replay)
        return cls(
            run=run,
            name=kind.name,
            location=found.layer,
            change=changes.replayed(run, replay, finite_results(replay)),
            replay=replay,
            operation=found,
            constant=kind.constant,
            is_division=kind.is_division,
        )

    @property
    def is_cured_by_float32(self) -> bool:
        return True

    @property
    def code(self) -> CodeLine | None:
        return self.operation.code if self.operation else None

    @property
    def title(self) -> str:
        found, number_format = self.operation, self.run.format
        name, where = number_format.name, self.run.model.describe(self.location)
        subject = capitalized(where)
        if found is None:
            return f"{subject} returns NaN or Inf in {name} as XLA compiles the training step."
        if self.is_division:
            return f"{subject} divides by 0: {is_zero_because(self.constant, name)}."
        if self.name == "constant":
            known = f"The constant {self.constant:g}" if self.constant is not None else "A constant"
            largest = f"whose maximum is {number_format.max:.5g}"
            return f"{known} in {where} is infinite in {name}, {largest}."
        if self.name == "rounding":
            function = function_of_negative(found)
            return f"{subject} takes the {function} of a number that {name} makes negative."
        if self.name == "forward_underflow":
            return f"{subject} takes the logarithm of a number that is 0 in {name}."
        if self.name == "forward_overflow":
            return f"The output of {where} overflows {largest_value(self.run)}."
        loss = "The loss" if found.layer == LOSS_FUNCTION else f"The loss that {where} adds"
        return f"{loss} overflows {largest_value(self.run)}{line_of(found.code)}."

    @property
    def evidence(self) -> str:
        found, loss = self.operation, self.replay.float32_loss
        in_float32 = "all outputs are finite"  # the loss is not known where a step scales none
        if loss is not None:
            in_float32 = f"the loss is {loss:.4g}"
        if found is None:
            return (
                f"{failed_steps(self.run)}; replayed by the compiled step it does so too, and"
                " without the optimizations of TensorFlow and XLA it does not; in float32"
                f" {in_float32}"
            )
        operand = f"numbers up to {found.largest_input:.5g}"
        if self.is_division or self.name == "forward_underflow":
            operand = "0"
        elif self.name == "constant":
            operand = "a scalar that is infinite"
            if _is_cast_of_constant(found):
                operand = f"{self.constant:g}"
        elif self.name == "rounding":
            operand = "a negative number"
        where = self.run.model.describe(found.layer)
        return (
            f"{failed_steps(self.run)}; replayed, {found.operation} in {where}"
            f"{line_of(found.code)} is the first to return {found.value}, for {operand}; in float32"
            f" {in_float32}"
        )


class _Kind(NamedTuple):
    name: str
    constant: float | None = None
    is_division: bool = False


def _kind(run: Observations, found: NonfiniteOperation, replay: Replay) -> _Kind:
    """Returns what the format does to an operation."""
    # A constant, or a divisor, that the format makes infinite or zero.
    if _is_cast_of_constant(found):
        return _Kind("constant", found.constant)
    constants = lost_constants(run, replay, found.layer)
    large = next((value for value in constants if abs(value) > 1.0), None)
    is_nan_of_large = found.value == "nan" and large is not None
    if found.has_infinite_constant or is_nan_of_large:
        return _Kind("constant", large)
    if divides_by_zero(found):
        small = next((value for value in constants if abs(value) < 1.0), None)
        return _Kind("constant", small, is_division=True)

    # Operands that the format makes negative, 0 or too large.
    if found.value == "nan" and function_of_negative(found):
        return _Kind("rounding")
    if is_logarithm(found):
        return _Kind("forward_underflow")
    outputs = replay.overflow.outputs if replay.overflow else []
    is_output = found.layer != LOSS_FUNCTION and found.layer in outputs
    return _Kind("forward_overflow" if is_output else "loss_overflow")


def _is_cast_of_constant(found: NonfiniteOperation) -> bool:
    """Whether an operation casts a constant that its dtype makes infinite."""
    if found.operation != "Cast" or found.constant is None or found.dtype not in FORMATS_16_BIT:
        return False
    return abs(found.constant) > FORMATS_16_BIT[found.dtype].max
