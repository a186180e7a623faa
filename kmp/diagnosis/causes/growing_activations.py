"""Activations that grow from layer to layer."""

import math
from dataclasses import dataclass

from kmp.diagnosis import thresholds
from kmp.diagnosis.cause import Cause
from kmp.diagnosis.observations import Observations
from kmp.diagnosis.wording import failed_steps
from kmp.records import Replay


@dataclass(frozen=True, kw_only=True)
class GrowingActivations(Cause):
    """Activations that grow from layer to layer, in float32 too, beyond what trains.

    Where few layers in float32 make a pass finite, that is the cure of an overflow.

    Args:
        replay: The replay that shows it.
        largest: The largest magnitude of the outputs in float32.
        largest_input: The largest input, or 1 if that is larger.
        layers: The number of layers that have made the largest magnitude larger.
        factor: The factor of these layers, on average.
        is_from_start: Whether no step has changed the weights.
    """

    replay: Replay
    largest: float
    largest_input: float
    layers: int
    factor: float
    is_from_start: bool

    @classmethod
    def of(cls, run: Observations) -> "GrowingActivations | None":
        """Returns the cause if the run has it."""
        replay = run.passes.forward
        magnitudes = [*replay.overflow.magnitudes.values()] if replay and replay.overflow else []
        if replay is None or not magnitudes or replay.float32_layers:
            return None
        largest_input = max(1.0, replay.batch.largest_input)
        # Outputs that are not finite in float32 may have no finite value.
        largest = magnitudes[-1] if replay.is_finite_in_float32 else max(magnitudes)
        if largest <= thresholds.GROWN_OUTPUTS * largest_input:
            return None
        factors, reached = list[float](), largest_input
        for magnitude in magnitudes:
            if magnitude > reached:
                factors.append(magnitude / reached)
                reached = magnitude
        growth = math.log(reached / largest_input)
        if math.log(max(factors)) > thresholds.MOST * growth:
            return None
        return cls(
            run=run,
            name="exploding",
            replay=replay,
            largest=largest,
            largest_input=largest_input,
            layers=len(factors),
            factor=math.exp(growth / len(factors)),
            is_from_start=run.skipped.are_all,
        )

    @property
    def title(self) -> str:
        largest = f"{self.largest:.2g} in float32 too"
        return f"The activations grow from layer to layer, and reach {largest}."

    @property
    def evidence(self) -> str:
        found, first, loss = next(iter(self.replay.operations), None), "", ""
        if found:
            where = self.run.model.describe(found.layer)
            first = f"; {found.operation} in {where} is the first to return {found.value}"
        if self.replay.float32_loss is not None:
            loss = f", and the loss is {self.replay.float32_loss:.4g}"
        return (
            f"{failed_steps(self.run)}{first}; replayed in float32, {self.layers} layers enlarge"
            f" inputs up to {self.largest_input:.3g}, by {self.factor:.2g} times on average{loss}"
        )

    @property
    def note(self) -> str:
        also = ""
        if not self.is_from_start:
            also = ", or a smaller learning rate, if updates have made the weights so large"
        return (
            f"a smaller scale of the initializers, or a normalization in each block{also}: another"
            " number format does not cure it; not tried"
        )
