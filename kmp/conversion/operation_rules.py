"""Which operations of a functional graph, such as that of `keras.ops.exp(x)`, need float32.

The rules follow what Keras' code computes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from kmp.backend import keras_internals
from kmp.conversion.op_rule import (
    FOLLOWS_INPUTS,
    NEEDS_FLOAT32,
    RUNS_IN_16_BITS,
    OpRule,
    rules_of_constants,
)
from kmp.layers.float32 import Float32Operation
from kmp.layers.float32_rules import TOO_FEW_BITS
from kmp.utils.float_formats import FLOAT16

_TORCH = "torch.amp's op reference"
_GRAPPLER = "TensorFlow's auto_mixed_precision_lists.h"
_PAPER = "Micikevicius et al. 2018, section 3.3"
_KERAS = "Keras' source"


@dataclass(frozen=True)
class _Row:
    """One row of the table of operations.

    Args:
        operations: The names of classes of operations in `keras.ops`.
        category: The category of their rule.
        source: The source of their rule.
        reason: Why, in every 16-bit dtype; may be empty.
        float16: Why, in float16. bfloat16 has the range of float32, but too few bits.
    """

    operations: str
    category: str
    source: str
    reason: str = ""
    float16: str = ""

    def rule(self, dtype: str) -> OpRule:
        reason = self.reason
        if self.float16:
            reason = self.float16 if dtype == FLOAT16.name else TOO_FEW_BITS
        return OpRule(self.category, reason, self.source)


_POWER = _Row(
    "Power Square Squareplus Vander Kron Outer Cross",
    NEEDS_FLOAT32,
    f"{_TORCH}, {_GRAPPLER}",
    float16="powers overflow float16: 256 squared > 65504",
)
_RECIPROCAL = _Row(
    "Reciprocal RGBToHSV",
    NEEDS_FLOAT32,
    _TORCH,
    float16="reciprocals of values below 1.5e-5 overflow float16",
)
_ROUND_TO_DECIMALS = _Row(
    "",  # `Round` without decimals is exact
    NEEDS_FLOAT32,
    _KERAS,
    float16="it multiplies by a power of 10, which overflows float16",
)
_TABLE = (
    _POWER,
    _RECIPROCAL,
    _Row(
        "Exp Exp2 Expm1 Sinh Cosh I0",
        NEEDS_FLOAT32,
        f"{_TORCH}, {_GRAPPLER}",
        float16="exponentials overflow float16: exp(12) > 65504",
    ),
    _Row(
        "Log Log10 Log1p Log2 BinaryCrossentropy CategoricalCrossentropy"
        " SparseCategoricalCrossentropy CTCLoss",
        NEEDS_FLOAT32,
        _TORCH,
        float16="logarithms amplify float16 rounding errors; values flushed to zero become -Inf",
    ),
    _Row(
        "Sum Nansum Nanmean Average Cumsum Nancumsum Prod Nanprod Cumprod Nancumprod Trace"
        " Trapezoid SegmentSum SegmentProd Scatter Fold Bincount",
        NEEDS_FLOAT32,
        f"{_PAPER}, {_GRAPPLER}",
        float16="long sums overflow float16 or lose small elements",
    ),
    _Row(
        "Var Std Nanvar Nanstd Moments Corrcoef BatchNorm",
        NEEDS_FLOAT32,
        f"{_PAPER}, {_KERAS}",
        float16="the variance of values above 256 overflows float16",
    ),
    _Row(
        "Norm Normalize Hypot CDist PSNR SSIM Correlate",
        NEEDS_FLOAT32,
        f"{_PAPER}, {_TORCH}",
        float16="sums of squares overflow float16",
    ),
    _Row(
        "Softmax LogSoftmax Sparsemax Logsumexp",
        NEEDS_FLOAT32,
        f"{_PAPER}, {_TORCH}",
        float16="exp, sum and division: float16 flushes small probabilities to zero",
    ),
    _Row(
        "Rsqrt Tan Arcsin Arccos Erfinv",
        NEEDS_FLOAT32,
        _TORCH,
        float16="amplifies the float16 rounding errors of its input",
    ),
    _Row(
        "FFT FFT2 IFFT2 RFFT IRFFT STFT ISTFT Eig Eigh LuFactor SVD Qr Cholesky CholeskyInverse Det"
        " Logdet Slogdet Inv Pinv Solve SolveTriangular Lstsq MatrixRank Resize ScaleAndTranslate"
        " Polar",
        NEEDS_FLOAT32,
        "TensorFlow's kernels",
        reason="TensorFlow has no 16-bit kernel",
    ),
    _Row(
        "AssociativeScan Cond ForiLoop JVP Map Scan Switch VectorizedMap WhileLoop",
        NEEDS_FLOAT32,
        "kmp",
        reason="a custom function, which kmp does not inspect",
    ),
    _Row(
        "Matmul Einsum Dot Tensordot Inner Vdot Conv ConvTranspose DepthwiseConv SeparableConv",
        RUNS_IN_16_BITS,
        f"{_TORCH}, {_GRAPPLER}",
    ),
    _Row(
        "DotProductAttention",
        RUNS_IN_16_BITS,
        "Keras' source, TensorFlow's softmax_op_gpu.cu.cc",
        reason="its softmax runs in float32",
    ),
    _Row(
        "Mean LayerNorm RMSNorm",
        FOLLOWS_INPUTS,
        _KERAS,
        reason="Keras computes it in float32 for every input dtype",
    ),
)
_ROW_OF_OPERATION = {name: row for row in _TABLE for name in row.operations.split()}


def rules_of_operation(operation: keras.Operation, dtype: str) -> Iterator[OpRule]:
    """Yields the rules that match an operation of a graph; the first applies."""
    if isinstance(operation, Float32Operation):
        reason = "always computes in float32, whatever the policy"
        yield OpRule(NEEDS_FLOAT32, reason, "kmp.layers")
    calls = keras_internals.calls_of(operation)
    name = type(operation).__name__
    if any(_divides_by_its_input(name, call) for call in calls):
        yield _RECIPROCAL.rule(dtype)
    if any(_squares_its_input(name, call) for call in calls):
        yield _POWER.rule(dtype)
    if name == "Round" and vars(operation).get("decimals"):
        yield _ROUND_TO_DECIMALS.rule(dtype)
    yield from rules_of_constants(_constants_of(operation, calls), dtype)
    row = _ROW_OF_OPERATION.get(name)
    yield row.rule(dtype) if row else OpRule(FOLLOWS_INPUTS)


def _divides_by_its_input(name: str, call: Any) -> bool:
    if name not in ("Divide", "TrueDivide"):
        return False
    dividend = call.arguments.args[0] if call.arguments.args else None
    return not isinstance(dividend, keras.KerasTensor)


def _squares_its_input(name: str, call: Any) -> bool:
    if name != "Multiply":
        return False
    first, second = [*call.arguments.args, None, None][:2]
    return first is second


def _constants_of(operation: keras.Operation, calls: list[Any]) -> list[float]:
    """Returns the constants of an operation that Keras converts to the dtype of its floats."""
    constants = [value for value in vars(operation).values() if type(value) in (int, float)]
    arguments = [(call.arguments.args, call.arguments.kwargs) for call in calls]
    for value in keras.tree.flatten(arguments):
        constants += _constants_in(value)
    if any(_has_floats(call.input_tensors) for call in calls):
        return constants
    # With a float output, as in `where(mask, 0.0, -1e9)`, float constants become floats; otherwise
    # none does.
    if any(_has_floats(call.output_tensors) for call in calls):
        return [constant for constant in constants if not isinstance(constant, int)]
    return []


def _constants_in(value: Any) -> list[float]:
    """Returns the numbers in one argument of a call: itself, or the magnitudes in an array."""
    if type(value) in (int, float) or isinstance(value, np.floating):
        return [value]
    if isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.floating):
        return [float(magnitude) for magnitude in np.unique(np.abs(value))]
    return []


def _has_floats(tensors: list[keras.KerasTensor]) -> bool:
    return any(keras.backend.is_float_dtype(tensor.dtype) for tensor in tensors)
