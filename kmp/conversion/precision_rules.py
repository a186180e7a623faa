"""What float16 does to a layer or an operation: the field's three kinds, each category with its reason and its source.

Judged by what Keras' code does, not by names alone: layers that take their own arithmetic up to float32, as
`BatchNormalization` does, are in no danger.
"""

import inspect
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from kmp import layers
from kmp.backend import direct_sublayers, is_keras_class, keras_internals
from kmp.conversion.model_parts import Part
from kmp.layers import Float32Operation
from kmp.utils import FLOAT16

RUNS_IN_FLOAT16 = "float16"
FOLLOWS_INPUTS = "follows its inputs"
NEEDS_FLOAT32 = "float32"

_TORCH = "torch.amp's op reference"
_GRAPPLER = "TensorFlow's auto_mixed_precision_lists.h"
_PAPER = "Micikevicius et al. 2018, section 3.3"
_KERAS = "Keras' source"
_GUIDE = "Keras' guide to mixed precision"
_FORMAT = "IEEE 754 binary16"


@dataclass(frozen=True)
class OpRule:
    """What float16 means for one part of a model.

    Args:
        kind: `RUNS_IN_FLOAT16`, `FOLLOWS_INPUTS` (safe wherever its inputs are) or `NEEDS_FLOAT32`.
        reason: Why, in words; empty where there is nothing to say.
        source: Where the rule comes from.
    """

    category: str
    reason: str = ""
    source: str = ""


_EXP = OpRule(NEEDS_FLOAT32, "exponentials leave float16's range: exp(12) is beyond 65504", f"{_TORCH}, {_GRAPPLER}")
_LOG = OpRule(NEEDS_FLOAT32, "logarithms of what float16 rounded are off, and -inf at zero", _TORCH)
_POWER = OpRule(NEEDS_FLOAT32, "powers leave float16's range: 256 squared is beyond 65504", f"{_TORCH}, {_GRAPPLER}")
_SUM = OpRule(NEEDS_FLOAT32, "sums of many elements go beyond 65504, or lose the small ones", f"{_PAPER}, {_GRAPPLER}")
_NORM = OpRule(NEEDS_FLOAT32, "sums of squares go beyond 65504", f"{_PAPER}, {_TORCH}")
_VARIANCE = OpRule(NEEDS_FLOAT32, "the variance of values beyond 256 is beyond 65504", f"{_PAPER}, {_KERAS}")
_SOFTMAX = OpRule(NEEDS_FLOAT32, "exp, sum, quotient: float16 rounds small probabilities to 0", f"{_PAPER}, {_TORCH}")
_RECIPROCAL = OpRule(NEEDS_FLOAT32, "the reciprocal of less than 1.5e-5 is beyond 65504", _TORCH)
_STEEP = OpRule(NEEDS_FLOAT32, "steep: it magnifies what float16 rounds off its input", _TORCH)
_NO_KERNEL = OpRule(NEEDS_FLOAT32, "TensorFlow has no kernel for float16", "TensorFlow's kernels")
_PENALTY = OpRule(NEEDS_FLOAT32, "the penalty sums over the output's elements, or their squares", _PAPER)
_LOSS = OpRule(NEEDS_FLOAT32, "it calls add_loss: losses are float32, and sum over many elements", _GUIDE)
_REWRITES = OpRule(NEEDS_FLOAT32, "it writes its kernel back as computed, which float16 rounds to 11 bits", _KERAS)
_RAW = OpRule(NEEDS_FLOAT32, "data that comes in may lie beyond 65504 before this brings it into range", _GUIDE)
_UNKNOWN = OpRule(NEEDS_FLOAT32, "a function of your own: what it computes is not known", "kmp")
_OURS = OpRule(NEEDS_FLOAT32, "float32 by itself, whatever the policy", "kmp.layers")
_MATRIX = OpRule(RUNS_IN_FLOAT16, "", f"{_TORCH}, {_GRAPPLER}")
_ATTENTION = OpRule(
    RUNS_IN_FLOAT16,
    "its softmax is in float32 without dropout, where Keras takes ops.dot_product_attention; else in float16, added up "
    "in float32 on GPUs",
    "Keras' source, TensorFlow's softmax_op_gpu.cu.cc",
)
_STATISTICS = OpRule(RUNS_IN_FLOAT16, "Keras takes the statistics in float32", _KERAS)
_LIFTED = OpRule(FOLLOWS_INPUTS, "Keras computes it in float32, whatever comes in", _KERAS)
_OWN = OpRule(RUNS_IN_FLOAT16)
_ANY = OpRule(FOLLOWS_INPUTS)

# The operations of `keras.ops`, by the name of their class.
_OPERATIONS = {
    _EXP: "Exp Exp2 Expm1 Sinh Cosh I0",
    _LOG: "Log Log10 Log1p Log2 BinaryCrossentropy CategoricalCrossentropy SparseCategoricalCrossentropy CTCLoss",
    _POWER: "Power Square Squareplus Vander Kron",
    _SUM: (
        "Sum Nansum Nanmean Average Cumsum Nancumsum Prod Nanprod Cumprod Nancumprod SegmentReduction Trace Trapezoid"
    ),
    _VARIANCE: "Var Std Nanvar Nanstd Moments Corrcoef BatchNorm",
    _NORM: "Norm Normalize Hypot CDist PSNR SSIM Correlate",
    _NO_KERNEL: (
        "FFT FFT2 IFFT2 RFFT IRFFT STFT ISTFT Eig Eigh LuFactor SVD Qr Cholesky CholeskyInverse Det Logdet Slogdet Inv "
        "Pinv Solve SolveTriangular Lstsq MatrixRank"
    ),
    _SOFTMAX: "Softmax LogSoftmax Sparsemax Logsumexp",
    _RECIPROCAL: "Reciprocal",
    _STEEP: "Rsqrt Tan Arcsin Arccos Erfinv",
    _MATRIX: "Matmul Einsum Dot Tensordot Inner Vdot Conv ConvTranspose DepthwiseConv SeparableConv",
    _ATTENTION: "DotProductAttention",
    _LIFTED: "Mean LayerNorm RMSNorm",
}
_OF_OPERATION = {name: category for category, names in _OPERATIONS.items() for name in names.split()}

_OF_ACTIVATION = {
    "softmax": _SOFTMAX,
    "log_softmax": _SOFTMAX,
    "sparsemax": _SOFTMAX,
    "exponential": _EXP,
    "squareplus": _POWER,
}

# The first that fits: subclasses of Keras' layers are judged as these are.
_OF_LAYER = {
    _OURS: "kmp.Softmax kmp.Float32",
    _SOFTMAX: "Softmax",
    _NORM: "UnitNormalization",
    _PENALTY: "ActivityRegularization",
    _REWRITES: "SpectralNormalization",
    _RAW: "Normalization Rescaling Discretization MelSpectrogram STFTSpectrogram",
    _UNKNOWN: "Lambda",
    _SUM: "GlobalAveragePooling1D",  # its mean is a sum where it has a mask
    _STATISTICS: "BatchNormalization LayerNormalization GroupNormalization RMSNormalization",
    _ATTENTION: "Attention AdditiveAttention MultiHeadAttention GroupQueryAttention",
    _MATRIX: (
        "Dense EinsumDense Dot Embedding RNN "
        "SimpleRNNCell LSTMCell GRUCell Conv1D Conv2D Conv3D Conv1DTranspose Conv2DTranspose Conv3DTranspose "
        "DepthwiseConv1D DepthwiseConv2D SeparableConv1D SeparableConv2D"
    ),
}


def _kinds_of_layers() -> Iterator[tuple[type, OpRule]]:
    for category, names in _OF_LAYER.items():
        for name in names.split():
            home = layers if name.startswith("kmp.") else keras.layers
            kind = getattr(home, name.removeprefix("kmp."), None)  # some came with later versions of Keras
            if kind is not None:
                yield kind, category


_KINDS = tuple(_kinds_of_layers())


def rule_for(part: Part) -> OpRule:
    """Returns what float16 means for a part of a model, by what it is and how it is set."""
    if isinstance(part.operation, Float32Operation):
        return _OURS
    if not part.is_layer:
        return _of_operation(part.operation)
    return _of_settings(part.operation) or next(
        (category for kind, category in _KINDS if isinstance(part.operation, kind)), _of_home(part.operation)
    )


def _of_operation(operation: keras.Operation) -> OpRule:
    name = type(operation).__name__
    for node in keras_internals.calls_of(operation):
        first, second = [*node.arguments.args, None, None][:2]
        if name in ("Divide", "TrueDivide") and not isinstance(first, keras.KerasTensor):
            return _RECIPROCAL
        if name == "Multiply" and first is second:
            return _POWER
    return _beyond_range(_float_constants_of(operation)) or _OF_OPERATION.get(name, _ANY)


def _float_constants_of(operation: keras.Operation) -> list[float]:
    """Returns the constants that meet floats.

    All of them where floats come in; the floats among them where only what comes out is one, as of
    `where(mask, 0.0, -1e9)`; none where neither is.
    """
    calls, constants = keras_internals.calls_of(operation), list(_constants_of(operation))
    if _any_float(tensor for call in calls for tensor in call.input_tensors):
        return constants
    if _any_float(tensor for call in calls for tensor in call.output_tensors):
        return [constant for constant in constants if not isinstance(constant, int)]
    return []


def _any_float(tensors: Iterable[Any]) -> bool:
    return any(keras.backend.is_float_dtype(tensor.dtype) for tensor in tensors)


def _of_settings(layer: keras.Layer) -> OpRule | None:
    for name in ("activation", "recurrent_activation"):
        activation = getattr(layer, name, None)
        if isinstance(activation, keras.layers.Softmax):
            return _SOFTMAX
        judged = _OF_ACTIVATION.get(getattr(activation, "__name__", ""))
        if judged is not None:
            return judged
    if getattr(layer, "activity_regularizer", None) is not None:
        return _PENALTY
    if _adds_a_loss(layer) and not any(direct_sublayers(layer)):
        return _LOSS
    epsilon = getattr(layer, "epsilon", None)
    if isinstance(epsilon, float) and not is_keras_class(type(layer)):
        return _beyond_range([epsilon])
    return None


def _adds_a_loss(layer: keras.Layer) -> bool:
    code = getattr(inspect.unwrap(type(layer).call), "__code__", None)
    return code is not None and "add_loss" in code.co_names


def _of_home(layer: keras.Layer) -> OpRule:
    if not keras.backend.is_float_dtype(layer.compute_dtype):  # it looks words or numbers up
        return _ANY
    if is_keras_class(type(layer)) and ".layers.preprocessing." in type(layer).__module__:
        return _RAW
    return _OWN if layer.weights else _ANY


def _beyond_range(constants: Any) -> OpRule | None:
    for constant in constants:
        size = abs(constant)
        if math.isfinite(size) and size > FLOAT16.max:
            return OpRule(NEEDS_FLOAT32, f"the constant {constant:g} is beyond 65504, and inf in float16", _FORMAT)
        if 0.0 < size <= 2.0**FLOAT16.flush_exponent:
            return OpRule(NEEDS_FLOAT32, f"the constant {constant:g} is below 6e-8, and 0 in float16", _FORMAT)
    return None


def _constants_of(operation: keras.Operation) -> Iterator[float]:
    """Yields the constants that an operation of a graph was made with and is called with."""
    yield from (value for value in vars(operation).values() if type(value) in (int, float))
    for node in keras_internals.calls_of(operation):
        for value in keras.tree.flatten([node.arguments.args, node.arguments.kwargs]):
            if type(value) in (int, float) or isinstance(value, np.floating):
                yield value
            elif isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.floating):
                yield from (float(one) for one in np.unique(np.abs(value)) if one)
