"""What an operation does that returns NaN or Inf: which functions do so, and for what operands."""

from kmp.diagnosis.observations import Observations
from kmp.numerics import between, tensorflow_function
from kmp.records import Replay
from kmp.records.replay import LOSS_FUNCTION, NonfiniteOperation
from kmp.utils.float_formats import FLOAT16


def divides_by_zero(found: NonfiniteOperation) -> bool:
    """Whether an operation divides by 0."""
    function = tensorflow_function(found.operation)
    return function is not None and "divides" in function.traits and found.smallest_input == 0.0


def is_logarithm(found: NonfiniteOperation) -> bool:
    """Whether an operation is a logarithm."""
    function = tensorflow_function(found.operation)
    return function is not None and function.name == "logarithm"


def is_slope(found: NonfiniteOperation) -> bool:
    """Whether an operation of the backward pass is the slope of a root, which is infinite at 0.

    Or that of a reciprocal.
    """
    if not found.operation.endswith("Grad"):
        return False
    function = tensorflow_function(found.operation.removesuffix("Grad"))
    if function is None:
        return False
    return function.of([between(0.0, 1.0)]).slope > FLOAT16.max


def function_of_negative(found: NonfiniteOperation) -> str:
    """Returns the function that an operation takes of a negative number; empty if it does not."""
    function = tensorflow_function(found.operation)
    if function is None or not found.has_negative_input:
        return ""
    is_of_positive = function.domain[0] >= 0.0 or is_logarithm(found)
    return function.name if is_of_positive else ""


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
