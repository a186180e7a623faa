"""The rules of the loss scale: state in, state out.

Nothing here writes a variable, or imports TensorFlow: the functions compute with the arrays of any
namespace `xp` that has NumPy's names, such as `numpy` and `keras.ops`.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kmp.utils import validation
from kmp.utils.float_formats import FLOAT16, FLOAT32

LARGEST_SCALE = 2.0**FLOAT32.max_exponent
# A larger loss scale is applied as this one: its reciprocal is subnormal, and TensorFlow on a CPU
# flushes it to zero.
LARGEST_APPLIED_SCALE = 2.0 ** (FLOAT32.max_exponent - 1)
_FLOAT32_EPSILON = 2.0**-FLOAT32.fraction_bits


class ScaleState(NamedTuple):
    """The state of a loss scale rule.

    Attributes:
        scale: Scalar float32, the loss scale; always finite and above 0.
        clean_steps: Scalar int64, the number of steps without an overflow since the scale last grew
            or the gradients of a finite loss last overflowed.
        overflows_in_a_row: Scalar int64, the number of steps skipped since the last applied step.

    Example:
    >>> from kmp.scaling import DynamicScale, ScaleState, StepOutcome
    >>> start = ScaleState(scale=8.0, clean_steps=0, overflows_in_a_row=0)
    >>> applied = StepOutcome(overflowed=False, loss_was_finite=True)
    >>> int(DynamicScale().update(start, applied).clean_steps)
    1
    """

    scale: Any
    clean_steps: Any
    overflows_in_a_row: Any


class StepOutcome(NamedTuple):
    """The outcome of a training step, from which a rule updates its state.

    Attributes:
        overflowed: Scalar bool, whether the loss or a gradient was non-finite, so that the step was
            skipped. A Python bool in a branch of a graph that only one outcome reaches.
        loss_was_finite: Scalar bool, false if a loss of the step was non-finite before scaling, or
            a batch was empty.

    Example:
    >>> from kmp.scaling import DynamicScale, ScaleState, StepOutcome
    >>> state = ScaleState(scale=8.0, clean_steps=0, overflows_in_a_row=0)
    >>> outcome = StepOutcome(overflowed=True, loss_was_finite=False)
    >>> float(DynamicScale().update(state, outcome).scale)  # no scale prevents a NaN loss
    8.0
    """

    overflowed: Any
    loss_was_finite: Any


@dataclass(frozen=True)
class DynamicScale:
    """A loss scale that backs off after overflows and grows without them.

    An overflow in the backward pass multiplies the scale by `backoff_factor`, down to `min_scale`,
    if at least `hysteresis` consecutive steps were skipped, including this one. `growth_interval`
    steps without an overflow multiply it by `growth_factor`, up to `max_scale`. A loss that is
    non-finite before scaling changes neither the scale nor the count of clean steps: no loss scale
    prevents it. Source: Micikevicius et al., "Mixed Precision Training" (ICLR 2018), section 3.2,
    and NVIDIA's guide "Train With Mixed Precision"; hysteresis as in apex's
    `update_scale_hysteresis`.

    Args:
        initial_scale: Float from `min_scale` to `max_scale`, the scale of the first step.
        growth_interval: Integer, at least 1: steps without an overflow after which the scale grows.
        growth_factor: Float above 1.
        backoff_factor: Float between 0 and 1, both excluded.
        hysteresis: Integer, at least 1: consecutive skipped steps after which the scale backs off.
        min_scale: Float, at least 2^-126 (float32's smallest normal value). Defaults to 2^-14,
            below which a loss of 1 times the scale is subnormal in float16.
        max_scale: Float, at most 2^127 (the default, float32's largest power of two).

    Raises:
        TypeError: If an argument is not a number, or not an integer where one is required.
        ValueError: If an argument is outside its range.

    Example:
    >>> from kmp.scaling import DynamicScale, ScaleState, StepOutcome
    >>> rule = DynamicScale(hysteresis=2)
    >>> state = ScaleState(scale=1024.0, clean_steps=0, overflows_in_a_row=0)
    >>> overflow = StepOutcome(overflowed=True, loss_was_finite=True)
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
            "initial_scale": _scale("initial_scale", self.initial_scale),
            "growth_interval": validation.positive_integer("growth_interval", self.growth_interval),
            "growth_factor": validation.number(
                "growth_factor",
                self.growth_factor,
                "a finite number above 1 after rounding to float32, at most 2^127",
                lambda factor: 1.0 + _FLOAT32_EPSILON <= factor <= LARGEST_SCALE,
            ),
            "backoff_factor": validation.number(
                "backoff_factor",
                self.backoff_factor,
                "a number between 0 and 1, both excluded after rounding to float32",
                lambda factor: 0.0 < factor <= 1.0 - _FLOAT32_EPSILON / 2,
            ),
            "hysteresis": validation.positive_integer("hysteresis", self.hysteresis),
            "min_scale": _scale("min_scale", self.min_scale),
            "max_scale": _scale("max_scale", self.max_scale),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        bounds = f"min_scale={self.min_scale!r}, max_scale={self.max_scale!r}"
        if self.min_scale > self.max_scale:
            raise ValueError(f"`min_scale` must be at most `max_scale`. Received: {bounds}")
        if not self.min_scale <= self.initial_scale <= self.max_scale:
            raise ValueError(
                "`initial_scale` must lie between `min_scale` and `max_scale`. Received: "
                f"initial_scale={self.initial_scale!r}, {bounds}"
            )

    @property
    def scales_loss(self) -> bool:
        """Whether losses are multiplied and gradients divided: always."""
        return True

    def backs_off(self, state: ScaleState, step: StepOutcome, xp: Any = np) -> Any:
        """Returns a scalar bool, whether a skipped `step` makes the scale back off.

        It may be true at `min_scale` too, where the scale stays the same.
        """
        is_due = state.overflows_in_a_row + 1 >= self.hysteresis
        return xp.logical_and(step.loss_was_finite, is_due)

    def update(self, state: ScaleState, step: StepOutcome, xp: Any = np) -> ScaleState:
        """Returns the state after `step`. `xp` is the namespace of the arrays, as `keras.ops`."""
        clean_steps = state.clean_steps + 1
        grows = clean_steps >= self.growth_interval
        increased = xp.minimum(state.scale * self.growth_factor, self.max_scale)
        applied = ScaleState(
            scale=xp.where(grows, increased, state.scale),
            clean_steps=xp.where(grows, xp.zeros_like(clean_steps), clean_steps),
            overflows_in_a_row=xp.zeros_like(state.overflows_in_a_row),
        )
        reduced = xp.maximum(state.scale * self.backoff_factor, self.min_scale)
        scale = xp.where(self.backs_off(state, step, xp), reduced, state.scale)
        return _after(step, _skipped(state, step, scale, xp), applied, xp)

    def steps_to_min_scale(self, scale: float) -> float:
        """Returns after how many consecutive overflows from `scale` one can be at `min_scale`."""
        backoffs = math.log(self.min_scale / scale, self.backoff_factor)
        # The logarithm of an exact power may be 3.0000001.
        return 1 + max(0, math.ceil(backoffs - 1e-6))


@dataclass(frozen=True)
class FixedScale:
    """A constant loss scale: steps that overflow are skipped, and the scale stays.

    Args:
        initial_scale: Float from 2^-126 to 2^127 (float32's normal range).

    Raises:
        TypeError: If `initial_scale` is not a number.
        ValueError: If `initial_scale` is outside that range.

    Example:
    >>> from kmp.scaling import FixedScale
    >>> FixedScale(1024)
    FixedScale(initial_scale=1024.0)
    """

    initial_scale: float

    def __post_init__(self) -> None:
        scale = _scale("loss_scale", self.initial_scale, "'dynamic', or ")
        object.__setattr__(self, "initial_scale", scale)

    @property
    def min_scale(self) -> float:
        """The scale: it cannot back off."""
        return self.initial_scale

    @property
    def scales_loss(self) -> bool:
        """Whether losses are multiplied and gradients divided: not at 1."""
        return self.initial_scale != 1.0

    def backs_off(self, state: ScaleState, step: StepOutcome, xp: Any = np) -> Any:
        """Returns a scalar bool, always false."""
        return xp.zeros_like(step.loss_was_finite)

    def update(self, state: ScaleState, step: StepOutcome, xp: Any = np) -> ScaleState:
        """Returns the state after `step`: the same scale, and the updated step counts."""
        applied = ScaleState(
            scale=state.scale,
            clean_steps=state.clean_steps + 1,
            overflows_in_a_row=xp.zeros_like(state.overflows_in_a_row),
        )
        return _after(step, _skipped(state, step, state.scale, xp), applied, xp)

    def steps_to_min_scale(self, scale: float) -> float:
        """Returns infinity: no step overflows at a minimum scale."""
        return math.inf


Rule = FixedScale | DynamicScale
"""The type of a rule of the loss scale: `FixedScale` or `DynamicScale`."""


def _skipped(state: ScaleState, step: StepOutcome, scale: Any, xp: Any) -> ScaleState:
    """Returns the state after a skipped step, with the scale that the rule chooses."""
    none = xp.zeros_like(state.clean_steps)
    return ScaleState(
        scale=scale,
        clean_steps=xp.where(step.loss_was_finite, none, state.clean_steps),
        overflows_in_a_row=state.overflows_in_a_row + 1,
    )


def _after(step: StepOutcome, skipped: ScaleState, applied: ScaleState, xp: Any) -> ScaleState:
    """Returns the state for the outcome of a step, known in Python or on the device."""
    if isinstance(step.overflowed, bool):
        return skipped if step.overflowed else applied
    pairs = zip(skipped, applied, strict=True)
    return ScaleState(*(xp.where(step.overflowed, *pair) for pair in pairs))


def _scale(name: str, value: Any, alternatives: str = "") -> float:
    return validation.number(
        name,
        value,
        f"{alternatives}a finite number from 2^-126 to 2^127 (float32's normal range)",
        lambda scale: FLOAT32.smallest_normal <= scale <= LARGEST_SCALE,
    )
