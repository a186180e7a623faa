"""A softmax layer that computes in float32, also after saving and loading."""

from typing import Any

import keras

from kmp.layers.casting import with_float32_dtype
from kmp.utils import validation


@keras.saving.register_keras_serializable("kmp")
class Softmax(keras.layers.Softmax):
    """Softmax with float32 input, computation and output, for the output of a classifier.

    Cross-entropy on its output has the same value and gradient as cross-entropy with `from_logits=True`.

    Args:
        axis: Integer or list of integers, the axis or axes along which the probabilities sum to 1.
        **kwargs: Other arguments of `keras.Layer`, such as `name`. `dtype` must be float32 if given.

    Raises:
        TypeError: If `axis` is not an integer or a list of integers.
        ValueError: If `dtype` is not float32.

    Example:
    >>> from keras import ops
    >>> Softmax()(ops.zeros((1, 4), dtype="float16")).dtype.name
    'float32'
    """

    def __init__(self, axis: int | list[int] = -1, **kwargs: Any) -> None:
        if isinstance(axis, list | tuple):
            axis = [validation.integer("axis", single_axis) for single_axis in axis]
        else:
            axis = validation.integer("axis", axis)
        super().__init__(axis=axis, **with_float32_dtype(kwargs))
