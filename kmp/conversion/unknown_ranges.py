"""Names what stays in float16 and is safe or not by the range of the data, which no rule knows."""

import math
from collections.abc import Iterator

import keras

from kmp.backend import keras_internals
from kmp.backend.keras_internals import producer_of
from kmp.conversion.einsum import EinsumKind, kind_of_einsum
from kmp.conversion.model_parts import Part
from kmp.conversion.plan import Plan
from kmp.conversion.precision_rules import NOT_EXAMINED
from kmp.conversion.value_bounds import bound_of, function_of
from kmp.utils.float_formats import FLOAT16, FLOAT32

_MATRIX_PRODUCTS = frozenset(["dot", "einsum", "inner", "matmul", "tensordot"])
# A factor up to this enlarges a value little: 1 + tanh(x) is at most 2.
_SMALL_FACTOR = 8.0
_MOST_NAMED = 6


def unknown_ranges(parts: list[Part], plan: Plan) -> str:
    """Returns the paths whose values a batch would have to show, as text; empty if there are none.

    Products of two tensors that the data decides, large constants times such a tensor, and custom
    layers, whose code may compute anything. Not layers with weights of their own, whose outputs are
    in range as a rule.
    """
    if plan.compute_dtype != FLOAT16.name:  # bfloat16 has the range of float32
        return ""
    paths = list(_paths(parts, plan))
    if len(paths) > _MOST_NAMED:
        paths[_MOST_NAMED:] = [f"and {len(paths) - _MOST_NAMED} more"]
    return ", ".join(paths)


def _paths(parts: list[Part], plan: Plan) -> Iterator[str]:
    in_float32 = {id(part.operation) for part in parts if plan.policy_of(part.path) == FLOAT32.name}
    for part in parts:
        is_float32 = id(part.operation) in in_float32
        if is_float32 or not part.is_planned:
            continue
        if part.rule.reason == NOT_EXAMINED or _multiplies_data(part.operation, in_float32):
            yield part.path


def _multiplies_data(operation: keras.Operation, in_float32: set[int]) -> bool:
    name = function_of(operation)
    if name == "einsum" and kind_of_einsum(vars(operation)["subscripts"]) is EinsumKind.MOVE:
        return False
    if name not in _MATRIX_PRODUCTS and name != "multiply":
        return False
    for call in keras_internals.calls_of(operation):
        # With one float32 input, an operation computes in float32.
        sources = {id(producer_of(tensor)) for tensor in call.input_tensors}
        if not isinstance(operation, keras.Layer) and sources & in_float32:
            continue
        values = keras.tree.flatten(call.arguments.args)
        if name in _MATRIX_PRODUCTS:
            values = call.input_tensors  # a product with weights is that of a layer
        bounds = [bound_of(value) for value in values]
        enlarging = [bound for bound in bounds if bound > _SMALL_FACTOR]
        if len(enlarging) > 1 and math.prod(enlarging) > FLOAT16.max:
            return True
    return False
