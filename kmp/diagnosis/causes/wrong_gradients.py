"""Gradients that are not those of float32, though the outputs of the model are."""

from dataclasses import dataclass

from kmp.diagnosis import changes, soundness
from kmp.diagnosis.cause import ERROR, WARNING, Cause
from kmp.diagnosis.lossy import lossy, too_few_bits
from kmp.diagnosis.observations import Observations
from kmp.diagnosis.wording import of_a_batch, percent
from kmp.records import Replay
from kmp.records.replay import LOSS_FUNCTION, GradientError
from kmp.records.step_facts import CodeLine
from kmp.utils.float_formats import FLOAT32


@dataclass(frozen=True, kw_only=True)
class WrongGradients(Cause):
    """Gradients of layers that are not those of float32, though the outputs agree.

    Args:
        replay: The comparison that shows it.
        error: The largest harmful error.
        layer: The path of the layer with it, as a program creates it.
        is_of_loss: Whether the loss differs too, so that the error begins there.
    """

    replay: Replay
    error: GradientError
    layer: str
    is_of_loss: bool

    @classmethod
    def of(cls, run: Observations) -> "WrongGradients | None":
        """Returns the cause if the run has it."""
        last = run.passes.harmful
        if last is None or soundness.has_few_examples(last.examples, run.format):
            return None
        if not soundness.harmful_gradients(last):
            return None
        # Late in a training that the loss misleads, the outputs may hardly vary, and differ too.
        with_harm = reversed(run.passes.with_harmful_gradients)
        replay = next(filter(soundness.is_born_in_loss, with_harm), last)
        worst = max(soundness.harmful_gradients(replay), key=lambda each: each.error)
        layer = location = run.model.created_layer(worst.layer)
        is_of_loss = soundness.is_born_in_loss(replay)
        if is_of_loss:
            overflow = soundness.overflow_inside(replay)
            location = overflow.layer if overflow else LOSS_FUNCTION
        return cls(
            run=run,
            name="precision_loss",
            severity=ERROR if is_of_loss else WARNING,
            location=location,
            change=changes.replayed(run, replay, "the gradients for the batch agree"),
            replay=replay,
            error=worst,
            layer=layer,
            is_of_loss=is_of_loss,
        )

    @property
    def is_cured_by_float32(self) -> bool:
        return True

    @property
    def code(self) -> CodeLine | None:
        found = soundness.overflow_inside(self.replay) if self.is_of_loss else None
        return found.code if found else None

    @property
    def title(self) -> str:
        name, describe = self.run.format.name, self.run.model.describe
        if not self.is_of_loss:
            return f"The gradients of {describe(self.layer)} are not those of float32."
        found = soundness.overflow_inside(self.replay)
        if found:
            added = "" if found.layer == LOSS_FUNCTION else f" that {describe(found.layer)} adds"
            returned = f"{found.operation} in it returns {found.value} in {name}"
            return f"The loss{added} is not that of float32: {returned}."
        operation = soundness.worst_lossy_operation(self.replay, LOSS_FUNCTION.__eq__)
        if operation is None and self.run.records.last("loss_dtype") == FLOAT32.name:
            magnifies = f"it magnifies the rounding of the outputs in {name}"
            return f"The loss is not that of float32: {magnifies}."
        reason = f"it {lossy(operation)}" if operation else too_few_bits(name)
        return f"The loss is not that of float32, though the outputs are: {reason}."

    @property
    def evidence(self) -> str:
        replay, error = self.replay, self.error
        differ = f"{of_a_batch(replay)} they differ"
        if self.is_of_loss:
            where = self.run.model.describe(self.layer)
            differ = (
                f"{of_a_batch(replay)} the loss is {replay.loss:.4g}, in float32"
                f" {replay.float32_loss:.4g}, and the outputs differ by"
                f" {percent(replay.output_error or 0.0)}; the gradients of {where} differ"
            )
        kept, noise = percent(max(0.0, error.kept)), ""
        if error.noise is not None:
            noise = f"; another batch of this size changes them by {percent(error.noise)}"
        return f"{differ} by {percent(error.error)} of their norm, and keep {kept} of it{noise}"
