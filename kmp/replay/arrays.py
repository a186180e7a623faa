"""Values of eager tensors as NumPy arrays, and sums over them."""

import math
from typing import Any

import numpy as np


def array_of(tensor: Any) -> np.ndarray:
    """Returns the values of an eager tensor or a variable, without a copy if it has dimensions."""
    # TensorFlow 2.21 returns no array for a scalar of bfloat16.
    return np.asarray(tensor if tensor.shape.rank else tensor.numpy())


def inner_product(first: np.ndarray, second: np.ndarray) -> float:
    """Returns the sum of the products of two arrays of one shape.

    It does not use BLAS, as `np.vdot` and `np.linalg.norm` do: the threads of BLAS wait for each
    other, which takes 4 ms a call where TensorFlow's threads use the same cores.
    """
    return float(np.einsum("i,i->", np.ravel(first), np.ravel(second)))


def norm_of(array: np.ndarray) -> float:
    """Returns the L2 norm of an array of floats."""
    return math.sqrt(inner_product(array, array))
