"""An optimizer whose epsilon is 0."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kmp.diagnosis import changes
from kmp.diagnosis.cause import Cause
from kmp.diagnosis.edits import Change, Edit, SetArguments
from kmp.diagnosis.observations import Observations
from kmp.diagnosis.wording import of_steps
from kmp.utils.float_formats import FLOAT16, FLOAT32

_LARGEST_LOST = 2.0**FLOAT16.flush_exponent  # it is 0 in float16


@dataclass(frozen=True, kw_only=True)
class DivisionByEpsilon(Cause):
    """An optimizer whose epsilon is 0 in the dtype of its state, so that it divides by 0.

    Args:
        epsilon: The setting.
        is_float16: Whether the state is float16.
    """

    names: ClassVar[Mapping[str, str]] = {
        "optimizer_state": "an epsilon of the optimizer that is 0, or too small for 16-bit state",
    }

    epsilon: float
    is_float16: bool

    @classmethod
    def of(cls, run: Observations) -> "DivisionByEpsilon | None":
        """Returns the cause if the run has it."""
        epsilon, replay = run.settings.epsilon, run.passes.forward
        variables = replay.batch.nonfinite_variables if replay else []
        if epsilon is None or not variables:
            return None
        is_float16 = FLOAT16.name in run.settings.variable_dtypes
        # TensorFlow flushes subnormal numbers to zero.
        is_always_zero = abs(epsilon) < FLOAT32.smallest_normal
        if not is_always_zero and not (is_float16 and epsilon <= _LARGEST_LOST):
            return None
        edits: list[Edit] = []
        if is_float16:
            edits += changes.weights_in_float32(run, variables[:1], FLOAT16)
        if is_always_zero:
            edits.append(SetArguments(changes.optimizer_call(run), {"epsilon": "1e-7"}))
        return cls(
            run=run,
            name="optimizer_state",
            location=variables[0],
            change=Change(tuple(edits)),
            epsilon=epsilon,
            is_float16=is_float16,
        )

    @property
    def title(self) -> str:
        if not self.is_float16:
            return "The optimizer divides by zero: its epsilon is 0."
        return (
            f"The optimizer divides by zero: its epsilon of {self.epsilon:g} is 0 in float16, the"
            " dtype of its state."
        )

    @property
    def evidence(self) -> str:
        skipped = of_steps(self.run, self.run.skipped.count)
        shown = f"{skipped} were skipped, and {self.location} contains NaN or Inf since an update"
        if not self.is_float16:
            return shown
        return f"{shown}. float16 rounds {_LARGEST_LOST:.2g} and less to zero"

    @property
    def note(self) -> str:
        if not self.is_float16:
            return "where all gradients of a weight were 0, it divides 0 by epsilon"
        return "keeps weights and optimizer state in float32; or epsilon=1e-4"
