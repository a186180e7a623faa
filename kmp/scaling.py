"""The rules of the loss scale: pure functions from one step's outcome to the next step's scale."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from keras import ops

from kmp import _arguments
from kmp._formats import FLOAT16, FLOAT32, is_power_of_two

__all__ = ["DynamicScale", "FixedScale", "Rule", "ScaleState", "StepOutcome"]

LARGEST_SCALE = 2.0**FLOAT32.max_exponent
SMALLEST_SCALE = FLOAT32.smallest_normal
_ULP = 2.0**-FLOAT32.fraction_bits


class ScaleState(NamedTuple):
    """What a rule remembers from step to step.

    Attributes:
        scale: Scalar float32, the loss scale; always finite and above 0.
        clean_steps: Scalar int64, steps without an overflow since the scale last grew, or gradients of a finite loss
            last overflowed.
        overflows_in_a_row: Scalar int64, steps skipped since the last one that was applied.

    Example:
    >>> start = ScaleState(ops.array(8.0), ops.array(0), ops.array(0))
    >>> applied = StepOutcome(overflowed=ops.array(False), loss_was_finite=ops.array(True))
    >>> int(DynamicScale().update(start, applied).clean_steps)
    1
    """

    scale: Any
    clean_steps: Any
    overflows_in_a_row: Any


class StepOutcome(NamedTuple):
    """What a rule learns of one step.

    Attributes:
        overflowed: Scalar bool, the loss or a gradient was not finite, so the step was skipped.
        loss_was_finite: Scalar bool, false when a loss of the step was not finite before it was scaled.

    Example:
    >>> state, bad = ScaleState(*map(ops.array, (8.0, 0, 0))), StepOutcome(ops.array(True), ops.array(False))
    >>> float(DynamicScale().update(state, bad).scale)  # no scale would have helped
    8.0
    """

    overflowed: Any
    loss_was_finite: Any


@dataclass(frozen=True)
class FixedScale:
    """The loss scale that never moves; steps that overflow are skipped all the same.

    Args:
        initial_scale: Float from 2^-126 to 2^127 (float32's normal range).

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is outside that range.

    Example:
    >>> FixedScale(1024)
    FixedScale(initial_scale=1024.0)
    """

    initial_scale: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "initial_scale", _scale("loss_scale", self.initial_scale, "'dynamic', 0, or "))

    def bounded(self, scale: Any) -> Any:
        """Returns the fixed scale, whatever a file held."""
        return ops.full_like(scale, self.initial_scale)

    @property
    def keeps_powers_of_two(self) -> bool:
        """Whether the scale is a power of two."""
        return is_power_of_two(self.initial_scale)

    def is_at_its_end(self, state: ScaleState, step: StepOutcome) -> Any:
        """Returns a scalar bool, false: a scale that never moves has no way down to come to the end of."""
        return ops.zeros_like(step.overflowed)

    def steps_to_its_end(self, scale: float) -> float:
        """Returns infinity: see `is_at_its_end`."""
        return math.inf

    def update(self, state: ScaleState, step: StepOutcome) -> ScaleState:
        """Returns the state after `step`: the same scale, the steps counted."""
        return ScaleState(state.scale, *_count(state, step))


@dataclass(frozen=True)
class DynamicScale:
    """The loss scale that follows the gradients.

    A step that overflows in the backward pass, and is at least the `hysteresis`-th skipped one in a row, multiplies the
    scale by `backoff_factor`, down to `min_scale`. `growth_interval` steps without an overflow multiply it by
    `growth_factor`, up to `max_scale`. A step whose loss was already non-finite moves nothing: no loss scale would have
    helped. Source: Micikevicius et al., "Mixed Precision Training" (ICLR 2018), section 3.2, and NVIDIA's guide "Train
    With Mixed Precision"; hysteresis as apex' `update_scale_hysteresis` has it.

    Args:
        initial_scale: Float, the scale of the first step, from `min_scale` to `max_scale`.
        growth_interval: Integer, at least 1; in steps.
        growth_factor: Float above 1.
        backoff_factor: Float between 0 and 1, both excluded.
        hysteresis: Integer, at least 1; in steps.
        min_scale: Float, at least 2^-126 (float32's smallest normal value). Below 2^-14, the default, a loss of 1
            leaves float16's normal range.
        max_scale: Float, at most 2^127 (the largest power of two in float32).

    Raises:
        TypeError: If an argument is not a number of its kind.
        ValueError: If an argument is outside its range.

    Example:
    >>> rule, state = DynamicScale(hysteresis=2), ScaleState(ops.array(1024.0), ops.array(0), ops.array(0))
    >>> overflow = StepOutcome(overflowed=ops.array(True), loss_was_finite=ops.array(True))
    >>> state = rule.update(state, overflow)
    >>> float(state.scale), float(rule.update(state, overflow).scale)
    (1024.0, 512.0)
    """

    initial_scale: float = 2.0**15
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    hysteresis: int = 1
    min_scale: float = FLOAT16.smallest_normal
    max_scale: float = LARGEST_SCALE

    def __post_init__(self) -> None:
        checked = {
            "growth_interval": _arguments.positive_integer("growth_interval", self.growth_interval),
            "growth_factor": _growth_factor(self.growth_factor),
            "backoff_factor": _backoff_factor(self.backoff_factor),
            "hysteresis": _arguments.positive_integer("hysteresis", self.hysteresis),
        }
        checked |= {name: _scale(name, getattr(self, name)) for name in ("initial_scale", "min_scale", "max_scale")}
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.min_scale > self.max_scale:
            raise ValueError(
                "`min_scale` must be at most `max_scale`. Received: "
                f"min_scale={self.min_scale!r}, max_scale={self.max_scale!r}"
            )
        if not self.min_scale <= self.initial_scale <= self.max_scale:
            raise ValueError(
                "`initial_scale` must lie between `min_scale` and `max_scale`. Received: "
                f"initial_scale={self.initial_scale!r}, min_scale={self.min_scale!r}, max_scale={self.max_scale!r}"
            )

    def bounded(self, scale: Any) -> Any:
        """Returns a scale that a file held, brought within bounds; the initial one if it was not finite or above 0."""
        usable = ops.logical_and(ops.isfinite(scale), scale > 0)
        return ops.where(usable, ops.clip(scale, self.min_scale, self.max_scale), self.initial_scale)

    @property
    def keeps_powers_of_two(self) -> bool:
        """Whether the scale starts as a power of two and stays one."""
        factors = (self.initial_scale, self.growth_factor, self.backoff_factor, self.min_scale, self.max_scale)
        return all(map(is_power_of_two, factors))

    def is_at_its_end(self, state: ScaleState, step: StepOutcome) -> Any:
        """Returns a scalar bool: `step` asks for a scale below `min_scale`, so the next one will do no better."""
        return ops.logical_and(self._backs_off(state, step), state.scale <= self.min_scale)

    def steps_to_its_end(self, scale: float) -> float:
        """Returns how many steps `is_at_its_end` takes to be true at the earliest, from a scale on the host."""
        falls = math.log(self.min_scale / scale, self.backoff_factor)
        return 1 + max(0, math.ceil(falls - 1e-6))  # a whole number but for rounding, where it falls to `min_scale`

    def update(self, state: ScaleState, step: StepOutcome) -> ScaleState:
        """Returns the state after `step`."""
        clean, in_a_row = _count(state, step)
        backs_off = self._backs_off(state, step)
        grows = ops.logical_and(ops.logical_not(step.overflowed), clean >= self.growth_interval)
        lower = ops.maximum(state.scale * self.backoff_factor, self.min_scale)
        higher = ops.minimum(state.scale * self.growth_factor, self.max_scale)
        scale = ops.where(backs_off, lower, ops.where(grows, higher, state.scale))
        return ScaleState(scale, ops.where(grows, ops.zeros_like(clean), clean), in_a_row)

    def _backs_off(self, state: ScaleState, step: StepOutcome) -> Any:
        in_backward = ops.logical_and(step.overflowed, step.loss_was_finite)
        return ops.logical_and(in_backward, state.overflows_in_a_row + 1 >= self.hysteresis)


Rule = FixedScale | DynamicScale


def _count(state: ScaleState, step: StepOutcome) -> tuple[Any, Any]:
    zero = ops.zeros_like(state.clean_steps)
    in_a_row = ops.where(step.overflowed, state.overflows_in_a_row + 1, zero)
    after_overflow = ops.where(step.loss_was_finite, zero, state.clean_steps)
    return ops.where(step.overflowed, after_overflow, state.clean_steps + 1), in_a_row


def _scale(name: str, value: Any, or_else: str = "") -> float:
    expected = f"{or_else}a finite number from 2^-126 to 2^127 (float32's normal range)"
    return _arguments.number(name, value, expected, lambda v: SMALLEST_SCALE <= v <= LARGEST_SCALE)


def _growth_factor(value: Any) -> float:
    expected = "a finite number above 1 (in float32), at most 2^127"
    return _arguments.number("growth_factor", value, expected, lambda v: 1.0 + _ULP <= v <= LARGEST_SCALE)


def _backoff_factor(value: Any) -> float:
    expected = "a number between 0 and 1, both excluded (in float32)"
    return _arguments.number("backoff_factor", value, expected, lambda v: 0.0 < v <= 1.0 - _ULP / 2)
