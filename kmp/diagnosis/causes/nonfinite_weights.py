"""Weights with NaN or Inf."""

from dataclasses import dataclass

from kmp.diagnosis import changes
from kmp.diagnosis.cause import Cause
from kmp.diagnosis.edits import NO_CHANGE, Change
from kmp.diagnosis.observations import Observations
from kmp.diagnosis.wording import counted, failed_steps


@dataclass(frozen=True, kw_only=True)
class NonfiniteWeights(Cause):
    """Variables with NaN or Inf, so that no loss is finite.

    Args:
        variables: Their paths.
        is_from_start: Whether they had NaN or Inf before the first update.
    """

    variables: list[str]
    is_from_start: bool

    @classmethod
    def of(cls, run: Observations) -> "NonfiniteWeights | None":
        """Returns the cause if the run has it."""
        replay = run.passes.failed_forward
        if replay is None or replay.is_finite_in_float32 or not replay.batch.nonfinite_variables:
            return None
        variables, is_from_start = replay.batch.nonfinite_variables, run.skipped.are_all
        change = NO_CHANGE
        if not is_from_start:
            change = Change((changes.smaller_learning_rate(run),))
        return cls(
            run=run,
            name="loss",
            location=variables[0],
            change=change,
            variables=variables,
            is_from_start=is_from_start,
        )

    @property
    def title(self) -> str:
        before = " before training begins" if self.is_from_start else ""
        return f"{self.variables[0]} contains NaN or Inf{before}, so every loss is NaN."

    @property
    def evidence(self) -> str:
        contain = "contains" if len(self.variables) == 1 else "contain"
        count = counted(len(self.variables), "variable")
        unchanged = ", and no step has changed the weights" if self.is_from_start else ""
        return f"{failed_steps(self.run)}; {count} {contain} NaN or Inf{unchanged}"

    @property
    def note(self) -> str:
        if not self.is_from_start:
            return "an update made them so; train again from weights that are finite"
        return (
            "whatever initialized or loaded the weights made them so. A file in float16 has Inf for"
            " all beyond 65504: save the weights in float32, and check them with np.isfinite after"
            " loading"
        )
