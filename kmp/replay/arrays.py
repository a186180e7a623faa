"""Values of eager tensors as NumPy arrays."""

from typing import Any

import numpy as np


def array_of(tensor: Any) -> np.ndarray:
    """Returns the values of an eager tensor or a variable, without a copy if it has dimensions."""
    # TensorFlow 2.21 returns no array for a scalar of bfloat16.
    return np.asarray(tensor if tensor.shape.rank else tensor.numpy())
