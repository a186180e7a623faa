"""Precision rules: which layers and operations need float32 under a float16 policy, why, and by which source.

`plan.make_plan` applies them to a model.

The rules follow what Keras' code computes. Layers that compute critical steps in float32
themselves, such as `BatchNormalization`, may run in float16.
"""

import inspect
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import keras
import numpy as np

from kmp import layers
from kmp.backend import direct_sublayers, is_keras_class, is_passthrough, keras_internals, sublayers
from kmp.policy import exact_indices
from kmp.utils import FLOAT16, FORMATS_16_BIT

RUNS_IN_FLOAT16 = "float16"
FOLLOWS_INPUTS = "follows its inputs"
NEEDS_FLOAT32 = "float32"

_TORCH = "torch.amp's op reference"
_GRAPPLER = "TensorFlow's auto_mixed_precision_lists.h"
_PAPER = "Micikevicius et al. 2018, section 3.3"
_KERAS = "Keras' source"
_GUIDE = "Keras' guide to mixed precision"
_IEEE = "IEEE 754 binary16"
_BFLOAT16 = "bfloat16's format"
_TOO_FEW_BITS = "bfloat16 has 8 significant bits, too few for this operation"


@dataclass(frozen=True)
class OpRule:
    """The precision rule for one layer or operation.

    Args:
        category: `RUNS_IN_FLOAT16`, `FOLLOWS_INPUTS` (safe in the dtype of its inputs) or
            `NEEDS_FLOAT32`.
        reason: Why, as shown to users; may be empty.
        source: The source of the rule.
    """

    category: str
    reason: str = ""
    source: str = ""


_EXP = OpRule(
    NEEDS_FLOAT32, "exponentials overflow float16: exp(12) > 65504", f"{_TORCH}, {_GRAPPLER}"
)
_LOG = OpRule(
    NEEDS_FLOAT32,
    "logarithms amplify float16 rounding errors; values flushed to zero become -Inf",
    _TORCH,
)
_POWER = OpRule(
    NEEDS_FLOAT32, "powers overflow float16: 256 squared > 65504", f"{_TORCH}, {_GRAPPLER}"
)
_SUM = OpRule(
    NEEDS_FLOAT32, "long sums overflow float16 or lose small elements", f"{_PAPER}, {_GRAPPLER}"
)
_SUM_OF_SQUARES = OpRule(NEEDS_FLOAT32, "sums of squares overflow float16", f"{_PAPER}, {_TORCH}")
_VARIANCE = OpRule(
    NEEDS_FLOAT32, "the variance of values above 256 overflows float16", f"{_PAPER}, {_KERAS}"
)
_SOFTMAX = OpRule(
    NEEDS_FLOAT32,
    "exp, sum and division: float16 flushes small probabilities to zero",
    f"{_PAPER}, {_TORCH}",
)
_RECIPROCAL = OpRule(NEEDS_FLOAT32, "reciprocals of values below 1.5e-5 overflow float16", _TORCH)
_ILL_CONDITIONED = OpRule(
    NEEDS_FLOAT32, "amplifies the float16 rounding errors of its input", _TORCH
)
_NO_KERNEL = OpRule(NEEDS_FLOAT32, "TensorFlow has no 16-bit kernel", "TensorFlow's kernels")
_DECIMALS = OpRule(NEEDS_FLOAT32, "it multiplies by a power of 10, which overflows float16", _KERAS)
_PENALTY = OpRule(
    NEEDS_FLOAT32, "the regularization penalty sums all outputs or their squares", _PAPER
)
_ADDS_LOSS = OpRule(
    NEEDS_FLOAT32, "calls add_loss: losses sum many elements and must be float32", _GUIDE
)
_CUSTOM_FUNCTION = OpRule(NEEDS_FLOAT32, "a custom function, which kmp does not inspect", "kmp")
_ALWAYS_FLOAT32 = OpRule(
    NEEDS_FLOAT32, "always computes in float32, whatever the policy", "kmp.layers"
)
_MATRIX = OpRule(RUNS_IN_FLOAT16, "", f"{_TORCH}, {_GRAPPLER}")
_ATTENTION = OpRule(
    RUNS_IN_FLOAT16,
    "without dropout, if Keras uses ops.dot_product_attention, its softmax runs in float32;"
    " otherwise in float16, with float32 accumulation on GPUs",
    "Keras' source, TensorFlow's softmax_op_gpu.cu.cc",
)
_STATISTICS = OpRule(RUNS_IN_FLOAT16, "Keras computes the statistics in float32", _KERAS)
_UPCAST = OpRule(FOLLOWS_INPUTS, "Keras computes it in float32 for every input dtype", _KERAS)
_NOT_EXAMINED = "a custom layer: kmp does not examine its `call`"
_DEFAULT = OpRule(FOLLOWS_INPUTS)

# Class names of the operations in `keras.ops`.
_OPERATION_NAMES = {
    _EXP: "Exp Exp2 Expm1 Sinh Cosh I0",
    _LOG: (
        "Log Log10 Log1p Log2 BinaryCrossentropy CategoricalCrossentropy"
        " SparseCategoricalCrossentropy CTCLoss"
    ),
    _POWER: "Power Square Squareplus Vander Kron Outer Cross",
    _SUM: (
        "Sum Nansum Nanmean Average Cumsum Nancumsum Prod Nanprod Cumprod Nancumprod Trace"
        " Trapezoid SegmentSum SegmentProd Scatter Fold Bincount"
    ),
    _VARIANCE: "Var Std Nanvar Nanstd Moments Corrcoef BatchNorm",
    _SUM_OF_SQUARES: "Norm Normalize Hypot CDist PSNR SSIM Correlate",
    _NO_KERNEL: (
        "FFT FFT2 IFFT2 RFFT IRFFT STFT ISTFT Eig Eigh LuFactor SVD Qr Cholesky CholeskyInverse Det"
        " Logdet Slogdet Inv Pinv Solve SolveTriangular Lstsq MatrixRank Resize ScaleAndTranslate"
        " Polar"
    ),
    _SOFTMAX: "Softmax LogSoftmax Sparsemax Logsumexp",
    _RECIPROCAL: "Reciprocal RGBToHSV",
    _CUSTOM_FUNCTION: "AssociativeScan Cond ForiLoop JVP Map Scan Switch VectorizedMap WhileLoop",
    _ILL_CONDITIONED: "Rsqrt Tan Arcsin Arccos Erfinv",
    _MATRIX: (
        "Matmul Einsum Dot Tensordot Inner Vdot Conv ConvTranspose DepthwiseConv SeparableConv"
    ),
    _ATTENTION: "DotProductAttention",
    _UPCAST: "Mean LayerNorm RMSNorm",
}
_RULE_OF_OPERATION = {
    name: rule for rule, names in _OPERATION_NAMES.items() for name in names.split()
}

_RULE_OF_ACTIVATION = {
    "softmax": _SOFTMAX,
    "log_softmax": _SOFTMAX,
    "sparsemax": _SOFTMAX,
    "exponential": _EXP,
    "squareplus": _POWER,
}

# The first class that matches applies, also to subclasses. `kmp.layers.float32_classes` has those
# that fail in 16 bits.
_LAYER_NAMES = {
    _SOFTMAX: "Softmax",
    _CUSTOM_FUNCTION: "Lambda",
    _STATISTICS: "BatchNormalization LayerNormalization GroupNormalization RMSNormalization",
    _ATTENTION: "Attention AdditiveAttention MultiHeadAttention GroupQueryAttention",
    _MATRIX: (
        "Dense EinsumDense Dot Embedding RNN SimpleRNNCell LSTMCell GRUCell Conv1D Conv2D Conv3D"
        " Conv1DTranspose Conv2DTranspose Conv3DTranspose DepthwiseConv1D DepthwiseConv2D"
        " SeparableConv1D SeparableConv2D"
    ),
}
_RULE_OF_LAYER = [
    (getattr(keras.layers, name), rule)
    for rule, names in _LAYER_NAMES.items()
    for name in names.split()
]


def rule_for(operation: keras.Operation, dtype: str = FLOAT16.name) -> OpRule:
    """Returns the rule for a layer or operation that would compute in `dtype`: the first that matches it."""
    is_layer = isinstance(operation, keras.Layer)
    rule = next((_rules_of_layer if is_layer else _rules_of_operation)(operation, dtype))
    if (
        dtype == FLOAT16.name
        or rule.category != NEEDS_FLOAT32
        or not re.search(r"\bfloat16\b", rule.reason)
    ):
        return rule
    return replace(rule, reason=_TOO_FEW_BITS)


def _rules_of_operation(operation: keras.Operation, dtype: str) -> Iterator[OpRule]:
    """Yields the rules that match an operation of a graph; the first applies."""
    if isinstance(operation, layers.Float32Operation):
        yield _ALWAYS_FLOAT32
    name, calls = type(operation).__name__, keras_internals.calls_of(operation)
    for call in calls:
        first, second = [*call.arguments.args, None, None][:2]
        if name in ("Divide", "TrueDivide") and not isinstance(first, keras.KerasTensor):
            yield _RECIPROCAL
        if name == "Multiply" and first is second:
            yield _POWER
    if name == "Round" and vars(operation).get("decimals"):
        yield _DECIMALS

    constants = [value for value in vars(operation).values() if type(value) in (int, float)]
    for value in keras.tree.flatten(
        [[call.arguments.args, call.arguments.kwargs] for call in calls]
    ):
        if type(value) in (int, float) or isinstance(value, np.floating):
            constants.append(value)
        elif isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.floating):
            constants += [float(magnitude) for magnitude in np.unique(np.abs(value)) if magnitude]
    if not any(
        keras.backend.is_float_dtype(tensor.dtype)
        for call in calls
        for tensor in call.input_tensors
    ):
        # With a float output, as in `where(mask, 0.0, -1e9)`, float constants become floats;
        # otherwise none does.
        is_float = any(
            keras.backend.is_float_dtype(tensor.dtype)
            for call in calls
            for tensor in call.output_tensors
        )
        constants = [
            constant for constant in constants if is_float and not isinstance(constant, int)
        ]
    yield from _rules_of_constants(constants, dtype)
    yield _RULE_OF_OPERATION.get(name, _DEFAULT)


def _rules_of_layer(layer: keras.Layer, dtype: str) -> Iterator[OpRule]:
    """Yields the rules that match a layer; the first applies."""
    if isinstance(layer, layers.Float32 | layers.Softmax):
        yield _ALWAYS_FLOAT32
    reason = layers.reason_for_float32(layer, dtype)
    if reason:
        yield OpRule(
            NEEDS_FLOAT32, reason, _KERAS if is_keras_class(type(layer)) else type(layer).__module__
        )
    for name in ("activation", "recurrent_activation"):
        activation = getattr(layer, name, None)
        if isinstance(activation, keras.layers.Softmax):
            yield _SOFTMAX
        name_of_function = getattr(activation, "__name__", "")
        if name_of_function in _RULE_OF_ACTIVATION:
            yield _RULE_OF_ACTIVATION[name_of_function]
    if getattr(layer, "activity_regularizer", None) is not None:
        yield _PENALTY
    call = inspect.unwrap(type(layer).call)
    if "add_loss" in getattr(getattr(call, "__code__", None), "co_names", ()) and not any(
        direct_sublayers(layer)
    ):
        yield _ADDS_LOSS
    epsilon = getattr(layer, "epsilon", None)
    if isinstance(epsilon, float) and not is_keras_class(type(layer)):
        yield from _rules_of_constants([epsilon], dtype)
    yield from _rules_of_float_indices(layer, dtype)
    yield from (rule for layer_class, rule in _RULE_OF_LAYER if isinstance(layer, layer_class))
    # Not for models that only call layers in a graph, whose `call` is that of Keras, nor for
    # look-ups of strings.
    module = str(getattr(call, "__module__", ""))
    if keras.backend.is_float_dtype(layer.compute_dtype):
        category = RUNS_IN_FLOAT16 if layer.weights else FOLLOWS_INPUTS
        is_custom = not module.startswith(("keras.", "kmp."))
        yield OpRule(category, _NOT_EXAMINED, "kmp") if is_custom else OpRule(category)
    yield _DEFAULT


def _rules_of_float_indices(layer: keras.Layer, dtype: str) -> Iterator[OpRule]:
    """Yields a rule for a layer around a look-up whose indices may be in an `Input` of floats, which it would round.

    Look-up layers and functional models do not cast their arguments to their compute dtype.
    """
    rows = max(map(exact_indices.rows_of, sublayers(layer)))
    if (
        exact_indices.rows_of(layer)
        or is_passthrough(layer)
        or not exact_indices.rounds_indices(rows, dtype)
    ):
        return
    for tensor in (
        tensor for call in keras_internals.calls_of(layer) for tensor in call.input_tensors
    ):
        source = keras_internals.producer_of(tensor)
        if isinstance(source, keras.layers.InputLayer) and keras.backend.is_float_dtype(
            tensor.dtype
        ):
            looked_up = f"{rows} rows" if rows < math.inf else "any integer"
            declare = (
                f"declare keras.Input(..., name={source.name!r}, dtype='int32') if it holds the"
                " indices"
            )
            reason = f"it looks up {looked_up} and gets input {source.name!r} as floats: {declare}"
            yield OpRule(NEEDS_FLOAT32, reason, _KERAS)


def _rules_of_constants(constants: Iterable[float], dtype: str) -> Iterator[OpRule]:
    """Yields a rule for each constant that is Inf or 0 in `dtype`."""
    number_format, source = FORMATS_16_BIT[dtype], _IEEE if dtype == FLOAT16.name else _BFLOAT16
    for constant in constants:
        magnitude = abs(constant)
        if math.isfinite(magnitude) and magnitude > number_format.max:
            reason = (
                f"the constant {constant:g} exceeds {number_format.max:g} and overflows in {dtype}"
            )
            yield OpRule(NEEDS_FLOAT32, reason, source)
        elif 0.0 < magnitude <= 2.0**number_format.flush_exponent:
            smallest = number_format.smallest_subnormal
            reason = f"the constant {constant:g} is below {smallest:.0g} and is zero in {dtype}"
            yield OpRule(NEEDS_FLOAT32, reason, source)
