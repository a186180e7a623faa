"""A loss that is computed in float16."""

from dataclasses import dataclass

from kmp.diagnosis import changes, soundness
from kmp.diagnosis.cause import Cause
from kmp.diagnosis.edits import NOT_TRIED, Change
from kmp.diagnosis.observations import Observations
from kmp.diagnosis.wording import failed_steps, first_few
from kmp.records.replay import LOSS_FUNCTION
from kmp.records.step_facts import CodeLine
from kmp.utils.float_formats import FLOAT16


@dataclass(frozen=True, kw_only=True)
class LossInFloat16(Cause):
    """A loss in float16 that is not finite, and that no replay shows.

    Args:
        operations: What computes it in float16 from the outputs of layers, the steepest first;
            empty if that is not known.
    """

    operations: list[CodeLine]

    @classmethod
    def of(cls, run: Observations) -> "LossInFloat16 | None":
        """Returns the cause if the run, with losses that are not finite, has it."""
        operations = soundness.in_float16(run.settings.step_facts)
        is_float16 = bool(operations) or run.records.last("loss_dtype") == FLOAT16.name
        if run.format is not FLOAT16 or not is_float16:
            return None
        return cls(
            run=run,
            name="loss_overflow",
            location=LOSS_FUNCTION,
            change=Change(
                changes.in_float32(run, run.settings.output_layers),
                f"{NOT_TRIED}, as none has this loss",
            ),
            operations=operations,
        )

    @property
    def is_cured_by_float32(self) -> bool:
        """Whether layers in float32 cure it: those that compute the outputs do."""
        return True

    @property
    def code(self) -> CodeLine | None:
        return self.operations[0] if self.operations else None

    @property
    def title(self) -> str:
        return "The loss is computed in float16, whose maximum is 65504."

    @property
    def evidence(self) -> str:
        if not self.operations:
            return f"{failed_steps(self.run)}, and it is a float16 tensor"
        first, *others = self.operations
        names = list(dict.fromkeys(each.operation for each in others))
        also = f"; so do {first_few(names, most=5)}" if names else ""
        return (
            f"{failed_steps(self.run)}; between the outputs of layers and the loss, {first}"
            f" computes in float16{also}"
        )

    @property
    def note(self) -> str:
        return "or cast the outputs to float32 before the loss is computed"
