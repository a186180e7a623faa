"""The dynamic loss scale: it backs off after an overflow, and grows after an interval without overflows."""

import math
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from keras import ops

from kmp.scaling.scale_state import LARGEST_SCALE, ScaleState, StepOutcome, count_overflow, either, valid_scale
from kmp.utils import FLOAT16, FLOAT32, is_power_of_two, validation

_FLOAT32_EPSILON = 2.0**-FLOAT32.fraction_bits


@dataclass(frozen=True)
class DynamicScale:
    """A loss scale that backs off after overflows and grows without them.

    An overflow in the backward pass multiplies the scale by `backoff_factor`, down to `min_scale`, if at least
    `hysteresis` consecutive steps were skipped, including this one. `growth_interval` steps without an overflow
    multiply it by `growth_factor`, up to `max_scale`. A loss that is non-finite before scaling changes neither the
    scale nor the count of clean steps: no loss scale prevents it. Source: Micikevicius et al., "Mixed Precision
    Training" (ICLR 2018), section 3.2, and NVIDIA's guide "Train With Mixed Precision"; hysteresis as in apex's
    `update_scale_hysteresis`.

    Args:
        initial_scale: Float from `min_scale` to `max_scale`, the scale of the first step.
        growth_interval: Integer, at least 1: steps without an overflow after which the scale grows.
        growth_factor: Float above 1.
        backoff_factor: Float between 0 and 1, both excluded.
        hysteresis: Integer, at least 1: consecutive skipped steps after which the scale backs off.
        min_scale: Float, at least 2^-126 (float32's smallest normal value). Defaults to 2^-14, below which a loss of 1
            times the scale is subnormal in float16.
        max_scale: Float, at most 2^127 (the default, float32's largest power of two).

    Raises:
        TypeError: If an argument is not a number, or not an integer where one is required.
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

    def bounded(self, scale: Any, highest: float = LARGEST_SCALE) -> Any:
        """Returns a scale loaded from a file, clipped to the bounds; the initial one if it is NaN, Inf, 0 or below.

        Args:
            scale: Scalar float32.
            highest: A further upper bound.
        """
        is_valid = ops.isfinite(ops.log(scale))  # the logarithm of 0 is -Inf, and of a negative number NaN
        lower, upper = min(self.min_scale, highest), min(self.max_scale, highest)
        clipped = tf.raw_ops.ClipByValue(t=scale, clip_value_min=lower, clip_value_max=upper)  # `ops.clip` is two
        return ops.where(is_valid, clipped, min(self.initial_scale, highest))

    @property
    def keeps_powers_of_two(self) -> bool:
        """Whether the scale is a power of two in every step."""
        factors = (self.initial_scale, self.growth_factor, self.backoff_factor, self.min_scale, self.max_scale)
        return all(map(is_power_of_two, factors))

    def overflowed_at_min_scale(self, state: ScaleState, step: StepOutcome) -> Any:
        """Returns a scalar bool, whether `step` backs off while the scale is already at `min_scale`."""
        backs_off = ops.logical_and(step.overflowed, self._backs_off(state, step.loss_was_finite))
        return ops.logical_and(backs_off, state.scale <= self.min_scale)

    def steps_to_min_scale(self, scale: float) -> float:
        """Returns after how many consecutive overflows, starting from `scale`, one can be at `min_scale`."""
        backoffs = math.log(self.min_scale / scale, self.backoff_factor)
        return 1 + max(0, math.ceil(backoffs - 1e-6))  # the logarithm of an exact power may be 3.0000001

    def update(self, state: ScaleState, step: StepOutcome) -> ScaleState:
        """Returns the state after `step`."""
        return either(step.overflowed, self.after_overflow(state, step.loss_was_finite), self.after_update(state))

    def after_update(self, state: ScaleState) -> ScaleState:
        """Returns the state after a step that updated the weights."""
        clean_steps = state.clean_steps + 1
        grows = clean_steps >= self.growth_interval
        increased_scale = ops.minimum(state.scale * self.growth_factor, self.max_scale)
        return ScaleState(
            ops.where(grows, increased_scale, state.scale),
            ops.where(grows, ops.zeros_like(clean_steps), clean_steps),
            ops.zeros_like(state.overflows_in_a_row),
        )

    def after_overflow(self, state: ScaleState, loss_was_finite: Any) -> ScaleState:
        """Returns the state after a skipped step."""
        backs_off = self._backs_off(state, loss_was_finite)
        reduced_scale = ops.maximum(state.scale * self.backoff_factor, self.min_scale)
        return ScaleState(ops.where(backs_off, reduced_scale, state.scale), *count_overflow(state, loss_was_finite))

    def _backs_off(self, state: ScaleState, loss_was_finite: Any) -> Any:
        return ops.logical_and(loss_was_finite, state.overflows_in_a_row + 1 >= self.hysteresis)


def _growth_factor(value: Any) -> float:
    expected = "a finite number above 1 after rounding to float32, at most 2^127"
    return validation.number("growth_factor", value, expected, lambda v: 1.0 + _FLOAT32_EPSILON <= v <= LARGEST_SCALE)


def _backoff_factor(value: Any) -> float:
    expected = "a number between 0 and 1, both excluded after rounding to float32"
    return validation.number("backoff_factor", value, expected, lambda v: 0.0 < v <= 1.0 - _FLOAT32_EPSILON / 2)
