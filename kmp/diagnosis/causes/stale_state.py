"""A state, such as a moving average, whose updates 16 bits lose."""

from dataclasses import dataclass

from kmp.diagnosis import changes, soundness
from kmp.diagnosis.cause import Cause
from kmp.diagnosis.edits import Change
from kmp.diagnosis.model_names import name_of
from kmp.diagnosis.observations import Observations
from kmp.diagnosis.wording import of_a_batch, percent
from kmp.records import Replay
from kmp.records.replay import StateError
from kmp.utils.float_formats import DTYPES_16_BIT


@dataclass(frozen=True, kw_only=True)
class StaleState(Cause):
    """A state whose updates 16 bits lose: they compute them, or its variable has them.

    Args:
        replay: The comparison that shows it.
        error: The error of its update.
    """

    replay: Replay
    error: StateError

    @classmethod
    def of(cls, run: Observations) -> "StaleState | None":
        """Returns the cause if the run has it."""
        replay = run.passes.harmful
        lost = soundness.lost_states(replay) if replay else []
        if replay is None or not lost:
            return None
        worst = max(lost, key=lambda each: each.error)
        change = changes.replayed(run, replay, "the updates for the batch agree")
        in_16_bits = [each.path for each in lost if each.dtype in DTYPES_16_BIT]
        if worst.path in in_16_bits:
            change = Change(changes.states_in_float32(run, in_16_bits))
        return cls(
            run=run,
            name="precision_loss",
            location=run.model.layer_of(worst.path),
            change=change,
            replay=replay,
            error=worst,
        )

    @property
    def is_cured_by_float32(self) -> bool:
        """Whether layers in float32 cure it: not if its variable is in 16 bits."""
        return self.error.dtype not in DTYPES_16_BIT

    @property
    def title(self) -> str:
        where = self.run.model.describe(self.location)
        stays = f"The state {name_of(self.error.path)!r} of {where} stays behind:"
        if self.is_cured_by_float32:
            return f"{stays} {self.run.format.name} has too few bits for its updates."
        return (
            f"{stays} it is a {self.error.dtype} variable, which has too few bits for its updates."
        )

    @property
    def evidence(self) -> str:
        error = self.error
        than = "from float32" if self.is_cured_by_float32 else "from that to a float32 variable"
        noise = f"for another batch it would differ by {percent(error.noise)}"
        if not error.noise:
            share = percent(error.next_update)
            noise = f"it does not depend on the batch, and the next step adds {share} of it again"
        return (
            f"{of_a_batch(self.replay)} what a step adds to {error.path} differs {than} by"
            f" {percent(error.error)}; {noise}"
        )

    @property
    def note(self) -> str:
        if self.is_cured_by_float32:
            return "or create the weight in float32, with autocast=False"
        return (
            "the variable has to be float32, and it is not enough that its layer computes in"
            " float32; if the layer creates it with a dtype of its own:"
            " self.add_weight(dtype='float32', autocast=False)"
        )
