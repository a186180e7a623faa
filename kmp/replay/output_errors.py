"""How far the outputs of a layer are from those in float32."""

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmp.replay.arrays import array_of

LARGEST_ERROR = 1e6  # also stands for NaN and Inf
_MOST_VALUES = 2**16  # of an output

Outputs = list[np.ndarray]


def is_eager_float(value: Any) -> bool:
    """Whether a value is a float tensor that has a value."""
    if not isinstance(value, tf.Tensor) or tf.is_symbolic_tensor(value):
        return False
    return bool(value.dtype.is_floating)


def _is_eager_integer(value: Any) -> bool:
    if not isinstance(value, tf.Tensor) or tf.is_symbolic_tensor(value):
        return False
    return bool(value.dtype.is_integer)


def samples_of(outputs: Any, *, all_values: bool = False) -> Outputs:
    """Returns the numbers in a layer's outputs as arrays of shape `(examples, values)`.

    Floats are float32. Of large outputs, a part of the values, unless `all_values` is set.
    """
    found = []
    for output in keras.tree.flatten(outputs):
        is_float = is_eager_float(output)
        if not (is_float or _is_eager_integer(output)):
            continue
        array = array_of(output)
        rows = len(array) if array.ndim else 1
        flat = array.reshape(rows, math.prod(array.shape[1:]))
        stride = 1 if all_values else max(1, flat.size // _MOST_VALUES)
        found.append(flat[:, ::stride].astype(np.float32 if is_float else np.int64))
    return found


def relative_error(values: np.ndarray, exact: np.ndarray) -> float:
    """Returns the L2 norm of the difference from float32 outputs, relative to their variation.

    That is how the outputs differ between examples; if all examples have the same, the norm of the
    outputs. At most 1e6, also for NaN and Inf. Of integers, such as indices, the share of those
    that differ: the next index is as wrong as any other.

    Args:
        values: Array of shape `(examples, ...)`.
        exact: Array of that shape, of float32.
    """
    if values.shape != exact.shape or not exact.size:
        return 0.0
    if np.issubdtype(exact.dtype, np.integer):
        return float(np.mean(values != exact))
    exact = exact.astype(np.float64)
    with np.errstate(invalid="ignore"):  # Inf - Inf
        difference = float(np.linalg.norm(values - exact))
        varying = float(np.linalg.norm(exact - exact.mean(axis=0)))
        norm = float(np.linalg.norm(exact))
    # Constants have no variation but that of rounding.
    scale = varying if varying > 1e-6 * norm else norm
    if not difference <= LARGEST_ERROR * scale:  # or NaN
        return LARGEST_ERROR if difference else 0.0
    return difference / scale if scale else 0.0


def largest_error(values: Outputs, exact: Outputs) -> float:
    """Returns the largest relative error of several outputs, 0 without any."""
    errors = map(relative_error, values, exact)
    return max(errors, default=0.0)
