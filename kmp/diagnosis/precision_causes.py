"""Causes in finite passes: what 16 bits change, as a comparison with float32 measured it."""

from dataclasses import dataclass

from kmp.diagnosis import edits, soundness, thresholds
from kmp.diagnosis.cause import (
    ERROR,
    INFO,
    LOSS_SCALES,
    SIXTEEN_BITS,
    WARNING,
    Cause,
    Stage,
)
from kmp.diagnosis.run_metrics import RunMetrics
from kmp.records import Record, Replay
from kmp.records.replay import (
    LOSS_FUNCTION,
    GradientError,
    LayerError,
    StateError,
    UnscaledGradients,
)
from kmp.utils.float_formats import DTYPES_16_BIT


@dataclass(frozen=True, kw_only=True)
class UnscaledLoss(Cause):
    """Gradients that do not grow with the loss scale.

    Args:
        replay: The comparison that shows it.
        unscaled: What it shows.
        layers: The paths of the layers with these gradients, as a program creates them.
        origin: The layer whose backward pass changes them; empty if it is not known.
    """

    formats = LOSS_SCALES
    stage = Stage.LOSS_SCALING

    replay: Replay
    unscaled: UnscaledGradients
    layers: list[str]
    origin: str

    @classmethod
    def of(cls, run: RunMetrics) -> "UnscaledLoss | None":
        """Returns the cause if the run has it."""
        replay = run.last_comparison
        unscaled = replay.unscaled if replay else None
        if replay is None or unscaled is None or not unscaled.layers:
            return None
        layers = [run.created_layer(layer) for layer in unscaled.layers]
        origin, location, change = "", layers[0], edits.NONE
        if unscaled.origin and run.settings.train_step == "keras":
            origin = location = run.created_layer(unscaled.origin)
        if unscaled.change:  # it is in the training step
            location = ""
        if unscaled.change == "divided":
            change = edits.apply_unscaled("self.optimizer")
        return cls(
            name="unscaled_loss",
            location=location,
            edits=change,
            replay=replay,
            unscaled=unscaled,
            layers=layers,
            origin=origin,
        )


@dataclass(frozen=True, kw_only=True)
class WrongOutputs(Cause):
    """Outputs of the model that are not those of float32.

    Args:
        replay: The comparison that shows it.
        origin: The layer where the error begins; `None` if it is an operation between layers.
    """

    formats = SIXTEEN_BITS
    stage = Stage.OUTPUTS
    cured_by_float32 = True

    replay: Replay
    origin: LayerError | None

    @classmethod
    def of(cls, run: RunMetrics) -> "WrongOutputs | None":
        """Returns the cause if the run has it."""
        replay = run.harmful_comparison
        if replay is None:
            return None
        has_wrong_gradients = bool(soundness.harmful_gradients(replay))
        if has_wrong_gradients and soundness.needs_another_scale_only(replay):
            return None
        origin = soundness.error_origin(replay, run.format)
        if origin is not None:
            location = origin.layer
        elif _is_between_layers(run, replay):
            # An operation between layers computes in the dtype of the one before it.
            location = replay.float32_layers[-1]
        else:
            return None  # only a constant differs, or gradients that underflow made a difference
        change = edits.replayed(run, replay)
        return cls(
            name="precision_loss", location=location, edits=change, replay=replay, origin=origin
        )


def _is_between_layers(run: RunMetrics, replay: Replay) -> bool:
    is_large = (replay.output_error or 0.0) > thresholds.HARMFUL_OUTPUT_ERROR_ALONE
    return is_large and bool(replay.float32_layers) and run.needs_float32_layers


@dataclass(frozen=True, kw_only=True)
class StaleState(Cause):
    """A state, such as a moving average, whose updates 16 bits lose.

    Args:
        replay: The comparison that shows it.
        error: The error of its update.
    """

    formats = SIXTEEN_BITS
    stage = Stage.STATES
    cured_by_float32 = True

    replay: Replay
    error: StateError

    @classmethod
    def of(cls, run: RunMetrics) -> "StaleState | None":
        """Returns the cause if the run has it."""
        replay = run.harmful_comparison
        lost = soundness.lost_states(replay) if replay else []
        if replay is None or not lost:
            return None
        worst = max(lost, key=lambda each: each.error)
        kind, change = cls, edits.replayed(run, replay)
        in_16_bits = [each.path for each in lost if each.dtype in DTYPES_16_BIT]
        if worst.path in in_16_bits:
            kind, change = StaleStateIn16Bits, edits.states_in_float32(run, in_16_bits)
        location = run.layer_of(worst.path)
        return kind(
            name="precision_loss", location=location, edits=change, replay=replay, error=worst
        )


@dataclass(frozen=True, kw_only=True)
class StaleStateIn16Bits(StaleState):
    """A state whose variable is in 16 bits: layers that compute in float32 do not cure it."""

    cured_by_float32 = False


@dataclass(frozen=True, kw_only=True)
class WrongGradients(Cause):
    """Gradients of layers that are not those of float32, though the outputs agree.

    Args:
        replay: The comparison that shows it.
        error: The largest harmful error.
        layer: The path of the layer with it, as a program creates it.
        is_of_loss: Whether the loss differs too, so that the error begins there.
    """

    formats = SIXTEEN_BITS
    stage = Stage.GRADIENTS
    cured_by_float32 = True

    replay: Replay
    error: GradientError
    layer: str
    is_of_loss: bool

    @classmethod
    def of(cls, run: RunMetrics) -> "WrongGradients | None":
        """Returns the cause if the run has it."""
        last = run.harmful_comparison
        if last is None or soundness.has_few_examples(last.examples, run.format):
            return None
        if not soundness.harmful_gradients(last):
            return None
        # Late in a training that the loss misleads, the outputs may hardly vary, and differ too.
        born_in_loss = filter(soundness.is_born_in_loss, reversed(run.with_harmful_gradients))
        replay = next(born_in_loss, last)
        worst = max(soundness.harmful_gradients(replay), key=lambda each: each.error)
        layer = location = run.created_layer(worst.layer)
        is_of_loss = soundness.is_born_in_loss(replay)
        if is_of_loss:
            overflow = soundness.overflow_inside(replay)
            location = overflow.layer if overflow else LOSS_FUNCTION
        return cls(
            name="precision_loss",
            severity=ERROR if is_of_loss else WARNING,
            location=location,
            edits=edits.replayed(run, replay),
            replay=replay,
            error=worst,
            layer=layer,
            is_of_loss=is_of_loss,
        )


@dataclass(frozen=True, kw_only=True)
class Repaired(Cause):
    """Layers that were set to float32 while the training ran.

    Args:
        record: The record of the last repair.
        layers: The paths of the layers of all repairs.
    """

    record: Record
    layers: list[str]

    @classmethod
    def of(cls, run: RunMetrics) -> "Repaired | None":
        """Returns the cause if the run has it."""
        if run.fallback is None:
            return None
        layers: list[str] = []
        for row in run.complete_run.rows:
            layers += row.fallback or ()
        return cls(
            name="float32_fallback",
            severity=INFO,
            location=layers[-1],
            edits=edits.in_float32(run, layers),
            record=run.fallback,
            layers=layers,
        )
