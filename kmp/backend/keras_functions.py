"""Which function of `kmp.numerics` a layer or operation of Keras computes."""

from typing import Any

import keras

from kmp.backend.keras_internals import defining_class, is_keras_class, is_library_class
from kmp.numerics import Function, einsum_function, keras_function


def function_of(operation: keras.Operation) -> Function | None:
    """Returns the row of a layer or operation: that of its class, or of a base class of it.

    `None` if the user has overridden its `call`, or if it has other arguments than the function.
    """
    name, attributes = type(operation).__name__, vars(operation)
    if not is_library_class(defining_class(type(operation), "call")) or _has_limits(operation):
        return None
    if type(operation) is keras.layers.Activation:
        return function_of_activation(attributes.get("activation"))  # none yet in `__init__`
    if name == "Einsum":
        return einsum_function(attributes["subscripts"])
    if name == "Round" and attributes.get("decimals"):
        return keras_function("round_to_decimals")
    if isinstance(operation, keras.layers.Dot) and attributes.get("normalize"):
        return keras_function("normalized_dot")
    names = (base.__name__ for base in type(operation).__mro__ if is_keras_class(base))
    return next(filter(None, map(keras_function, names)), None)


def function_of_activation(activation: Any) -> Function | None:
    """Returns the row of an activation: a layer, or a function of Keras or TensorFlow.

    A function of the user may have the name of one of theirs and compute another.
    """
    if isinstance(activation, keras.Layer):
        return function_of(activation)
    library = (getattr(activation, "__module__", None) or "").partition(".")[0]
    if library not in ("keras", "tensorflow"):
        return None
    # TensorFlow calls its softmax `softmax_v2`.
    return keras_function(getattr(activation, "__name__", "").removesuffix("_v2"))


def _has_limits(layer: Any) -> bool:
    """Whether an activation layer has other arguments than the function."""
    if isinstance(layer, keras.layers.ELU):
        return bool(getattr(layer, "alpha", 1.0) != 1.0)
    limits = [getattr(layer, name, None) for name in ("max_value", "negative_slope", "threshold")]
    return isinstance(layer, keras.layers.ReLU) and any(limits)
