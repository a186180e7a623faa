"""Gradients of a finite loss that are NaN or Inf in 16 bits, which no loss scale avoids."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import ClassVar

from kmp.diagnosis import changes, soundness, thresholds
from kmp.diagnosis.branch_wording import CLOSER_TERMS, tried_for_branch
from kmp.diagnosis.cause import ERROR, Cause
from kmp.diagnosis.causes.nonfinite_forward import NonfiniteForward
from kmp.diagnosis.causes.nonfinite_gradients import severity_of_overflows
from kmp.diagnosis.edits import NO_CHANGE
from kmp.diagnosis.missing_replays import how_to_find_layer
from kmp.diagnosis.observations import Observations
from kmp.diagnosis.operations import (
    divides_by_zero,
    hidden_in_forward,
    is_slope,
    lost_constants,
)
from kmp.diagnosis.wording import counted, is_zero_because, skipped_with_finite_loss
from kmp.records import Replay
from kmp.records.replay import NonfiniteOperation
from kmp.utils.float_formats import FLOAT16, FLOAT32, as_power


@dataclass(frozen=True, kw_only=True)
class BackwardOverflow(Cause):
    """Gradients of a finite loss that are NaN or Inf, which no loss scale avoids.

    Args:
        replay: The replay that shows it; `None` without one.
        layer: The layer whose backward pass returns NaN or Inf; empty if it is not known.
        operation: The operation of the backward pass that divides by a number that is 0 in 16
            bits; of bfloat16 without such a one, the first that returns NaN or Inf.
        is_division: Whether that operation divides by 0.
        constant: The scalar operand that 16 bits rounded to that 0; `None` if it is not known.
        origin: The path of the variable in which most overflows originated; may be empty.
        origin_share: The share of these overflows.
        lowest_scale: The lowest loss scale that overflowed; `None` if that is not known, because
            the run goes on at a lower one.
        is_of_own_loss: Whether the loss is computed outside of all replays, so that nothing tells
            where the backward pass overflows: the gradients may come from there.
    """

    names: ClassVar[Mapping[str, str]] = {
        "backward_overflow": "gradients of a finite loss are NaN or Inf at every loss scale",
    }

    replay: Replay | None
    layer: str
    operation: NonfiniteOperation | None
    is_division: bool
    constant: float | None
    origin: str
    origin_share: float
    lowest_scale: float | None = None
    is_of_own_loss: bool = False

    @classmethod
    def of(cls, run: Observations) -> "BackwardOverflow | NonfiniteForward | None":
        """Returns the cause if the run, with gradients that overflow, has it.

        A logarithm of 0 or a division by 0, whose Inf the loss does not show but the gradients do,
        is one of the forward pass.
        """
        (origin, share), replay = run.skipped.main_origin, run.passes.backward
        if run.format is FLOAT16 and not (origin and _overflows_at_every_scale(run)):
            return None
        if run.format is FLOAT32:
            replay = None  # it was finite: a batch is replayed in the precision of the training
        hidden = hidden_in_forward(run, replay) if replay else None
        if replay and hidden:
            return NonfiniteForward.in_operation(run, hidden, replay)
        slope, constant = _infinite_slope(run, replay) if replay else (None, None)
        layer, operation = "", slope
        if replay and slope is None:
            layer = _layer_of_backward(replay)
            backward = (each for each in replay.operations if each.is_backward)
            operation = None if run.format is FLOAT16 else next(backward, None)
        if operation:
            layer = layer or operation.layer
        is_of_own_loss = run.format is FLOAT16 and replay is None and run.passes.have_no_loss
        change = NO_CHANGE
        if replay:
            change = changes.replayed(run, replay, "the gradients for the batch are finite")
            if replay.search and replay.search.branch:
                change = replace(change, tried=tried_for_branch(replay.search, replay, run))
        return cls(
            run=run,
            name="backward_overflow",
            severity=ERROR if run.format is FLOAT16 else severity_of_overflows(run),
            location="" if is_of_own_loss else layer or origin,
            change=change,
            replay=replay,
            layer=layer,
            operation=operation,
            is_division=slope is not None,
            constant=constant,
            origin=origin,
            origin_share=share,
            lowest_scale=_lowest_scale(run),
            is_of_own_loss=is_of_own_loss,
        )

    @property
    def is_cured_by_float32(self) -> bool:
        """Whether layers in float32 cure it: in 16 bits they do."""
        return self.run.format is FLOAT16 or self.replay is not None

    @property
    def title(self) -> str:
        run, name = self.run, self.run.format.name
        where = f"backward pass of {run.model.describe(self.location)}"
        if self.is_division:
            return f"The {where} divides by 0: {is_zero_because(self.constant, name)}."
        if run.format is not FLOAT16:
            near = f" near {self.location}" if self.location else ""
            if self.replay is None:
                return f"Gradients{near} are NaN or Inf, although the loss is finite."
            if self.operation is None:
                return f"Gradients{near} are NaN or Inf in {name}, but not in float32."
            return f"The {where} returns NaN or Inf in {name}, but not in float32."
        scales = f"loss scales above {as_power(run.loss_scale)}"
        if self.lowest_scale is not None:
            scales = f"loss scales down to {as_power(self.lowest_scale)}"
        if run.is_fixed:
            scales = f"the loss scale of {as_power(run.loss_scale)}"
        if self.is_of_own_loss:
            return (
                f"Gradients overflow at {scales}; those of the loss of the training loop were not"
                " compared with float32."
            )
        if self.layer:
            return f"The {where} overflows float16 at {scales}."
        return f"Gradients near {self.origin} overflow at {scales}."

    @property
    def evidence(self) -> str:
        run, found, skipped = self.run, self.operation, skipped_with_finite_loss(self.run)
        if run.format is FLOAT16 and not run.is_fixed:
            lowest = self.lowest_scale or run.loss_scale
            skipped += f", down to a loss scale of {as_power(lowest)}"
        parts = [skipped]
        if self.origin and (run.format is FLOAT16 or self.replay is None):
            share = f"{self.origin_share:.0%}"
            parts.append(f"{self.origin} was the overflow origin in {share} of them")
        if found:
            layer = run.model.describe(found.layer)
            parts.append(
                f"replayed, {found.operation} in the backward pass of {layer} is the first to"
                f" return {found.value}"
            )
        elif self.replay and self.replay.gradients.of_activations and run.format is FLOAT16:
            layer, magnitude = max(self.replay.gradients.of_activations.items(), key=itemgetter(1))
            parts.append(
                f"replayed in float32, the gradient of the output of {layer} reaches"
                f" {magnitude:.3g} without scaling"
            )
        zero = run.gradients.all_zero_variables if run.format is FLOAT16 else []
        if zero:
            gradients = f"the gradients of {counted(len(zero), 'variable')} are zero"
            parts.append(f"at this scale {gradients}, such as {zero[-1]}")
        return "; ".join(parts)

    @property
    def note(self) -> str:
        if self.run.format is not FLOAT16:
            return "" if self.replay else how_to_find_layer(self.run)
        if self.is_of_own_loss:
            return (
                "no replay has this loss: cast the outputs of the model to float32 before the loss"
                " is computed from them; a division by a small number, as in a finite difference,"
                " makes large gradients in every precision. A training in float32 shows whether"
                " float16 is the cause"
            )
        if self.replay is None:
            return (
                f"no batch was replayed: layers between {self.origin} and the loss, or the loss,"
                " may need float32"
            )
        if self.replay.search and self.replay.search.branch:
            return f"or {CLOSER_TERMS}"
        if (self.replay.gradients.usable_scale or 1.0) < 1.0:
            return (
                "or a smaller loss: a mean in place of a sum, a smaller loss weight, or targets in"
                " other units"
            )
        return ""


def _overflows_at_every_scale(run: Observations) -> bool:
    """Whether gradients overflow for another reason than a loss scale that is too large."""
    skipped, replay, scale = run.skipped, run.passes.backward, run.loss_scale
    suitable = soundness.suitable_scale(replay)
    if skipped.nonfinite_losses >= skipped.gradient_overflows:
        return False
    if suitable is not None and suitable < scale:
        return False  # a fixed scale that is too large, or a dynamic one that still falls
    are_many = skipped.gradient_overflows > max(1, thresholds.MANY_SKIPPED * skipped.steps)
    if run.is_fixed:
        return are_many and run.gradients.headroom >= thresholds.SPARE_BITS
    if skipped.is_stuck:
        return True
    # Overflows may have driven the scale below the one that a branch of the model needs, or so low
    # that other gradients are lost.
    search = replay.search if replay else None
    if search is not None and scale < (search.loss_scale or 0.0):
        return True
    if scale < 1.0:
        has_fallen = skipped.start.overflows > 0
        are_subnormal = run.gradients.subnormal_share > thresholds.MANY_SUBNORMAL
        if run.gradients.unexplained_zero_variables or (are_subnormal and has_fallen):
            return True
    return are_many and scale <= run.min_scale * 2.0**thresholds.SPARE_BITS


def _lowest_scale(run: Observations) -> float | None:
    """Returns the lowest loss scale that overflowed; `None` if the run goes on at a lower one."""
    if run.is_fixed:
        return run.loss_scale
    if not run.skipped.is_stuck or not math.isfinite(run.loss_scale):
        return None
    if run.loss_scale <= run.min_scale:
        return run.loss_scale
    # The scale of the next step has not been tried.
    return run.loss_scale / run.settings.backoff_factor


def _infinite_slope(
    run: Observations, replay: Replay
) -> tuple[NonfiniteOperation | None, float | None]:
    """Returns the operation of the backward pass that divides by 0, and the constant that was lost.

    The slope of a root is such a division.
    """
    for found in replay.operations:
        if not found.is_backward or found.value != "inf":
            continue
        small = [each for each in lost_constants(run, replay, found.layer) if abs(each) < 1.0]
        if divides_by_zero(found) or (is_slope(found) and small):
            return found, small[0] if small else None
    return None, None


def _layer_of_backward(replay: Replay) -> str:
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
