"""Losses with NaN or Inf that no replay shows."""

from dataclasses import dataclass

from kmp.diagnosis.cause import Cause
from kmp.diagnosis.missing_replays import how_to_find_layer
from kmp.diagnosis.observations import Observations
from kmp.diagnosis.wording import failed_steps
from kmp.records.replay import LOSS_FUNCTION


@dataclass(frozen=True, kw_only=True)
class UnexplainedLoss(Cause):
    """Losses with NaN or Inf that no replay shows.

    Args:
        has_finite_outputs: Whether a replay of the forward pass has finite outputs, so that the
            loss function makes them so.
    """

    has_finite_outputs: bool

    @classmethod
    def of(cls, run: Observations) -> "UnexplainedLoss":
        """Returns the cause of a run with losses that are not finite."""
        replay = run.passes.forward
        is_finite = replay is not None and replay.is_forward_only and replay.is_finite
        location = LOSS_FUNCTION if is_finite else ""
        return cls(run=run, name="loss", location=location, has_finite_outputs=is_finite)

    @property
    def title(self) -> str:
        if self.has_finite_outputs:
            return "The loss function returns NaN or Inf for finite outputs."
        if self.run.records.has_loss_scale:
            return "The loss is NaN or Inf before scaling, so no loss scale helps."
        return "The loss is NaN or Inf."

    @property
    def evidence(self) -> str:
        skipped, pattern = self.run.skipped, "that is most steps"
        if self.has_finite_outputs:
            pattern = "replayed, the outputs of the model are finite"
        elif skipped.ends_nonfinite:
            pattern = f"among them the last {skipped.in_a_row}"
        elif skipped.nonfinite_losses < skipped.steps / 2:
            pattern = "most losses are finite"
        return f"{failed_steps(self.run)}; {pattern}"

    @property
    def note(self) -> str:
        if self.has_finite_outputs:
            return "compute the loss in float32, and clip the argument of a log"
        return how_to_find_layer(self.run)
