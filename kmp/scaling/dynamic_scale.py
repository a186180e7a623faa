"""The loss scale that backs off at an overflow and grows after an interval without one."""

import math
from dataclasses import dataclass
from typing import Any

from keras import ops

from kmp.scaling.scale_state import LARGEST_SCALE, ScaleState, StepOutcome, count_step, valid_scale
from kmp.utils import FLOAT16, FLOAT32, is_power_of_two, validation

_ULP = 2.0**-FLOAT32.fraction_bits


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
            "growth_interval": validation.positive_integer("growth_interval", self.growth_interval),
            "growth_factor": _growth_factor(self.growth_factor),
            "backoff_factor": _backoff_factor(self.backoff_factor),
            "hysteresis": validation.positive_integer("hysteresis", self.hysteresis),
        }
        checked |= {
            name: valid_scale(name, getattr(self, name)) for name in ("initial_scale", "min_scale", "max_scale")
        }
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

    def is_at_min_scale(self, state: ScaleState, step: StepOutcome) -> Any:
        """Returns a scalar bool: `step` asks for a scale below `min_scale`, so the next one will do no better."""
        return ops.logical_and(self._backs_off(state, step), state.scale <= self.min_scale)

    def steps_to_min_scale(self, scale: float) -> float:
        """Returns how many steps `is_at_min_scale` takes to be true at the earliest, from a scale on the host."""
        falls = math.log(self.min_scale / scale, self.backoff_factor)
        return 1 + max(0, math.ceil(falls - 1e-6))  # a whole number but for rounding, where it falls to `min_scale`

    def update(self, state: ScaleState, step: StepOutcome) -> ScaleState:
        """Returns the state after `step`."""
        clean, in_a_row = count_step(state, step)
        backs_off = self._backs_off(state, step)
        grows = ops.logical_and(ops.logical_not(step.overflowed), clean >= self.growth_interval)
        lower = ops.maximum(state.scale * self.backoff_factor, self.min_scale)
        higher = ops.minimum(state.scale * self.growth_factor, self.max_scale)
        scale = ops.where(backs_off, lower, ops.where(grows, higher, state.scale))
        return ScaleState(scale, ops.where(grows, ops.zeros_like(clean), clean), in_a_row)

    def _backs_off(self, state: ScaleState, step: StepOutcome) -> Any:
        in_backward = ops.logical_and(step.overflowed, step.loss_was_finite)
        return ops.logical_and(in_backward, state.overflows_in_a_row + 1 >= self.hysteresis)


def _growth_factor(value: Any) -> float:
    expected = "a finite number above 1 (in float32), at most 2^127"
    return validation.number("growth_factor", value, expected, lambda v: 1.0 + _ULP <= v <= LARGEST_SCALE)


def _backoff_factor(value: Any) -> float:
    expected = "a number between 0 and 1, both excluded (in float32)"
    return validation.number("backoff_factor", value, expected, lambda v: 0.0 < v <= 1.0 - _ULP / 2)
