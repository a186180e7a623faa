"""What an operation does that returns NaN or Inf: which functions do so, and for what operands."""

from kmp.diagnosis.observations import Observations
from kmp.records import Replay
from kmp.records.replay import LOSS_FUNCTION, NonfiniteOperation

_DIVISIONS = ("RealDiv", "Rsqrt", "Reciprocal", "Inv", "Div", "Xdivy", "Pow")
_LOGARITHMS = ("Log", "Log1p", "Xlogy", "Xlog1py")
_OF_POSITIVE_NUMBERS = (*_LOGARITHMS, "Sqrt", "Rsqrt", "Pow")
# Operations of the backward pass: the slopes of roots and reciprocals, infinite at 0.
_SLOPES = ("SqrtGrad", "RsqrtGrad", "ReciprocalGrad", "InvGrad")


def divides_by_zero(found: NonfiniteOperation) -> bool:
    """Whether an operation divides by 0."""
    return found.operation in _DIVISIONS and found.smallest_input == 0.0


def is_logarithm(found: NonfiniteOperation) -> bool:
    """Whether an operation is a logarithm."""
    return found.operation in _LOGARITHMS


def is_slope(found: NonfiniteOperation) -> bool:
    """Whether an operation is the slope of a root, which is infinite at 0."""
    return found.operation in _SLOPES


def function_of_negative(found: NonfiniteOperation) -> str:
    """Returns the function that an operation takes of a negative number; empty if it does not."""
    if found.operation not in _OF_POSITIVE_NUMBERS or not found.has_negative_input:
        return ""
    return "logarithm" if is_logarithm(found) else "root"


def lost_constants(run: Observations, replay: Replay, layer: str) -> list[float]:
    """Returns the scalars among the operands of a layer that are 0 or infinite in the format."""
    recorded = replay.overflow.lost_constants if replay.overflow else {}  # in any 16-bit format
    smallest, largest = 2.0**run.format.flush_exponent, run.format.max
    constants = recorded.get(layer, [])
    return [each for each in constants if abs(each) <= smallest or abs(each) > largest]


def hidden_in_forward(run: Observations, replay: Replay) -> NonfiniteOperation | None:
    """Returns the logarithm of 0, or the division by 0, whose Inf only the gradients show."""
    needed = {*replay.float32_layers, LOSS_FUNCTION, run.model.name}
    for found in replay.operations:
        if found.is_backward or found.layer not in needed:
            continue
        if is_logarithm(found) or divides_by_zero(found):
            return found
    return None
