"""Which operations of a functional graph, such as that of `keras.ops.exp(x)`, need float32.

The rules follow what Keras' code computes.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from kmp.backend import keras_internals
from kmp.conversion.einsum import EinsumKind, kind_of_einsum
from kmp.conversion.op_rule import (
    FOLLOWS_INPUTS,
    NEEDS_FLOAT32,
    RUNS_IN_16_BITS,
    OpRule,
    rules_of_constants,
)
from kmp.conversion.value_bounds import product_may_overflow
from kmp.layers.float32 import Float32Operation
from kmp.layers.float32_rules import (
    LARGEST_DEPTHWISE_KERNEL,
    LARGEST_POOL,
    LONG_SUM,
    TOO_FEW_BITS,
    longest_adaptive_window,
)
from kmp.utils.float_formats import FLOAT16

_TORCH = "torch.amp's op reference"
_GRAPPLER = "TensorFlow's auto_mixed_precision_lists.h"
_PAPER = "Micikevicius et al. 2018, section 3.3"
_KERAS = "Keras' source"


PRODUCT = "products of two large values overflow float16: 256 times 256 > 65504"


@dataclass(frozen=True)
class _Row:
    """One row of the table of operations.

    Args:
        operations: The names of classes of operations in `keras.ops`.
        category: The category of their rule.
        source: The source of their rule.
        reason: Why, in every 16-bit dtype; may be empty.
        float16: Why, in float16. bfloat16 has the range of float32, but too few bits.
        is_for_bfloat16: Whether it applies in bfloat16 too.
    """

    operations: str
    category: str
    source: str
    reason: str = ""
    float16: str = ""
    is_for_bfloat16: bool = True

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
_QUOTIENT = _Row(
    "",
    NEEDS_FLOAT32,
    "IEEE 754 binary16",
    float16="quotients of small divisors overflow float16",
    is_for_bfloat16=False,
)
_PRODUCT = _Row(
    "",
    NEEDS_FLOAT32,
    "IEEE 754 binary16",
    float16=PRODUCT,
    is_for_bfloat16=False,
)
_ROUND_TO_DECIMALS = _Row(
    "",
    NEEDS_FLOAT32,
    _KERAS,
    float16="it multiplies by a power of 10, which overflows float16",
)
_SUM = _Row(
    "Sum Nansum Nanmean Average Cumsum Nancumsum Prod Nanprod Cumprod Nancumprod Trace Trapezoid"
    " SegmentSum SegmentProd Scatter Fold Bincount Vdot",
    NEEDS_FLOAT32,
    f"{_PAPER}, {_GRAPPLER}",
    float16="long sums overflow float16 or lose small elements",
)
_LONG_SUM = _Row(
    "",
    NEEDS_FLOAT32,
    "TensorFlow's CPU kernels",
    float16=LONG_SUM,
    is_for_bfloat16=False,
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
    _SUM,
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
        "Sqrt Rsqrt Tan Arcsin Arccos Arctanh Arccosh Erfinv",
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
        "Matmul Einsum Dot Tensordot Inner Conv ConvTranspose DepthwiseConv SeparableConv",
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


def _divides_by_its_input(operation: keras.Operation, call: Any) -> bool:
    dividend = call.arguments.args[0] if call.arguments.args else None
    return not isinstance(dividend, keras.KerasTensor)


def _divides_by_a_tensor(operation: keras.Operation, call: Any) -> bool:
    divisor = call.arguments.args[1]
    return isinstance(divisor, keras.KerasTensor)


def _squares_its_input(operation: keras.Operation, call: Any) -> bool:
    first, second = [*call.arguments.args, None, None][:2]
    return first is second


def _multiplies_large_values(operation: keras.Operation, call: Any) -> bool:
    return product_may_overflow(list(call.arguments.args))


def _multiplies_large_values_by_einsum(operation: Any, call: Any) -> bool:
    is_product = kind_of_einsum(operation.subscripts) is EinsumKind.PRODUCT
    return is_product and _multiplies_large_values(operation, call)


def _rounds_to_decimals(operation: Any, call: Any) -> bool:
    return bool(operation.decimals)  # without decimals, it is exact


def _sums_by_einsum(operation: Any, call: Any) -> bool:
    return kind_of_einsum(operation.subscripts) is EinsumKind.SUM


def _is_dot_product(operation: keras.Operation, call: Any) -> bool:
    """Whether it multiplies vectors, not matrices: Tensor Cores gain nothing."""
    shape = call.output_tensors[0].shape
    return shape == () or shape[-2:] == (1, 1)


def _averages_large_windows(operation: Any, call: Any) -> bool:
    size, axes = operation.pool_size, len(call.input_tensors[0].shape) - 2
    elements = size**axes if isinstance(size, int) else math.prod(size)
    return elements > LARGEST_POOL


def _averages_long_axes(operation: Any, call: Any) -> bool:
    shape = call.input_tensors[0].shape
    window = longest_adaptive_window(shape, operation.output_size, operation.data_format)
    return window > LARGEST_POOL


def _has_large_depthwise_kernel(operation: keras.Operation, call: Any) -> bool:
    *window, _, _ = call.arguments.args[1].shape  # and its channels
    return math.prod(window) > LARGEST_DEPTHWISE_KERNEL


_Condition = Callable[[keras.Operation, Any], bool]
# By operation: the rows that apply if a condition holds for one of its calls, before its own row.
_CONDITIONS: dict[str, tuple[tuple[_Row, _Condition], ...]] = {
    "Divide": ((_RECIPROCAL, _divides_by_its_input), (_QUOTIENT, _divides_by_a_tensor)),
    "TrueDivide": ((_RECIPROCAL, _divides_by_its_input), (_QUOTIENT, _divides_by_a_tensor)),
    "DivideNoNan": ((_RECIPROCAL, _divides_by_its_input), (_QUOTIENT, _divides_by_a_tensor)),
    "Multiply": ((_POWER, _squares_its_input), (_PRODUCT, _multiplies_large_values)),
    "Round": ((_ROUND_TO_DECIMALS, _rounds_to_decimals),),
    "Einsum": ((_SUM, _sums_by_einsum), (_PRODUCT, _multiplies_large_values_by_einsum)),
    "Matmul": ((_SUM, _is_dot_product),),
    "Dot": ((_SUM, _is_dot_product),),
    "Inner": ((_SUM, _is_dot_product),),
    "Tensordot": ((_SUM, _is_dot_product),),
    "AveragePool": ((_LONG_SUM, _averages_large_windows),),
    "AdaptiveAveragePool": ((_LONG_SUM, _averages_long_axes),),
    "DepthwiseConv": ((_LONG_SUM, _has_large_depthwise_kernel),),
    "SeparableConv": ((_LONG_SUM, _has_large_depthwise_kernel),),
}


def rules_of_operation(operation: keras.Operation, dtype: str) -> Iterator[OpRule]:
    """Yields the rules that match an operation of a graph; the first applies."""
    if isinstance(operation, Float32Operation):
        reason = "always computes in float32, whatever the policy"
        yield OpRule(NEEDS_FLOAT32, reason, "kmp.layers")
    calls = keras_internals.calls_of(operation)
    name = type(operation).__name__
    for row, condition in _CONDITIONS.get(name, ()):
        is_for_dtype = row.is_for_bfloat16 or dtype == FLOAT16.name
        if is_for_dtype and any(condition(operation, call) for call in calls):
            yield row.rule(dtype)
    yield from rules_of_constants(_constants_of(operation, calls), dtype)
    own_row = _ROW_OF_OPERATION.get(name)
    yield own_row.rule(dtype) if own_row else OpRule(FOLLOWS_INPUTS)


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
