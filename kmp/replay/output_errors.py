"""How far the outputs of a layer are from those in float32."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from kmp.replay.arrays import array_of, norm_of

LARGEST_ERROR = 1e6  # also stands for NaN and Inf
MOST_VALUES = 2**16  # of an output

Outputs = list[np.ndarray]


def samples_of(outputs: Sequence[tf.Tensor]) -> Outputs:
    """Returns the numbers that a program returns of a layer, in shape `(examples, values)`.

    Floats are float32, integers int64.
    """
    found = []
    for output in outputs:
        array = array_of(output)
        rows = len(array) if array.ndim else 1
        flat = array.reshape(rows, math.prod(array.shape[1:]))
        found.append(flat.astype(np.float32 if output.dtype.is_floating else np.int64))
    return found


def magnitudes_of(outputs: Mapping[str, Outputs]) -> dict[str, float]:
    """Returns the largest finite magnitude of the floats in each layer's outputs, by path."""
    magnitudes = {}
    for path, values in outputs.items():
        floats = [np.abs(each) for each in values if each.dtype == np.float32]
        if floats:
            largest = (each.max(initial=0.0, where=np.isfinite(each)) for each in floats)
            magnitudes[path] = float(max(largest))
    return magnitudes


def relative_error(values: np.ndarray, exact: np.ndarray) -> float:
    """Returns the L2 norm of the difference from float32 outputs, relative to their variation.

    The variation is how the outputs differ between examples; if all examples have the same outputs,
    their norm takes its place. The error is at most 1e6, also for NaN and Inf. The error of
    integers, such as indices, is the share of those that differ: the next index is as wrong as any
    other.

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
        difference = norm_of(values - exact)
        varying = norm_of(exact - exact.mean(axis=0))
        norm = norm_of(exact)
    # Constants have no variation but that of rounding.
    scale = varying if varying > 1e-6 * norm else norm
    if not difference <= LARGEST_ERROR * scale:  # or NaN
        return LARGEST_ERROR if difference else 0.0
    return difference / scale if scale else 0.0


def largest_error(values: Outputs, exact: Outputs) -> float:
    """Returns the largest relative error of several outputs, 0 without any."""
    errors = map(relative_error, values, exact)
    return max(errors, default=0.0)
