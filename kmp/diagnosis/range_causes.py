"""Causes of NaN and Inf in gradients of formats with float32's range, which need no loss scale."""

from dataclasses import dataclass

from kmp.diagnosis import edits, forward_causes
from kmp.diagnosis.cause import FLOAT32_RANGE, Cause, SetArguments, Stage
from kmp.diagnosis.forward_causes import NonfiniteForward
from kmp.diagnosis.run_metrics import RunMetrics
from kmp.diagnosis.scale_causes import (
    hidden_in_forward,
    infinite_slope,
    layer_of_backward,
    severity_of_overflows,
)
from kmp.records import Replay
from kmp.records.replay import NonfiniteOperation
from kmp.utils.float_formats import BFLOAT16


@dataclass(frozen=True, kw_only=True)
class NeedlessScale(Cause):
    """A loss scale at which gradients overflow, in a format that needs none."""

    formats = FLOAT32_RANGE
    stage = Stage.SCALE_RULE

    @classmethod
    def of(cls, run: RunMetrics) -> "NeedlessScale | None":
        """Returns the cause if the run has it."""
        if run.is_rare(run.gradient_overflows) or not run.scale > 1.0:
            return None
        if run.backward_replay and not run.backward_replay.is_finite_in_float32:
            return None
        change = SetArguments(run.settings_call, {"loss_scale": "1.0"})
        return cls(name="scale_too_large", location="loss_scale", edits=(change,))


@dataclass(frozen=True, kw_only=True)
class NonfiniteBackward(Cause):
    """A backward pass that rounding to bfloat16 makes NaN or Inf, and float32 does not.

    Args:
        replay: The replay that shows it.
        operation: The first operation of the backward pass with NaN or Inf, if it is known.
        is_division: Whether it divides by a number that is 0 in bfloat16.
        constant: The scalar operand that bfloat16 rounded to that 0; `None` if it is not known.
    """

    formats = (BFLOAT16,)
    stage = Stage.BACKWARD
    cured_by_float32 = True

    replay: Replay
    operation: NonfiniteOperation | None
    is_division: bool
    constant: float | None


def nonfinite_backward(run: RunMetrics) -> NonfiniteBackward | NonfiniteForward | None:
    """Returns the cause if gradients are NaN or Inf in bfloat16 alone, whose loss is finite.

    A logarithm of 0 or a division by 0, whose Inf the loss does not show but the gradients do, is
    one of the forward pass.
    """
    replay = run.backward_replay
    if run.format is not BFLOAT16 or not run.gradient_overflows or replay is None:
        return None
    if not replay.is_finite_in_float32:
        return None
    hidden = hidden_in_forward(run, replay)
    if hidden:
        return forward_causes.explained(run, hidden, replay)
    slope, constant = infinite_slope(run, replay)
    first = next((each for each in replay.operations if each.is_backward), None)
    operation = slope or first
    layer = slope.layer if slope else layer_of_backward(replay)
    origin, _ = run.main_overflow_origin
    return NonfiniteBackward(
        name="backward_overflow",
        severity=severity_of_overflows(run),
        location=layer or (first.layer if first else origin),
        edits=edits.replayed(run, replay),
        replay=replay,
        operation=operation,
        is_division=slope is not None,
        constant=constant,
    )


@dataclass(frozen=True, kw_only=True)
class UnexplainedGradients(Cause):
    """Gradients of a finite loss that are NaN or Inf, and that no replay shows.

    Args:
        origin: The path of the variable in which most of them originated; may be empty.
        origin_share: The share of the steps in which they did.
    """

    formats = FLOAT32_RANGE
    stage = Stage.BACKWARD

    origin: str
    origin_share: float

    @classmethod
    def of(cls, run: RunMetrics) -> "UnexplainedGradients | None":
        """Returns the cause if the run has it."""
        replay = run.backward_replay
        if not run.gradient_overflows or (replay and not replay.is_finite_in_float32):
            return None
        if replay and run.format is BFLOAT16:  # which has made them so
            return None
        origin, share = run.main_overflow_origin
        return cls(
            name="backward_overflow",
            severity=severity_of_overflows(run),
            location=origin,
            origin=origin,
            origin_share=share,
        )
