"""The operations of a pass for whose finite results 16 bits are too few."""

from collections.abc import Iterable, Sequence

from kmp.numerics import tensorflow_function
from kmp.numerics.losses import index_lost, losses_of
from kmp.records.replay import LossyOperation
from kmp.replay.nonfinite_operations import FloatValues
from kmp.utils.float_formats import FORMATS_16_BIT

_ALL = 1.0  # an error as large as the results vary


def classify_operation(
    layer: str, operation: str, operands: Sequence[FloatValues], result: FloatValues
) -> list[LossyOperation]:
    """Returns what an operation of the forward pass loses, beyond the rounding of its result.

    Args:
        layer: The path of its layer.
        operation: Its type.
        operands: Values of its operands, which belong together.
        result: Those of its result; of a cast to integers its operand.
    """
    function, rounded = tensorflow_function(operation), FORMATS_16_BIT.get(result.dtype)
    if function is None or rounded is None:
        return []
    if operation == "Cast":
        found = index_lost(result.array, rounded)
    else:
        found = losses_of(function, [each.array for each in operands], result.array, rounded)
    return [LossyOperation(layer, operation, each.kind, result.dtype, *each[1:]) for each in found]


def worst_by_layer(found: Iterable[LossyOperation]) -> list[LossyOperation]:
    """Returns the worst operation of each layer, the largest estimated error first.

    The first of those that lose all: the others may only show it.
    """
    worst: dict[str, LossyOperation] = {}
    for each in found:
        if each.layer not in worst or min(each.error, _ALL) > worst[each.layer].error:
            worst[each.layer] = each
    return sorted(worst.values(), key=lambda each: -each.error)
