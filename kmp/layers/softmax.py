"""Layers that force float32 where float16 loses: they serialize, and stay float32 after save and load."""

from typing import Any

import keras

from kmp.backend import register
from kmp.layers.casting import with_float32_dtype
from kmp.utils import validation


@register
class Softmax(keras.layers.Softmax):
    """Softmax whose input, computation and output are float32: what a classifier ends with.

    Cross-entropy on its output has the value and gradient of cross-entropy with `from_logits=True`.

    Args:
        axis: Integer, or list of integers, over which the probabilities sum to 1.
        **kwargs: `name`, and whatever else `keras.Layer` takes. A `dtype` other than float32 is an error.

    Raises:
        TypeError: If `axis` is not made of integers.
        ValueError: If `dtype` is not float32.

    Example:
    >>> Softmax()(ops.zeros((1, 4), dtype="float16")).dtype.name
    'float32'
    """

    def __init__(self, axis: int | list[int] = -1, **kwargs: Any) -> None:
        for one in axis if isinstance(axis, list | tuple) else [axis]:
            validation.integer("axis", one)
        super().__init__(axis=axis, **with_float32_dtype(kwargs))
