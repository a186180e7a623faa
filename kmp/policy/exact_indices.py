"""Keeps the indices of look-up layers exact, although Keras casts the float arguments of a layer to 16 bits.

kmp's patches make the result of such a cast remember the tensor that was cast, and look-up layers
use that one. An operation, such as `ids + 1` in 16 bits, returns a tensor that remembers nothing; a
look-up of it warns.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmp.backend import Replacement, defining_class, keras_internals, replaced
from kmp.policy import misuse_warnings
from kmp.utils import DTYPES_16_BIT, FORMATS_16_BIT

# The layers of Keras that accept indices as floats.
_LOOK_UPS = (
    keras.layers.Embedding,
    keras.layers.CategoryEncoding,
    keras.layers.Hashing,
    keras.layers.IntegerLookup,
)
_UNCAST = "_kmp_uncast"  # the attribute of a tensor that holds the tensor from which it was cast
_ROUNDED = (
    "gets its indices{rows} as {dtype}, which has every integer only up to {limit}: larger indices"
    " are rounded and select other rows. Declare the input with keras.Input(..., dtype='int32'), or"
    " pass integers, such as x.astype('int32')."
)


def rows_of(layer: keras.Layer) -> float:
    """Returns the number of rows that a look-up layer selects from: infinity for any integer; 0 for other layers."""
    if not isinstance(layer, _LOOK_UPS):
        return 0
    return getattr(
        layer, "input_dim", getattr(layer, "num_tokens", math.inf)
    )  # the others take any integer


def rounds_indices(rows: float, dtype: str) -> bool:
    """Whether a 16-bit dtype rounds some of the indices of this number of rows."""
    return rows - 1 > FORMATS_16_BIT[dtype].max_exact_integer


def apply_patches() -> Iterator[Replacement]:
    """Patches the casts of Keras' layers and functional models, and the look-up layers, and yields the patches."""
    yield replaced(keras.DTypePolicy, "convert_input", _convert_input_patch)
    for each in _LOOK_UPS:
        yield replaced(defining_class(each, "call"), "call", _look_up_patch)
    yield replaced(*keras_internals.functional_input_cast(), _functional_patch)
    # In a graph, its own `__call__` casts the indices, integers included, to the compute dtype
    # (Keras 3.15).
    keras.layers.CategoryEncoding.__call__ = keras.Layer.__call__


def _convert_input_patch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patches the cast of a layer's arguments."""

    @functools.wraps(original)
    def convert_input(self: keras.DTypePolicy, x: Any, autocast: bool, dtype: str) -> Any:
        return _exact_cast(x, original(self, x, autocast, dtype))

    return convert_input


def _functional_patch(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Patches the cast to the dtypes of a model's `Input`s: that of a Sequential without an `Input` may be float16."""

    @functools.wraps(original)
    def cast_inputs(self: keras.Model, inputs: list[Any]) -> list[Any]:
        return [
            _exact_cast(x, cast) for x, cast in zip(inputs, original(self, inputs), strict=False)
        ]  # not of more

    return cast_inputs


def _exact_cast(x: Any, cast: Any) -> Any:
    """Returns Keras' cast of `x`, from the tensor from which `x` was cast, if any; in 16 bits it remembers that one."""
    if cast is x or not isinstance(cast, tf.Tensor):
        return cast
    exact = getattr(x, _UNCAST, x)
    if exact is not x:
        cast = tf.cast(exact, cast.dtype)
    if cast.dtype.name in DTYPES_16_BIT and isinstance(exact, tf.Tensor | np.ndarray):
        exact = tf.convert_to_tensor(exact)
        if exact.dtype.name not in DTYPES_16_BIT:
            setattr(cast, _UNCAST, exact)
    return cast


def _look_up_patch(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: keras.Layer, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        exact = getattr(inputs, _UNCAST, None)
        dtype = keras.backend.standardize_dtype(inputs.dtype) if hasattr(inputs, "dtype") else ""
        rows = rows_of(self)
        # A symbolic call has no values: Keras calls the layer again, with tensors that may be
        # exact.
        is_symbolic = keras_internals.is_symbolic()
        if (
            exact is None
            and dtype in DTYPES_16_BIT
            and rounds_indices(rows, dtype)
            and not is_symbolic
        ):
            text = f" for {rows} rows" if rows < math.inf else ""
            limit = FORMATS_16_BIT[dtype].max_exact_integer
            misuse_warnings.warn_once(self, _ROUNDED.format(rows=text, dtype=dtype, limit=limit))
        return original(self, inputs if exact is None else exact, *args, **kwargs)

    return call
