"""What functions do to numbers: ranges and rounding errors, without any framework."""

from kmp.numerics.function import Call, Elementwise, Fixed, Function, Move, Outcome
from kmp.numerics.functions import (
    BELOW_MAXIMUM,
    FUNCTIONS,
    GATE_FUNCTION,
    LONG_SUM,
    SUM_WITH_ONE,
    TO_INTEGER,
    einsum_function,
    keras_function,
    matrix_product_function,
    steepness,
    tensorflow_function,
)
from kmp.numerics.interpreter import (
    TOO_FEW_BITS,
    Needs,
    Node,
    Problem,
    interpret,
    needing_float32,
    unit_roundoff,
)
from kmp.numerics.values import DATA, INFINITY, Value, between, constant, extremes

__all__ = [
    "BELOW_MAXIMUM",
    "DATA",
    "FUNCTIONS",
    "GATE_FUNCTION",
    "INFINITY",
    "LONG_SUM",
    "SUM_WITH_ONE",
    "TOO_FEW_BITS",
    "TO_INTEGER",
    "Call",
    "Elementwise",
    "Fixed",
    "Function",
    "Move",
    "Needs",
    "Node",
    "Outcome",
    "Problem",
    "Value",
    "between",
    "constant",
    "einsum_function",
    "extremes",
    "interpret",
    "keras_function",
    "matrix_product_function",
    "needing_float32",
    "steepness",
    "tensorflow_function",
    "unit_roundoff",
]
