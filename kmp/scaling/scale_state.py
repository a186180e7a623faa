"""The inputs of a loss scale rule: its state, and the outcome of a training step."""

from typing import Any, NamedTuple

from keras import ops

from kmp.utils import FLOAT32, validation

LARGEST_SCALE = 2.0**FLOAT32.max_exponent
SMALLEST_SCALE = FLOAT32.smallest_normal


class ScaleState(NamedTuple):
    """The state of a loss scale rule.

    Attributes:
        scale: Scalar float32, the loss scale; always finite and above 0.
        clean_steps: Scalar int64, the number of steps without an overflow since the scale last grew or the gradients of
            a finite loss last overflowed.
        overflows_in_a_row: Scalar int64, the number of steps skipped since the last applied step.

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
    """The outcome of a training step.

    Attributes:
        overflowed: Scalar bool, whether the loss or a gradient was non-finite, so that the step was skipped.
        loss_was_finite: Scalar bool, false if a loss of the step was non-finite before scaling.

    Example:
    >>> from kmp.scaling import DynamicScale
    >>> state, outcome = ScaleState(*map(ops.array, (8.0, 0, 0))), StepOutcome(ops.array(True), ops.array(False))
    >>> float(DynamicScale().update(state, outcome).scale)  # the loss itself is NaN or Inf: no scale prevents that
    8.0
    """

    overflowed: Any
    loss_was_finite: Any


def either(overflowed: Any, skipped: ScaleState, applied: ScaleState) -> ScaleState:
    """Returns the state `skipped` where the scalar bool `overflowed` is true, else `applied`."""
    return ScaleState(*(ops.where(overflowed, *pair) for pair in zip(skipped, applied, strict=True)))


def count_overflow(state: ScaleState, loss_was_finite: Any) -> tuple[Any, Any]:
    """Returns `clean_steps` and `overflows_in_a_row` after a skipped step."""
    clean_steps = ops.where(loss_was_finite, ops.zeros_like(state.clean_steps), state.clean_steps)
    return clean_steps, state.overflows_in_a_row + 1


def valid_scale(name: str, value: Any, alternatives: str = "") -> float:
    """Returns a loss scale as a `float`.

    Args:
        name: The argument's name, for the message.
        value: The received value.
        alternatives: Other accepted values, as the beginning of the expected values in the message.

    Raises:
        TypeError: If `value` is not a number.
        ValueError: If `value` is outside float32's normal range.
    """
    expected = f"{alternatives}a finite number from 2^-126 to 2^127 (float32's normal range)"
    return validation.number(name, value, expected, lambda v: SMALLEST_SCALE <= v <= LARGEST_SCALE)
