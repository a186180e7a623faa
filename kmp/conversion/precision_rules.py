"""Precision rules: which layers and operations need float32 under a float16 policy, why, and by which source.

`plan.make_plan` applies them to a model.

The rules follow what Keras' code computes. Layers that compute critical steps in float32 themselves, such as
`BatchNormalization`, may run in float16.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

from kmp import layers
from kmp.backend import direct_sublayers, is_keras_class, is_passthrough, keras_internals, sublayers
from kmp.conversion.model_parts import Part
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
        category: `RUNS_IN_FLOAT16`, `FOLLOWS_INPUTS` (safe in the dtype of its inputs) or `NEEDS_FLOAT32`.
        reason: Why, as shown to users; may be empty.
        source: The source of the rule.
    """

    category: str
    reason: str = ""
    source: str = ""


_EXP = OpRule(NEEDS_FLOAT32, "exponentials overflow float16: exp(12) > 65504", f"{_TORCH}, {_GRAPPLER}")
_LOG = OpRule(NEEDS_FLOAT32, "logarithms amplify float16 rounding errors; values flushed to zero become -Inf", _TORCH)
_POWER = OpRule(NEEDS_FLOAT32, "powers overflow float16: 256 squared > 65504", f"{_TORCH}, {_GRAPPLER}")
_SUM = OpRule(NEEDS_FLOAT32, "long sums overflow float16 or lose small elements", f"{_PAPER}, {_GRAPPLER}")
_SUM_OF_SQUARES = OpRule(NEEDS_FLOAT32, "sums of squares overflow float16", f"{_PAPER}, {_TORCH}")
_VARIANCE = OpRule(NEEDS_FLOAT32, "the variance of values above 256 overflows float16", f"{_PAPER}, {_KERAS}")
_SOFTMAX = OpRule(
    NEEDS_FLOAT32, "exp, sum and division: float16 flushes small probabilities to zero", f"{_PAPER}, {_TORCH}"
)
_RECIPROCAL = OpRule(NEEDS_FLOAT32, "reciprocals of values below 1.5e-5 overflow float16", _TORCH)
_ILL_CONDITIONED = OpRule(NEEDS_FLOAT32, "amplifies the float16 rounding errors of its input", _TORCH)
_NO_KERNEL = OpRule(NEEDS_FLOAT32, "TensorFlow has no 16-bit kernel", "TensorFlow's kernels")
_DECIMALS = OpRule(NEEDS_FLOAT32, "it multiplies by a power of 10, which overflows float16", _KERAS)
_PENALTY = OpRule(NEEDS_FLOAT32, "the regularization penalty sums all outputs or their squares", _PAPER)
_ADDS_LOSS = OpRule(NEEDS_FLOAT32, "calls add_loss: losses sum many elements and must be float32", _GUIDE)
_CUSTOM_FUNCTION = OpRule(NEEDS_FLOAT32, "a custom function, which kmp does not inspect", "kmp")
_ALWAYS_FLOAT32 = OpRule(NEEDS_FLOAT32, "always computes in float32, whatever the policy", "kmp.layers")
_MATRIX = OpRule(RUNS_IN_FLOAT16, "", f"{_TORCH}, {_GRAPPLER}")
_ATTENTION = OpRule(
    RUNS_IN_FLOAT16,
    "without dropout, if Keras uses ops.dot_product_attention, its softmax runs in float32; otherwise in float16, with "
    "float32 accumulation on GPUs",
    "Keras' source, TensorFlow's softmax_op_gpu.cu.cc",
)
_STATISTICS = OpRule(RUNS_IN_FLOAT16, "Keras computes the statistics in float32", _KERAS)
_UPCAST = OpRule(FOLLOWS_INPUTS, "Keras computes it in float32 for every input dtype", _KERAS)
_LAYER_WITH_WEIGHTS = OpRule(RUNS_IN_FLOAT16)
_NOT_EXAMINED = "a custom layer: kmp does not examine its `call`"
_CUSTOM_LAYER = OpRule(RUNS_IN_FLOAT16, _NOT_EXAMINED, "kmp")
_CUSTOM_LAYER_WITHOUT_WEIGHTS = OpRule(FOLLOWS_INPUTS, _NOT_EXAMINED, "kmp")
_DEFAULT = OpRule(FOLLOWS_INPUTS)

# Class names of the operations in `keras.ops`.
_OPERATION_NAMES = {
    _EXP: "Exp Exp2 Expm1 Sinh Cosh I0",
    _LOG: "Log Log10 Log1p Log2 BinaryCrossentropy CategoricalCrossentropy SparseCategoricalCrossentropy CTCLoss",
    _POWER: "Power Square Squareplus Vander Kron Outer Cross",
    _SUM: (
        "Sum Nansum Nanmean Average Cumsum Nancumsum Prod Nanprod Cumprod Nancumprod Trace Trapezoid "
        "SegmentSum SegmentProd Scatter Fold Bincount"
    ),
    _VARIANCE: "Var Std Nanvar Nanstd Moments Corrcoef BatchNorm",
    _SUM_OF_SQUARES: "Norm Normalize Hypot CDist PSNR SSIM Correlate",
    _NO_KERNEL: (
        "FFT FFT2 IFFT2 RFFT IRFFT STFT ISTFT Eig Eigh LuFactor SVD Qr Cholesky CholeskyInverse Det Logdet Slogdet Inv "
        "Pinv Solve SolveTriangular Lstsq MatrixRank Resize ScaleAndTranslate Polar"
    ),
    _SOFTMAX: "Softmax LogSoftmax Sparsemax Logsumexp",
    _RECIPROCAL: "Reciprocal RGBToHSV",
    _CUSTOM_FUNCTION: "AssociativeScan Cond ForiLoop JVP Map Scan Switch VectorizedMap WhileLoop",
    _ILL_CONDITIONED: "Rsqrt Tan Arcsin Arccos Erfinv",
    _MATRIX: "Matmul Einsum Dot Tensordot Inner Vdot Conv ConvTranspose DepthwiseConv SeparableConv",
    _ATTENTION: "DotProductAttention",
    _UPCAST: "Mean LayerNorm RMSNorm",
}
_RULE_OF_OPERATION = {name: rule for rule, names in _OPERATION_NAMES.items() for name in names.split()}

_RULE_OF_ACTIVATION = {
    "softmax": _SOFTMAX,
    "log_softmax": _SOFTMAX,
    "sparsemax": _SOFTMAX,
    "exponential": _EXP,
    "squareplus": _POWER,
}

# The first class that matches applies, also to subclasses. `kmp.layers.float32_classes` has those that fail in 16 bits.
_LAYER_NAMES = {
    _SOFTMAX: "Softmax",
    _CUSTOM_FUNCTION: "Lambda",
    _STATISTICS: "BatchNormalization LayerNormalization GroupNormalization RMSNormalization",
    _ATTENTION: "Attention AdditiveAttention MultiHeadAttention GroupQueryAttention",
    _MATRIX: (
        "Dense EinsumDense Dot Embedding RNN "
        "SimpleRNNCell LSTMCell GRUCell Conv1D Conv2D Conv3D Conv1DTranspose Conv2DTranspose Conv3DTranspose "
        "DepthwiseConv1D DepthwiseConv2D SeparableConv1D SeparableConv2D"
    ),
}
_RULE_OF_LAYER = [  # some exist only in later Keras versions
    (getattr(keras.layers, name), rule)
    for rule, names in _LAYER_NAMES.items()
    for name in names.split()
    if hasattr(keras.layers, name)
]


def rule_for(part: Part, dtype: str = FLOAT16.name) -> OpRule:
    """Returns the precision rule for a layer or operation: the first that matches it.

    Args:
        part: The layer or operation.
        dtype: The compute dtype that it would have, `"float16"` or `"bfloat16"`.
    """
    rules = _LAYER_RULES if part.is_layer else _OPERATION_RULES
    rule = next(rule for find in rules if (rule := find(part.operation, dtype)))
    if dtype == FLOAT16.name or rule.category != NEEDS_FLOAT32 or not re.search(r"\bfloat16\b", rule.reason):
        return rule
    return replace(rule, reason=_TOO_FEW_BITS)


def _always_float32(operation: keras.Operation, dtype: str) -> OpRule | None:
    is_always_float32 = isinstance(operation, layers.Float32 | layers.Softmax | layers.Float32Operation)
    return _ALWAYS_FLOAT32 if is_always_float32 else None


def _by_arguments(operation: keras.Operation, dtype: str) -> OpRule | None:
    """Returns the rule for the arguments of an operation: the same tensor twice, and constants outside the range."""
    name, calls = type(operation).__name__, keras_internals.calls_of(operation)
    for call in calls:
        first, second = [*call.arguments.args, None, None][:2]
        if name in ("Divide", "TrueDivide") and not isinstance(first, keras.KerasTensor):
            return _RECIPROCAL
        if name == "Multiply" and first is second:
            return _POWER
    if name == "Round" and vars(operation).get("decimals"):
        return _DECIMALS

    constants = [value for value in vars(operation).values() if type(value) in (int, float)]
    for value in keras.tree.flatten([[call.arguments.args, call.arguments.kwargs] for call in calls]):
        if type(value) in (int, float) or isinstance(value, np.floating):
            constants.append(value)
        elif isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.floating):
            constants += [float(magnitude) for magnitude in np.unique(np.abs(value)) if magnitude]
    if not any(keras.backend.is_float_dtype(tensor.dtype) for call in calls for tensor in call.input_tensors):
        # With a float output, as in `where(mask, 0.0, -1e9)`, float constants become floats; otherwise none does.
        is_float = any(keras.backend.is_float_dtype(tensor.dtype) for call in calls for tensor in call.output_tensors)
        constants = [constant for constant in constants if is_float and not isinstance(constant, int)]
    return _out_of_range_rule(constants, dtype)


def _by_operation_class(operation: keras.Operation, dtype: str) -> OpRule:
    return _RULE_OF_OPERATION.get(type(operation).__name__, _DEFAULT)


def _listed(layer: keras.Layer, dtype: str) -> OpRule | None:
    reason = layers.reason_for_float32(layer, dtype)
    module = type(layer).__module__
    return OpRule(NEEDS_FLOAT32, reason, _KERAS if is_keras_class(type(layer)) else module) if reason else None


def _by_configuration(layer: keras.Layer, dtype: str) -> OpRule | None:
    for name in ("activation", "recurrent_activation"):
        activation = getattr(layer, name, None)
        if isinstance(activation, keras.layers.Softmax):
            return _SOFTMAX
        rule = _RULE_OF_ACTIVATION.get(getattr(activation, "__name__", ""))
        if rule is not None:
            return rule
    if getattr(layer, "activity_regularizer", None) is not None:
        return _PENALTY
    code = getattr(inspect.unwrap(type(layer).call), "__code__", None)
    if code is not None and "add_loss" in code.co_names and not any(direct_sublayers(layer)):
        return _ADDS_LOSS
    epsilon = getattr(layer, "epsilon", None)
    if isinstance(epsilon, float) and not is_keras_class(type(layer)):
        return _out_of_range_rule([epsilon], dtype)
    return None


def _by_float_indices(layer: keras.Layer, dtype: str) -> OpRule | None:
    """Returns the rule for a layer around a look-up whose indices may be in an `Input` of floats, which it would round.

    Look-up layers and functional models do not cast their arguments to their compute dtype.
    """
    rows = max(map(exact_indices.rows_of, sublayers(layer)))
    if exact_indices.rows_of(layer) or is_passthrough(layer) or not exact_indices.rounds_indices(rows, dtype):
        return None
    for tensor in (tensor for call in keras_internals.calls_of(layer) for tensor in call.input_tensors):
        source = keras_internals.producer_of(tensor)
        if isinstance(source, keras.layers.InputLayer) and keras.backend.is_float_dtype(tensor.dtype):
            looked_up = f"{rows} rows" if rows < math.inf else "any integer"
            declare = f"declare keras.Input(..., name={source.name!r}, dtype='int32') if it holds the indices"
            reason = f"it looks up {looked_up} and gets input {source.name!r} as floats: {declare}"
            return OpRule(NEEDS_FLOAT32, reason, _KERAS)
    return None


def _by_layer_class(layer: keras.Layer, dtype: str) -> OpRule:
    for layer_class, rule in _RULE_OF_LAYER:
        if isinstance(layer, layer_class):
            return rule
    if not keras.backend.is_float_dtype(layer.compute_dtype):  # a lookup of strings or integers
        return _DEFAULT
    # Not for models that only call layers in a graph: their `call` is that of Keras.
    module = str(getattr(inspect.unwrap(type(layer).call), "__module__", ""))
    if not module.startswith(("keras.", "kmp.")):
        return _CUSTOM_LAYER if layer.weights else _CUSTOM_LAYER_WITHOUT_WEIGHTS
    return _LAYER_WITH_WEIGHTS if layer.weights else _DEFAULT


_LAYER_RULES: tuple[Callable[[Any, str], OpRule | None], ...] = (
    _always_float32,
    _listed,
    _by_configuration,
    _by_float_indices,
    _by_layer_class,
)
_OPERATION_RULES: tuple[Callable[[Any, str], OpRule | None], ...] = (
    _always_float32,
    _by_arguments,
    _by_operation_class,
)


def _out_of_range_rule(constants: Iterable[float], dtype: str) -> OpRule | None:
    number_format, source = FORMATS_16_BIT[dtype], _IEEE if dtype == FLOAT16.name else _BFLOAT16
    for constant in constants:
        magnitude = abs(constant)
        if math.isfinite(magnitude) and magnitude > number_format.max:
            reason = f"the constant {constant:g} exceeds {number_format.max:g} and overflows in {dtype}"
            return OpRule(NEEDS_FLOAT32, reason, source)
        if 0.0 < magnitude <= 2.0**number_format.flush_exponent:
            smallest = number_format.smallest_subnormal
            return OpRule(
                NEEDS_FLOAT32, f"the constant {constant:g} is below {smallest:.0g} and is zero in {dtype}", source
            )
    return None
