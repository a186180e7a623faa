"""Which operations need float32 because another one amplifies their rounding errors.

A logarithm in float32 is no better than its input: sigmoid(-18) is 0 in float16, and log(0) is
-Inf. So what computes such an input is float32 too, as far as it rounds small values.
"""

import math
from collections.abc import Iterator
from typing import Any

import keras

from kmp.backend import keras_internals
from kmp.conversion.model_parts import Part
from kmp.conversion.op_rule import NEEDS_FLOAT32
from kmp.conversion.value_bounds import MOVES, bound_of, function_of, source_of, tensors_of


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_DIVISIONS = _names("divide dividenonan truedivide")
_AMPLIFIERS = _DIVISIONS | _names(
    "arccos arccosh arcsin arctanh binarycrossentropy categoricalcrossentropy erfinv log log10"
    " log1p log2 power reciprocal rsqrt sparsecategoricalcrossentropy sqrt tan"
)
# They flush small values, or round values near 1, whose difference from 1 is then lost.
_SATURATING = _names(
    "celu cos elu erf erfc gelu hardsigmoid mish selu sigmoid silu sin softmax softplus softsign"
    " sparsesigmoid swish tanh"
)
_PRODUCTS = _DIVISIONS | _names("exp exp2 expm1 multiply power square")
_ARITHMETIC = _PRODUCTS | _names("add subtract")
# Steps back in a graph. Longer chains of operations have a layer with weights in between.
_MOST_STEPS = 30

_Operations = dict[int, keras.Operation]


def amplified_paths(parts: list[Part]) -> Iterator[tuple[str, str]]:
    """Yields the path of each part whose rounding errors another part amplifies, and the reason."""
    path_of = {id(part.operation): part.path for part in parts}
    for part in parts:
        if part.rule.category != NEEDS_FLOAT32:
            continue
        for tensor in _amplified_inputs(part.operation):
            for key in _rounding_before(tensor, {}, _MOST_STEPS):
                if key in path_of:
                    yield path_of[key], f"{part.path} amplifies its rounding errors"


def _amplified_inputs(operation: keras.Operation) -> Iterator[keras.KerasTensor]:
    """Yields the inputs of an operation whose rounding errors it amplifies."""
    name = function_of(operation)
    if isinstance(operation, keras.Layer) or name not in _AMPLIFIERS:
        return
    if name not in _DIVISIONS:
        yield from tensors_of(operation)
        return
    for call in keras_internals.calls_of(operation):
        dividend, divisor = call.arguments.args[:2]
        if isinstance(divisor, keras.KerasTensor):
            yield divisor
        # A dividend of any size is not small, but a probability may be.
        if isinstance(dividend, keras.KerasTensor) and bound_of(dividend) < math.inf:
            yield dividend


def _rounding_before(tensor: Any, known: dict[int, _Operations], steps: int) -> _Operations:
    """Returns what computes a tensor, back to the functions that round small values.

    Empty if there are none, such as behind a residual connection. By id, as `known` is: what has
    been found for other operations.
    """
    operation = source_of(tensor)
    key = id(operation)
    if key not in known:
        known[key] = {}
        known[key] = _rounding_in(operation, known, steps)
    return known[key]


def _rounding_in(
    operation: keras.Operation, known: dict[int, _Operations], steps: int
) -> _Operations:
    name = function_of(operation)
    if getattr(operation, "weights", ()):
        return {id(operation): operation} if name in _SATURATING else {}
    is_elementwise = name in MOVES or name in _ARITHMETIC or name in _SATURATING
    if not is_elementwise or not steps:
        return {}
    tensors = tensors_of(operation)
    # The sum of two values of any size, such as a residual connection, is not small.
    is_followed = len(tensors) == 1 or name in _PRODUCTS or bound_of(operation.output) < math.inf
    if not is_followed:
        return {}
    found: _Operations = {}
    for tensor in tensors:
        found.update(_rounding_before(tensor, known, steps - 1))
    if found or name not in MOVES:
        found[id(operation)] = operation
    return found
