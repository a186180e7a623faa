"""The fixed loss scale."""

import math
from dataclasses import dataclass
from typing import Any

from keras import ops

from kmp.scaling.scale_state import LARGEST_SCALE, ScaleState, StepOutcome, count_overflow, either, valid_scale
from kmp.utils import is_power_of_two


@dataclass(frozen=True)
class FixedScale:
    """A constant loss scale. Steps that overflow are still skipped.

    Args:
        initial_scale: Float from 2^-126 to 2^127 (float32's normal range).

    Raises:
        TypeError: If `initial_scale` is not a number.
        ValueError: If `initial_scale` is outside that range.

    Example:
    >>> FixedScale(1024)
    FixedScale(initial_scale=1024.0)
    """

    initial_scale: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "initial_scale", valid_scale("loss_scale", self.initial_scale, "'dynamic', 0, or "))

    def bounded(self, scale: Any, highest: float = LARGEST_SCALE) -> Any:
        """Returns the fixed scale in place of `scale`, as loaded from a file, or `highest` if that is lower."""
        return ops.full_like(scale, min(self.initial_scale, highest))

    @property
    def keeps_powers_of_two(self) -> bool:
        """Whether the scale is a power of two."""
        return is_power_of_two(self.initial_scale)

    def overflowed_at_min_scale(self, state: ScaleState, step: StepOutcome) -> Any:
        """Returns a scalar bool, always false: a fixed scale has no minimum to back off to."""
        return ops.zeros_like(step.overflowed)

    def steps_to_min_scale(self, scale: float) -> float:
        """Returns infinity: `overflowed_at_min_scale` is never true."""
        return math.inf

    def update(self, state: ScaleState, step: StepOutcome) -> ScaleState:
        """Returns the state after `step`: the same scale, and the updated step counts."""
        return either(step.overflowed, self.after_overflow(state, step.loss_was_finite), self.after_update(state))

    def after_update(self, state: ScaleState) -> ScaleState:
        """Returns the state after a step that updated the weights."""
        return ScaleState(state.scale, state.clean_steps + 1, ops.zeros_like(state.overflows_in_a_row))

    def after_overflow(self, state: ScaleState, loss_was_finite: Any) -> ScaleState:
        """Returns the state after a skipped step."""
        return ScaleState(state.scale, *count_overflow(state, loss_was_finite))
