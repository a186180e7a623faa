"""How large the values in a graph can be, whatever the data: 1 after a sigmoid, for example.

A product of two tensors overflows float16 if both are large, as the width and the height of a box.
Most products in models are gates, though: one factor is bounded, and they are safe in float16.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

from kmp.backend import keras_internals
from kmp.utils.float_formats import FLOAT16

# Steps back in a graph, after which a value counts as unbounded.
_MOST_STEPS = 50
# The largest bound of a gate: its product with a value in range leaves the range in few cases, as
# does a product with a constant.
_LARGEST_GATE = 64.0
# The largest normalized value of n is sqrt(n); of 768 it is 28.
_NORMALIZED = 32.0
# Weights are learned and small, by their regularization if not by their initial values.
_LEARNED = 1.0


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BOUNDS: dict[str, float] = {
    **dict.fromkeys(
        _names(
            "hardsigmoid hardtanh cos erf heaviside multihot onehot sigmoid sign sin sinc softmax"
            " softsign sparsemax sparsesigmoid tanh"
        ),
        1.0,
    ),
    **dict.fromkeys(_names("arctan erfc"), 2.0),
    **dict.fromkeys(_names("relu6"), 6.0),
    **dict.fromkeys(_names("embedding reversibleembedding"), _LEARNED),
    **dict.fromkeys(
        _names(
            "batchnorm batchnormalization groupnormalization layernorm layernormalization normalize"
            " rmsnorm rmsnormalization unitnormalization"
        ),
        _NORMALIZED,
    ),
}
# Functions whose largest output is one of their inputs. They round nothing.
MOVES = _names(
    "abs absolute amax amin append broadcastto concatenate copy cropping1d cropping2d cropping3d"
    " dropout expanddims fabs flatten flip fmax fmin getitem identity leakyrelu linear max maximum"
    " min minimum moveaxis negative pad permute ravel relu repeat repeatvector reshape roll select"
    " slice sort spatialdropout1d spatialdropout2d spatialdropout3d split squeeze stack"
    " stopgradient swapaxes take takealongaxis tile transpose tril triu unstack where"
    " zeropadding1d zeropadding2d zeropadding3d"
)
_AVERAGES = _names(
    "average averagepool averagepooling1d averagepooling2d averagepooling3d globalaveragepooling1d"
    " globalaveragepooling2d globalaveragepooling3d globalmaxpooling1d globalmaxpooling2d"
    " globalmaxpooling3d maxpool maxpooling1d maxpooling2d maxpooling3d mean median upsampling1d"
    " upsampling2d upsampling3d cast"
)
# Gated linear units multiply the output of one of these by a second tensor.
_GATES = _names("gelu mish silu swish")

_Combination = Callable[[list[float]], float]
_COMBINATIONS: dict[str, _Combination] = {
    "add": sum,
    "subtract": sum,
    "multiply": math.prod,
}


def source_of(tensor: keras.KerasTensor) -> keras.Operation:
    """Returns the operation that produces a tensor; of a nested model, that of its one output."""
    operation = keras_internals.producer_of(tensor)
    outputs = keras_internals.graph_tensors(operation, "outputs")
    is_model = isinstance(operation, keras.Model)
    return source_of(outputs[0]) if is_model and len(outputs) == 1 else operation


def function_of(operation: keras.Operation) -> str:
    """Returns the name of what an operation computes last, in lowercase letters.

    That is the activation of a layer that has one, and otherwise the class, such as `"multiply"`
    for the layer and for the operation. Of a wrapper, it is that of the layer inside.
    """
    inner: Any = operation
    for attribute in ("forward_layer", "layer"):  # of `Bidirectional`, and of other wrappers
        if isinstance(getattr(inner, attribute, None), keras.Layer):
            return function_of(getattr(inner, attribute))
    activation = getattr(inner, "activation", None)
    name = getattr(activation, "__name__", None) or type(activation or inner).__name__
    is_linear = name == "linear" and not isinstance(inner, keras.layers.Activation)
    return type(inner).__name__.lower() if is_linear else name.replace("_", "").lower()


def tensors_of(operation: keras.Operation) -> list[keras.KerasTensor]:
    """Returns the different tensors that an operation gets, in all its calls."""
    calls = keras_internals.calls_of(operation)
    return list({id(each): each for call in calls for each in call.input_tensors}.values())


def bound_of(value: Any) -> float:
    """Returns the largest magnitude that a value can have; Inf if it depends on the data.

    Args:
        value: A tensor of a graph, a weight, an array or a number.
    """
    return _bound_of(value, {}, _MOST_STEPS)


def _bound_of(value: Any, known: dict[int, float], steps: int) -> float:
    if not isinstance(value, keras.KerasTensor):
        return _bound_of_constant(value)
    if value.dtype == "bool":
        return 1.0
    operation = source_of(value)
    key = id(operation)
    if key not in known:
        known[key] = math.inf
        known[key] = _bound_of_outputs(operation, known, steps)
    return known[key]


def _bound_of_outputs(operation: Any, known: dict[int, float], steps: int) -> float:
    name = function_of(operation)
    own_bound = _own_bound_of(operation, name)
    if own_bound is not None:
        return own_bound
    if not steps or getattr(operation, "weights", None):
        return math.inf

    def combined(values: Any, combine: _Combination) -> float:
        bounds = [_bound_of(value, known, steps - 1) for value in keras.tree.flatten(values)]
        return combine(bounds) if bounds else math.inf

    # The other arguments of a move, such as an axis, are no values.
    if name in MOVES or name in _AVERAGES:
        return combined(tensors_of(operation), max)
    if name not in _COMBINATIONS:
        return math.inf
    calls = keras_internals.calls_of(operation)
    return max(combined(call.arguments.args, _COMBINATIONS[name]) for call in calls)


def _own_bound_of(operation: Any, name: str) -> float | None:
    """Returns the bound of an operation whose inputs do not matter; `None` if they do."""
    if name == "clip":
        return max(map(_bound_of_constant, (operation.x_min, operation.x_max)))
    if isinstance(operation, keras.layers.ReLU) and operation.max_value is not None:
        return float(operation.max_value)
    return _BOUNDS.get(name)


def _bound_of_constant(value: Any) -> float:
    if isinstance(value, keras.Variable):
        return _LEARNED
    try:
        magnitudes = np.abs(np.asarray(value, "float64"))
    except (TypeError, ValueError):
        return math.inf
    largest = float(magnitudes.max(initial=0.0))
    return math.inf if math.isnan(largest) else largest


def product_may_overflow(factors: Iterable[Any]) -> bool:
    """Whether the product of two or more tensors may leave the range of float16.

    It may not if all of them but one are gates, or if their bounds say so. Constants have a rule of
    their own.
    """
    tensors = [factor for factor in factors if isinstance(factor, keras.KerasTensor)]
    bounds = [bound_of(tensor) for tensor in tensors]
    if math.prod(bounds) <= FLOAT16.max:
        return False
    pairs = zip(tensors, bounds, strict=True)
    return sum(bound > _LARGEST_GATE and not _is_gate(tensor) for tensor, bound in pairs) > 1


def _is_gate(tensor: keras.KerasTensor) -> bool:
    return function_of(source_of(tensor)) in _GATES
