"""Causes of a forward pass or a loss that is not finite."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from kmp.diagnosis import edits, precision_causes, soundness, thresholds
from kmp.diagnosis.batch_causes import NonfiniteData, invalid_targets
from kmp.diagnosis.cause import ERROR, SIXTEEN_BITS, Cause, Stage
from kmp.diagnosis.run_metrics import RunMetrics
from kmp.records import Replay
from kmp.records.replay import LOSS_FUNCTION, NonfiniteOperation, RoundedConstants
from kmp.records.step_facts import CodeLine
from kmp.utils.float_formats import FLOAT16, FORMATS_16_BIT

DIVISIONS = ("RealDiv", "Rsqrt", "Reciprocal", "Inv", "Div", "Xdivy", "Pow")
LOGARITHMS = ("Log", "Log1p", "Xlogy", "Xlog1py")
OF_POSITIVE_NUMBERS = (*LOGARITHMS, "Sqrt", "Rsqrt", "Pow")


@dataclass(frozen=True, kw_only=True)
class NonfiniteForward(Cause):
    """An operation of the forward pass that 16 bits make NaN or Inf.

    Its name is `"constant"`, `"rounding"`, `"forward_underflow"`, `"forward_overflow"` or
    `"loss_overflow"`.

    Args:
        operation: The operation.
        constant: The scalar operand that the format makes infinite, or that it rounds to a divisor
            of 0; `None` if it is not known.
        is_division: Whether the operation divides by 0.
        replay: The replay that shows it.
    """

    formats = SIXTEEN_BITS
    stage = Stage.FORWARD
    cured_by_float32 = True

    operation: NonfiniteOperation
    constant: float | None
    is_division: bool
    replay: Replay


@dataclass(frozen=True, kw_only=True)
class NonfiniteCompiled(Cause):
    """A forward pass that is NaN or Inf as the training step is compiled, and only so.

    Args:
        replay: The replay that shows it.
    """

    formats = SIXTEEN_BITS
    stage = Stage.FORWARD
    cured_by_float32 = True

    replay: Replay


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

    stage = Stage.FORWARD

    replay: Replay
    largest: float
    largest_input: float
    layers: int
    factor: float
    is_from_start: bool

    @classmethod
    def of(cls, run: RunMetrics) -> "GrowingActivations | None":
        """Returns the cause if the run has it."""
        replay = run.forward_replay
        magnitudes = [*replay.overflow.magnitudes.values()] if replay and replay.overflow else []
        if replay is None or not magnitudes or replay.float32_layers:
            return None
        if replay.batch.nonfinite_variables or replay.rounded:
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
        if math.log(max(factors)) > thresholds.GROWN_IN_ONE_LAYER * growth:
            return None
        return cls(
            name="exploding",
            replay=replay,
            largest=largest,
            largest_input=largest_input,
            layers=len(factors),
            factor=math.exp(growth / len(factors)),
            is_from_start=run.has_never_updated,
        )


@dataclass(frozen=True, kw_only=True)
class NonfiniteInFloat32(Cause):
    """A loss that float32 does not make finite either.

    Args:
        variables: The variables with NaN or Inf.
        operation: The first operation with NaN or Inf, if there are no such variables.
        is_from_start: Whether the variables had NaN or Inf before the first update.
    """

    stage = Stage.FORWARD

    variables: list[str]
    operation: NonfiniteOperation | None
    is_from_start: bool = False


@dataclass(frozen=True, kw_only=True)
class RoundedBefore(Cause):
    """Constants that were made in 16 bits outside of the step, so that float32 loses them too.

    Args:
        rounded: The constants, and the operation that they make NaN or Inf.
    """

    stage = Stage.FORWARD

    rounded: RoundedConstants

    @classmethod
    def of(cls, replay: Replay, severity: str = ERROR) -> "RoundedBefore | None":
        """Returns the cause if a replay that is not finite in float32 shows it."""
        if replay.rounded is None:
            return None
        operation = replay.rounded.operation
        return cls(
            name="constant",
            severity=severity,
            location=operation.layer if operation else "",
            rounded=replay.rounded,
        )


@dataclass(frozen=True, kw_only=True)
class LossInFloat16(Cause):
    """A loss in float16 that is not finite, and that no replay shows.

    Args:
        operations: What computes it in float16 from the outputs of layers, the steepest first;
            empty if that is not known.
    """

    formats = (FLOAT16,)
    stage = Stage.FORWARD
    cured_by_float32 = True

    operations: list[CodeLine]


@dataclass(frozen=True, kw_only=True)
class NonfiniteLossFunction(Cause):
    """A loss function that returns NaN or Inf for finite outputs."""

    stage = Stage.FORWARD


@dataclass(frozen=True, kw_only=True)
class UnexplainedLoss(Cause):
    """Losses with NaN or Inf that no replay shows."""

    stage = Stage.FORWARD


Forward = (
    NonfiniteForward
    | NonfiniteCompiled
    | NonfiniteInFloat32
    | RoundedBefore
    | LossInFloat16
    | NonfiniteLossFunction
    | UnexplainedLoss
)


def nonfinite_forward(run: RunMetrics) -> Forward | None:
    """Returns the cause if a forward pass or a loss is NaN or Inf."""
    replay = run.forward_replay
    if not _has_failed(run, replay) or _is_explained_by_batch(run):
        return None
    # The program that trains may fold constants that are finite one by one. What the graph
    # without optimizations shows is a cause in the outputs.
    if replay is None and precision_causes.WrongOutputs.of(run):
        return None
    if replay is None or _is_finite_forward(replay):
        return _not_replayed(run)
    if not replay.is_finite_in_float32:
        return _nonfinite_in_float32(run, replay)
    found = _first_nonfinite(replay)
    if found:
        return explained(run, found, replay)
    return _only_compiled(run, replay) or (_not_replayed(run) if run.nonfinite_losses else None)


def _only_compiled(run: RunMetrics, replay: Replay) -> NonfiniteCompiled | None:
    """Returns the cause if the outputs are not finite as the step is compiled."""
    if not (replay.float32_layers and replay.overflow and replay.overflow.outputs):
        return None
    return NonfiniteCompiled(
        name="forward_overflow",
        location=replay.float32_layers[0],
        edits=edits.replayed(run, replay),
        replay=replay,
    )


def _is_finite_forward(replay: Replay) -> bool:
    """Whether what was replayed without the loss was finite: the loss was not."""
    return replay.is_forward_only and replay.is_finite


def _has_failed(run: RunMetrics, replay: Replay | None) -> bool:
    """Whether the forward pass of a step failed.

    If all losses were finite, the skipped steps at the start are those of a scale that falls.
    """
    if run.nonfinite_losses:
        return True
    return replay is not None and run.gradient_overflows > run.startup_overflows[0]


def _is_explained_by_batch(run: RunMetrics) -> bool:
    return NonfiniteData.of(run) is not None or invalid_targets(run) is not None


def _first_nonfinite(replay: Replay) -> NonfiniteOperation | None:
    """Returns the first NaN or Inf of the forward pass, preferably of the loss or of the cure."""
    first = next(iter(soundness.forward_operations(replay)), None)
    return soundness.overflow_inside(replay) or first


def explained(run: RunMetrics, found: NonfiniteOperation, replay: Replay) -> NonfiniteForward:
    """Returns the cause of an operation of the forward pass that 16 bits make NaN or Inf."""
    kind = _kind_by_constant(run, found, replay) or _Kind(_name(found, replay))
    return NonfiniteForward(
        name=kind.name,
        location=found.layer,
        edits=edits.replayed(run, replay),
        operation=found,
        constant=kind.constant,
        is_division=kind.is_division,
        replay=replay,
    )


class _Kind(NamedTuple):
    name: str
    constant: float | None = None
    is_division: bool = False


def _kind_by_constant(run: RunMetrics, found: NonfiniteOperation, replay: Replay) -> _Kind | None:
    """Returns the kind if the format makes a constant, or a divisor, infinite or zero."""
    if is_cast_of_constant(found):
        return _Kind("constant", found.constant)
    constants = lost_constants(run, replay, found.layer)
    return _kind_by_infinity(found, constants) or _kind_by_zero_divisor(found, constants)


def lost_constants(run: RunMetrics, replay: Replay, layer: str) -> list[float]:
    """Returns the scalars among the operands of a layer that are 0 or infinite in the format."""
    recorded = replay.overflow.lost_constants if replay.overflow else {}  # in any 16-bit format
    smallest, largest = 2.0**run.format.flush_exponent, run.format.max
    constants = recorded.get(layer, [])
    return [each for each in constants if abs(each) <= smallest or abs(each) > largest]


def _kind_by_infinity(found: NonfiniteOperation, constants: list[float]) -> _Kind | None:
    large = next((value for value in constants if abs(value) > 1.0), None)
    is_nan_of_large = found.value == "nan" and large is not None
    if found.has_infinite_constant or is_nan_of_large:
        return _Kind("constant", large)
    return None


def _kind_by_zero_divisor(found: NonfiniteOperation, constants: list[float]) -> _Kind | None:
    if found.operation not in DIVISIONS or found.smallest_input != 0.0:
        return None
    small = next((value for value in constants if abs(value) < 1.0), None)
    return _Kind("constant", small, is_division=True)


def _name(found: NonfiniteOperation, replay: Replay) -> str:
    is_nan_of_negative = found.value == "nan" and found.has_negative_input
    if is_nan_of_negative and found.operation in OF_POSITIVE_NUMBERS:
        return "rounding"
    if found.operation in LOGARITHMS:
        return "forward_underflow"
    outputs = replay.overflow.outputs if replay.overflow else []
    if found.layer != LOSS_FUNCTION and found.layer in outputs:
        return "forward_overflow"
    return "loss_overflow"


def is_cast_of_constant(found: NonfiniteOperation) -> bool:
    """Whether an operation casts a constant that its dtype makes infinite."""
    if found.operation != "Cast" or found.constant is None or found.dtype not in FORMATS_16_BIT:
        return False
    return abs(found.constant) > FORMATS_16_BIT[found.dtype].max


def _nonfinite_in_float32(run: RunMetrics, replay: Replay) -> NonfiniteInFloat32 | RoundedBefore:
    variables = replay.batch.nonfinite_variables
    if variables:
        is_from_start = run.has_never_updated
        return NonfiniteInFloat32(
            name="loss",
            location=variables[0],
            edits=() if is_from_start else (edits.smaller_learning_rate(run),),
            variables=variables,
            operation=None,
            is_from_start=is_from_start,
        )
    if rounded := RoundedBefore.of(replay):
        return rounded
    first = replay.operations[0] if replay.operations else None
    location = first.layer if first else ""
    return NonfiniteInFloat32(name="loss", location=location, variables=[], operation=first)


def _not_replayed(run: RunMetrics) -> LossInFloat16 | NonfiniteLossFunction | UnexplainedLoss:
    """Returns what is known of non-finite losses without a replay that shows them."""
    operations = soundness.in_float16(run.step_facts)
    if operations or run.run.last("loss_dtype") == FLOAT16.name:
        change = edits.in_float32(run, run.settings.output_layers)
        return LossInFloat16(
            name="loss_overflow", location=LOSS_FUNCTION, edits=change, operations=operations
        )
    if run.forward_replay and _is_finite_forward(run.forward_replay):
        return NonfiniteLossFunction(name="loss", location=LOSS_FUNCTION)
    return UnexplainedLoss(name="loss")
