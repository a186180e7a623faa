"""Outputs of the model that are not those of float32."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from kmp.diagnosis import changes, soundness, thresholds
from kmp.diagnosis.cause import Cause
from kmp.diagnosis.lossy import lossy, too_few_bits
from kmp.diagnosis.model_names import name_of
from kmp.diagnosis.observations import Observations
from kmp.diagnosis.wording import of_a_batch, percent
from kmp.records import Replay
from kmp.records.replay import LayerError


@dataclass(frozen=True, kw_only=True)
class WrongOutputs(Cause):
    """Outputs of the model that are not those of float32.

    Args:
        replay: The comparison that shows it.
        origin: The layer where the error begins; `None` if it is an operation between layers.
    """

    names: ClassVar[Mapping[str, str]] = {
        "precision_loss": "values are finite, but too few of their bits are right",
    }

    replay: Replay
    origin: LayerError | None

    @classmethod
    def of(cls, run: Observations) -> "WrongOutputs | None":
        """Returns the cause if the run has it."""
        replay = run.passes.harmful
        if replay is None:
            return None
        if soundness.harmful_gradients(replay) and soundness.needs_another_scale_only(replay):
            return None
        origin = soundness.error_origin(replay, run.format)
        is_large = (replay.output_error or 0.0) > thresholds.HARMFUL_OUTPUT_ERROR_ALONE
        if origin is not None:
            location = origin.layer
        elif is_large and replay.float32_layers and run.passes.need_float32_layers:
            # An operation between layers computes in the dtype of the one before it.
            location = replay.float32_layers[-1]
        else:
            return None  # only a constant differs, or gradients that underflow made a difference
        results = "outputs" if replay.is_forward_only else "outputs and gradients"
        return cls(
            run=run,
            name="precision_loss",
            location=location,
            change=changes.replayed(run, replay, f"the {results} for the batch agree"),
            replay=replay,
            origin=origin,
        )

    @property
    def is_cured_by_float32(self) -> bool:
        return True

    @property
    def _reason(self) -> tuple[str, str]:
        """Why the outputs of the layer differ, and what of the measurement shows it."""
        assert self.origin is not None
        nothing = too_few_bits(self.run.format.name), "; nothing in it is NaN or Inf"
        return next(_reasons(self.replay, self.origin, self.run.format.name), nothing)

    @property
    def title(self) -> str:
        where = self.run.model.describe(self.location)
        if self.origin is not None:
            reason, _ = self._reason
            return f"The outputs of {where} are not those of float32: {reason}."
        name = self.run.format.name
        reason = f"{name} has too few bits for an operation outside of its layers, after {where}"
        operations = soundness.lossy_operations(self.replay)
        index = next((each for each in operations if each.kind == "index"), None)
        if index:  # by the layer that computes or passes on the number
            reason = f"{self.run.model.describe(index.layer)} {lossy(index)}, after {where}"
        return f"The outputs of the model are not those of float32: {reason}."

    @property
    def evidence(self) -> str:
        replay, detail = self.replay, "; no layer adds to this"
        if self.origin is not None:
            _, seen = self._reason
            where = self.run.model.describe(self.location)
            share = percent(self.origin.new_error or 0.0)
            detail = f"; in {where} alone, given float32 inputs, by {share}{seen}"
        if soundness.has_other_loss(replay):
            detail += f"; the loss is {replay.loss:.4g}, in float32 {replay.float32_loss:.4g}"
        return (
            f"{of_a_batch(replay)} the outputs of the model differ from float32 by"
            f" {percent(replay.output_error or 0.0)} of how they vary{detail}"
        )


def _reasons(replay: Replay, origin: LayerError, name: str) -> Iterator[tuple[str, str]]:
    """Yields why the outputs of a layer differ, each with what shows it, the surest first."""

    def is_inside(layer: str) -> bool:
        return f"{layer}/".startswith(f"{origin.layer}/")

    # A weight that is lost.
    weights = soundness.lost_weights_of(replay, origin.layer)
    worst = max(weights, key=lambda each: max(each.zero, each.infinite), default=None)
    if worst:
        share, value = max((worst.zero, "0"), (worst.infinite, "infinite"))
        if share > thresholds.MANY_FLUSHED:
            reason = f"its weight {name_of(worst.path)!r} is {value} in {name}"
            yield reason, f"; that is {share:.0%} of {worst.path}"

    # An overflow inside.
    for found in soundness.forward_operations(replay):
        if is_inside(found.layer):
            operands = f"numbers up to {found.largest_input:.5g}"
            shown = f"; {found.operation} in it returns {found.value} for {operands}"
            yield "it overflows inside", shown

    # Inputs that are rounded.
    of_inputs = origin.input_error or 0.0
    if of_inputs > thresholds.MOST * (origin.new_error or 0.0):
        shown = f"; in float32 on rounded inputs by {percent(of_inputs)}"
        yield f"{name} rounds its inputs too much", shown

    # An operation that loses its result.
    operation = soundness.worst_lossy_operation(replay, is_inside)
    if operation:
        yield f"it {lossy(operation)}", "; nothing in it is NaN or Inf"

    # Results that are rounded to 0.
    underflows = replay.overflow.underflows if replay.overflow else {}
    underflow = max((share for layer, share in underflows.items() if is_inside(layer)), default=0.0)
    if underflow > thresholds.MOST:
        results = "what an operation in it, or a cast, returns"
        yield "it underflows", f"; {name} rounds {underflow:.0%} of {results} to 0"
