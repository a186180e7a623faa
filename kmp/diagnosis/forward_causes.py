"""Causes of a forward pass or a loss that is not finite."""

from dataclasses import dataclass
from typing import NamedTuple

from kmp.diagnosis import edits, precision_causes, soundness
from kmp.diagnosis.batch_causes import NonfiniteData, invalid_targets
from kmp.diagnosis.cause import SIXTEEN_BITS, WARNING, Cause, Stage
from kmp.diagnosis.run_metrics import RunMetrics
from kmp.records import Replay
from kmp.records.replay import LOSS_FUNCTION, NonfiniteOperation
from kmp.utils.float_formats import FLOAT16, FORMATS_16_BIT

DIVISIONS = ("RealDiv", "Rsqrt", "Reciprocal", "Inv", "Div", "Xdivy", "Pow")
LOGARITHMS = ("Log", "Log1p", "Xlogy", "Xlog1py")
_OF_POSITIVE_NUMBERS = (*LOGARITHMS, "Sqrt", "Rsqrt", "Pow")


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
class HiddenNonfinite(Cause):
    """A forward pass that is NaN or Inf operation by operation, but not compiled.

    Args:
        eager: What it is as `model(x)` runs it.
    """

    formats = SIXTEEN_BITS

    eager: NonfiniteForward


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
class LossInFloat16(Cause):
    """A loss in float16 that is not finite, and that no replay shows."""

    formats = (FLOAT16,)
    stage = Stage.FORWARD
    cured_by_float32 = True


@dataclass(frozen=True, kw_only=True)
class NonfiniteLossFunction(Cause):
    """A loss function that returns NaN or Inf for finite outputs."""

    stage = Stage.FORWARD


@dataclass(frozen=True, kw_only=True)
class UnexplainedLoss(Cause):
    """Losses with NaN or Inf that no replay shows."""

    stage = Stage.FORWARD


Forward = (
    NonfiniteForward | NonfiniteInFloat32 | LossInFloat16 | NonfiniteLossFunction | UnexplainedLoss
)


def nonfinite_forward(run: RunMetrics) -> Forward | None:
    """Returns the cause if a forward pass or a loss is NaN or Inf."""
    replay = run.forward_replay
    if not _has_failed(run, replay) or _is_explained_by_batch(run):
        return None
    # The compiled step may fold constants that are finite one by one. What the eager one showed is
    # a cause in the outputs.
    if replay is None and precision_causes.WrongOutputs.of(run):
        return None
    if replay is None or _is_finite_forward(replay):
        return _not_replayed(run)
    if not replay.is_finite_in_float32:
        return _nonfinite_in_float32(run, replay)
    found = _first_nonfinite(replay)
    if found:
        return explained(run, found, replay)
    return _not_replayed(run) if run.nonfinite_losses else None


def _is_finite_forward(replay: Replay) -> bool:
    """Whether what was replayed without the loss was finite: the loss was not."""
    is_without_loss = replay.is_forward_only or replay.loop is not None
    return is_without_loss and replay.is_finite


def _has_failed(run: RunMetrics, replay: Replay | None) -> bool:
    """Whether the forward pass of a step failed.

    If all losses were finite, the skipped steps at the start are those of a scale that falls.
    """
    if run.nonfinite_losses:
        return True
    return replay is not None and run.gradient_overflows > run.startup_overflows[0]


def _is_explained_by_batch(run: RunMetrics) -> bool:
    return NonfiniteData.of(run) is not None or invalid_targets(run) is not None


def hidden_nonfinite(run: RunMetrics) -> HiddenNonfinite | None:
    """Returns the cause if compiling hides a NaN or Inf."""
    replay = run.replays[-1] if run.replays else None
    is_hidden = bool(replay and replay.overflow and replay.overflow.is_finite_compiled)
    if replay is None or not is_hidden or run.run.last("overflow_count") != 0:
        return None
    found = _first_nonfinite(replay)
    if found is None or found.layer == LOSS_FUNCTION:  # the loss was not compiled
        return None
    eager = explained(run, found, replay)
    return HiddenNonfinite(
        name="uncompiled",
        severity=WARNING,
        location=eager.location,
        edits=eager.edits,
        eager=eager,
    )


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
    if is_nan_of_negative and found.operation in _OF_POSITIVE_NUMBERS:
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


def _nonfinite_in_float32(run: RunMetrics, replay: Replay) -> NonfiniteInFloat32:
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
    first = replay.operations[0] if replay.operations else None
    location = first.layer if first else ""
    return NonfiniteInFloat32(name="loss", location=location, variables=[], operation=first)


def _not_replayed(run: RunMetrics) -> LossInFloat16 | NonfiniteLossFunction | UnexplainedLoss:
    """Returns what is known of non-finite losses without a replay that shows them."""
    if run.run.last("loss_dtype") == FLOAT16.name:
        change = edits.in_float32(run, run.settings.get("output_layers", []))
        return LossInFloat16(name="loss_overflow", location=LOSS_FUNCTION, edits=change)
    if run.forward_replay and _is_finite_forward(run.forward_replay):
        return NonfiniteLossFunction(name="loss", location=LOSS_FUNCTION)
    return UnexplainedLoss(name="loss")
