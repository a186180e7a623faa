"""What a rule of the loss scale works on: the state it keeps, and the outcome of a step."""

from typing import Any, NamedTuple

from keras import ops

from kmp.utils import FLOAT32, validation

LARGEST_SCALE = 2.0**FLOAT32.max_exponent
SMALLEST_SCALE = FLOAT32.smallest_normal


class ScaleState(NamedTuple):
    """What a rule remembers from step to step.

    Attributes:
        scale: Scalar float32, the loss scale; always finite and above 0.
        clean_steps: Scalar int64, steps without an overflow since the scale last grew, or gradients of a finite loss
            last overflowed.
        overflows_in_a_row: Scalar int64, steps skipped since the last one that was applied.

    Example:
    >>> from kmp.scaling import DynamicScale
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
    >>> from kmp.scaling import DynamicScale
    >>> state, bad = ScaleState(*map(ops.array, (8.0, 0, 0))), StepOutcome(ops.array(True), ops.array(False))
    >>> float(DynamicScale().update(state, bad).scale)  # no scale would have helped
    8.0
    """

    overflowed: Any
    loss_was_finite: Any


def count_step(state: ScaleState, step: StepOutcome) -> tuple[Any, Any]:
    """Returns `clean_steps` and `overflows_in_a_row` after a step."""
    zero = ops.zeros_like(state.clean_steps)
    in_a_row = ops.where(step.overflowed, state.overflows_in_a_row + 1, zero)
    after_overflow = ops.where(step.loss_was_finite, zero, state.clean_steps)
    return ops.where(step.overflowed, after_overflow, state.clean_steps + 1), in_a_row


def valid_scale(name: str, value: Any, or_else: str = "") -> float:
    """Returns a loss scale as a `float`; raises a `TypeError` or `ValueError` for an invalid one."""
    expected = f"{or_else}a finite number from 2^-126 to 2^127 (float32's normal range)"
    return validation.number(name, value, expected, lambda v: SMALLEST_SCALE <= v <= LARGEST_SCALE)
