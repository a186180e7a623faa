"""Causes of overflows in the backward pass, and in the settings of the loss scale."""

import math
from dataclasses import dataclass

from kmp.diagnosis import edits, forward_causes, soundness, thresholds
from kmp.diagnosis.cause import (
    ERROR,
    INFO,
    LOSS_SCALES,
    WARNING,
    Cause,
    SetArguments,
    Stage,
)
from kmp.diagnosis.forward_causes import DIVISIONS, LOGARITHMS, NonfiniteForward, RoundedBefore
from kmp.diagnosis.run_metrics import RunMetrics
from kmp.records import Replay
from kmp.records.replay import LOSS_FUNCTION, NonfiniteOperation
from kmp.utils.float_formats import FLOAT16

# Operations of the backward pass: the slopes of roots and reciprocals, infinite at 0.
SLOPES = ("SqrtGrad", "RsqrtGrad", "ReciprocalGrad", "InvGrad")


@dataclass(frozen=True, kw_only=True)
class NonfiniteGradients(Cause):
    """Gradients of a finite loss that are NaN or Inf in float32 too: no loss scale helps.

    Args:
        operation: The first operation of the backward pass with NaN or Inf, if it is known.
        origin: The path of the variable in which most overflows originated; may be empty.
    """

    operation: NonfiniteOperation | None
    origin: str

    @property
    def is_slope(self) -> bool:
        """Whether the operation is the slope of a root, which is infinite at 0."""
        return self.operation is not None and self.operation.operation in SLOPES

    @classmethod
    def of(cls, run: RunMetrics) -> "NonfiniteGradients | RoundedBefore | None":
        """Returns the cause if the run has it, or the constants that make gradients so."""
        replay = run.backward_replay
        if not run.gradient_overflows or replay is None or replay.is_finite_in_float32:
            return None
        if rounded := RoundedBefore.of(replay, severity_of_overflows(run)):
            return rounded
        operation = next((each for each in replay.operations if each.is_backward), None)
        origin, _ = run.main_overflow_origin
        return cls(
            name="backward_overflow",
            severity=severity_of_overflows(run),
            location=operation.layer if operation else origin,
            operation=operation,
            origin=origin,
        )


def severity_of_overflows(run: RunMetrics) -> str:
    """Returns a warning if few steps overflow in the backward pass: the others train."""
    is_rare = run.is_rare(run.gradient_overflows)
    return WARNING if is_rare and not run.is_stuck else ERROR


@dataclass(frozen=True, kw_only=True)
class BackwardOverflow(Cause):
    """Overflows of the backward pass that a smaller loss scale does not avoid.

    Args:
        replay: The replay that shows it; `None` without one.
        origin: The path of the variable in which most overflows originated.
        origin_share: The share of these overflows.
        lowest_scale: The lowest loss scale that overflowed; `None` if that is not known, because
            the run goes on at a lower one.
        is_in_layer: Whether the location is the layer whose backward pass overflows.
        slope: The operation of the backward pass that divides by a number that is 0 in float16;
            `None` if the magnitudes overflow.
        constant: The scalar operand that float16 rounded to that 0; `None` if it is not known.
        is_of_own_loss: Whether the loss is computed outside of all replays, so that nothing tells
            where the backward pass overflows: the gradients may come from there.
    """

    formats = LOSS_SCALES
    stage = Stage.BACKWARD
    cured_by_float32 = True

    replay: Replay | None
    origin: str
    origin_share: float
    lowest_scale: float | None
    is_in_layer: bool
    slope: NonfiniteOperation | None = None
    constant: float | None = None
    is_of_own_loss: bool = False


def backward_overflow(run: RunMetrics) -> BackwardOverflow | NonfiniteForward | None:
    """Returns the cause if the backward pass overflows at every loss scale.

    A logarithm of 0 or a division by 0, whose Inf the loss does not show but the gradients do, is
    one of the forward pass.
    """
    (origin, share), replay = run.main_overflow_origin, run.backward_replay
    if not origin or not _overflows_at_every_scale(run):
        return None
    operation = hidden_in_forward(run, replay) if replay else None
    if replay and operation:
        return forward_causes.explained(run, operation, replay)
    slope, constant = infinite_slope(run, replay) if replay else (None, None)
    layer = layer_of_backward(replay) if replay else ""
    if slope:
        layer = slope.layer
    is_of_own_loss = replay is None and run.has_own_loss
    return BackwardOverflow(
        name="backward_overflow",
        location="" if is_of_own_loss else layer or origin,
        edits=edits.replayed(run, replay) if replay else (),
        replay=replay,
        origin=origin,
        origin_share=share,
        lowest_scale=_lowest_scale(run),
        is_in_layer=bool(layer),
        slope=slope,
        constant=constant,
        is_of_own_loss=is_of_own_loss,
    )


def _lowest_scale(run: RunMetrics) -> float | None:
    """Returns the lowest loss scale that overflowed; `None` if the run goes on at a lower one."""
    if run.is_fixed:
        return run.scale
    if not run.is_stuck:
        return None
    if run.scale <= run.min_scale:
        return run.scale
    # The scale of the next step has not been tried.
    return run.scale / _factors(run)[1]


def infinite_slope(
    run: RunMetrics, replay: Replay
) -> tuple[NonfiniteOperation | None, float | None]:
    """Returns the operation of the backward pass that divides by 0, and the constant that was lost.

    The slope of a root is such a division.
    """
    for found in replay.operations:
        if not found.is_backward or found.value != "inf":
            continue
        lost = forward_causes.lost_constants(run, replay, found.layer)
        small = [value for value in lost if abs(value) < 1.0]
        is_slope = found.operation in SLOPES
        is_division = found.operation in DIVISIONS and found.smallest_input == 0.0
        if is_division or (is_slope and small):
            return found, small[0] if small else None
    return None, None


def hidden_in_forward(run: RunMetrics, replay: Replay) -> NonfiniteOperation | None:
    """Returns the logarithm of 0, or the division by 0, whose Inf only the gradients show."""
    needed = {*replay.float32_layers, LOSS_FUNCTION, run.settings.model}
    for found in replay.operations:
        if found.is_backward or found.layer not in needed:
            continue
        is_division_by_zero = found.operation in DIVISIONS and found.smallest_input == 0.0
        if found.operation in LOGARITHMS or is_division_by_zero:
            return found
    return None


def layer_of_backward(replay: Replay) -> str:
    """Returns the layer whose backward pass overflows; empty if it is not known.

    The backward pass of a loss that a layer adds runs outside of the layers, or in another one.
    """
    if not replay.gradients.of_activations:
        return ""
    layers = [found.layer for found in replay.operations if found.is_backward]
    needed = [layer for layer in layers if layer in replay.float32_layers]
    if needed:
        return needed[0]
    return (replay.float32_layers or layers)[0] if layers else ""


def _overflows_at_every_scale(run: RunMetrics) -> bool:
    """Whether gradients overflow for another reason than a loss scale that is too large."""
    suitable = _suitable_scale(run)
    if run.nonfinite_losses >= run.gradient_overflows:
        return False
    if suitable is not None and suitable < run.scale:
        return False  # a fixed scale that is too large, or a dynamic one that still falls
    are_many = run.gradient_overflows > max(1, thresholds.MANY_SKIPPED * run.steps)
    if run.is_fixed:
        return are_many and run.headroom >= thresholds.SPARE_BITS
    is_at_minimum = run.scale <= run.min_scale * 2.0**thresholds.SPARE_BITS
    if run.is_stuck or _flushes_branch(run) or _flushes_at_low_scale(run):
        return True
    return are_many and is_at_minimum


def _flushes_branch(run: RunMetrics) -> bool:
    """Whether overflows have driven the scale below the one that a branch of the model needs."""
    search = run.backward_replay.search if run.backward_replay else None
    return search is not None and run.scale < (search.loss_scale or 0.0)


def _flushes_at_low_scale(run: RunMetrics) -> bool:
    """Whether overflows have driven the scale so low that other gradients are lost."""
    if run.scale >= 1.0:
        return False
    is_subnormal = run.subnormal_share > thresholds.SUBNORMAL_AT_LOW_SCALE
    has_fallen = run.startup_overflows[0] > 0
    return bool(run.unexplained_zero_variables) or (is_subnormal and has_fallen)


def _suitable_scale(run: RunMetrics) -> float | None:
    """Returns the scale at which replayed gradients are finite without a change of layers.

    `None` if it is unknown.
    """
    replay = run.backward_replay
    if replay is None or not replay.is_finite_in_float32:
        return None
    if not soundness.needs_another_scale_only(replay):
        return None
    return replay.gradients.usable_scale or 0.0


@dataclass(frozen=True, kw_only=True)
class FixedScaleTooLarge(Cause):
    """A fixed loss scale that overflows.

    Args:
        origin: The path of the variable in which most overflows originated; may be empty.
        origin_share: The share of these overflows.
        highest: log2 of a fixed scale that would do; `None` if it is not known.
    """

    formats = LOSS_SCALES
    stage = Stage.MAGNITUDES

    origin: str
    origin_share: float
    highest: int | None

    @classmethod
    def of(cls, run: RunMetrics) -> "FixedScaleTooLarge | None":
        """Returns the cause if the run has it."""
        if not run.is_fixed or run.is_rare(run.gradient_overflows):
            return None
        (origin, share), highest = run.main_overflow_origin, None
        if run.curve and run.curve.recommended:
            highest = run.curve.recommended[1]
        if highest is not None and highest >= math.log2(run.scale):
            highest = None
        return cls(
            name="scale_too_large",
            location="loss_scale",
            edits=(SetArguments(run.settings_call, {"loss_scale": "'dynamic'"}),),
            origin=origin,
            origin_share=share,
            highest=highest,
        )


@dataclass(frozen=True, kw_only=True)
class MinScaleTooLarge(Cause):
    """A minimum of a dynamic loss scale at which gradients still overflow.

    Args:
        suitable: The loss scale at which a replayed batch has finite gradients.
    """

    formats = LOSS_SCALES
    stage = Stage.MAGNITUDES

    suitable: float

    @classmethod
    def of(cls, run: RunMetrics) -> "MinScaleTooLarge | None":
        """Returns the cause if the run has it."""
        suitable = _suitable_scale(run)
        if run.is_fixed or not suitable or suitable >= run.min_scale:
            return None
        are_many = run.gradient_overflows > thresholds.MANY_SKIPPED * run.steps
        if not run.is_stuck and not (are_many and run.scale <= run.min_scale):
            return None
        # A minimum needs a margin, because the gradients of other batches are larger. If no step
        # was applied, a run needs a lower start too.
        exponent = math.log2(suitable) - thresholds.SPARE_BITS
        lowest = min(math.log2(FLOAT16.smallest_normal), exponent)
        arguments = {"min_scale": edits.power(lowest)}
        if run.overflows == run.steps:
            arguments["initial_scale"] = edits.power(math.log2(suitable))
        return cls(
            name="scale_too_large",
            location="min_scale",
            edits=(SetArguments(run.settings_call, arguments),),
            suitable=suitable,
        )


@dataclass(frozen=True, kw_only=True)
class HysteresisTooLarge(Cause):
    """A hysteresis that keeps a scale which overflows again and again.

    Args:
        hysteresis: The setting.
    """

    formats = LOSS_SCALES
    stage = Stage.SCALE_RULE

    hysteresis: int

    @classmethod
    def of(cls, run: RunMetrics) -> "HysteresisTooLarge | None":
        """Returns the cause if the run has it."""
        value = run.settings.hysteresis
        if run.is_fixed or not run.is_stuck or run.nonfinite_losses:
            return None
        replay = run.backward_replay
        if replay and not soundness.needs_another_scale_only(replay):
            return None
        if value <= thresholds.STUCK_AFTER or run.consecutive_overflows >= value:
            return None
        return cls(
            name="hysteresis_too_large",
            location="hysteresis",
            edits=(SetArguments(run.settings_call, {"hysteresis": "1"}),),
            hysteresis=value,
        )


@dataclass(frozen=True, kw_only=True)
class InitialScaleTooLarge(Cause):
    """An initial scale that skipped the first steps.

    Args:
        initial: The setting.
        skipped: The number of steps that were skipped at the start.
        first_steps: The number of steps in which that was.
        stable: The scale that the steps led to, or at which a replayed batch is finite.
        is_replayed: Whether it is the one of a replay, because all steps were skipped.
    """

    formats = LOSS_SCALES

    initial: float
    skipped: int
    first_steps: int
    stable: float
    is_replayed: bool = False

    @classmethod
    def of(cls, run: RunMetrics) -> "InitialScaleTooLarge | None":
        """Returns the cause if the run has it."""
        initial = run.settings.initial_scale
        if run.is_fixed or initial is None:
            return None
        skipped, first_steps, stable = run.startup_overflows
        has_never_updated = run.consecutive_overflows == run.overflows == run.steps
        suitable = _suitable_scale(run)
        is_replayed = has_never_updated and not run.nonfinite_losses and bool(suitable)
        if is_replayed and suitable:
            skipped, first_steps, stable = run.steps, run.steps, suitable
        has_only_decreased = stable <= _lowest_after(run, initial, skipped)
        if skipped <= thresholds.SKIPPED_AT_START:
            return None
        if not (has_never_updated or has_only_decreased):
            return None
        change = {"initial_scale": edits.power(math.log2(stable))}
        return cls(
            name="initial_scale",
            severity=ERROR if has_never_updated else _severity_of_slow_start(run, skipped),
            location="initial_scale",
            edits=(SetArguments(run.settings_call, change),),
            initial=initial,
            skipped=skipped,
            first_steps=first_steps,
            stable=stable,
            is_replayed=is_replayed,
        )


def _lowest_after(run: RunMetrics, initial: float, skipped: int) -> float:
    """Returns the scale after that many overflows, and a growth at most."""
    backoff = run.settings.backoff_factor
    return initial * backoff**skipped * run.settings.growth_factor


def _severity_of_slow_start(run: RunMetrics, skipped: int) -> str:
    limit = max(thresholds.SLOW_START, thresholds.MOST_SKIPPED * run.steps)
    return WARNING if skipped > limit else INFO


@dataclass(frozen=True, kw_only=True)
class GrowthTooFast(Cause):
    """A scale that grows so often, or backs off so slowly, that it keeps overflowing.

    Args:
        overflows: The steps that overflowed after the scale had stabilized.
        growth_factor: The setting.
        growth_interval: The setting.
        steps_to_undo: The number of steps that are skipped after each growth.
        arguments: The arguments to change.
    """

    formats = LOSS_SCALES

    overflows: int
    growth_factor: float
    growth_interval: int
    steps_to_undo: float
    arguments: list[str]

    @classmethod
    def of(cls, run: RunMetrics) -> "GrowthTooFast | None":
        """Returns the cause if the run has it."""
        interval = run.settings.growth_interval
        if run.is_fixed or interval is None:
            return None
        growth, backoff = _factors(run)
        patience = run.settings.hysteresis
        to_undo = -math.log2(growth) / math.log2(backoff) * patience
        if to_undo < interval / thresholds.SMALL_GROWTH_INTERVAL:
            return None
        # Not even one step was applied, or a longer streak than these settings cause.
        longest = max(thresholds.STUCK_AFTER, 2 * to_undo)
        if run.consecutive_overflows >= min(run.steps, longest):
            return None
        after_startup = run.gradient_overflows - run.startup_overflows[0]
        if after_startup <= max(1, thresholds.SKIPPED_BY_GROWTH * run.steps):
            return None
        arguments = {}
        if interval <= thresholds.SMALL_GROWTH_INTERVAL:
            arguments["growth_interval"] = "2000"
        if growth > 2.0:
            arguments["growth_factor"] = "2.0"
        if backoff > 0.5:
            arguments["backoff_factor"] = "0.5"
        if patience > 1:
            arguments["hysteresis"] = "1"
        # In so few steps the scale has not grown, but falls to the one that suits it.
        if [*arguments] == ["growth_interval"] and run.last_step <= interval:
            return None
        return cls(
            name="growth_interval_too_small",
            severity=WARNING,
            location=next(iter(arguments)),
            edits=(SetArguments(run.settings_call, arguments),),
            overflows=after_startup,
            growth_factor=growth,
            growth_interval=interval,
            steps_to_undo=to_undo,
            arguments=list(arguments),
        )


def _factors(run: RunMetrics) -> tuple[float, float]:
    """Returns `growth_factor` and `backoff_factor`."""
    return run.settings.growth_factor, run.settings.backoff_factor
