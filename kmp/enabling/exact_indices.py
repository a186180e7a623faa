"""Keeps the indices of look-up layers exact, although Keras casts float arguments to 16 bits.

Under `enable`, the result of such a cast remembers the tensor that was cast. Look-up layers that
were created under `enable` use that one. An operation, such as `ids + 1` in 16 bits, returns a
tensor that remembers nothing; a look-up of it warns.
"""

import functools
import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmp.backend import keras_internals
from kmp.backend.keras_internals import sublayers
from kmp.backend.patching import patches
from kmp.enabling import misuse_warnings
from kmp.utils.float_formats import DTYPES_16_BIT, FORMATS_16_BIT

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
    """Returns the number of rows that a look-up layer selects from; 0 for other layers.

    It is infinite for layers that take any integer.
    """
    if not isinstance(layer, _LOOK_UPS):
        return 0
    return getattr(layer, "input_dim", getattr(layer, "num_tokens", math.inf))


def rounds_indices(rows: float, dtype: str) -> bool:
    """Whether a 16-bit dtype rounds some of the indices of this number of rows."""
    return rows - 1 > FORMATS_16_BIT[dtype].max_exact_integer


def keep_exact(layer: keras.Layer) -> None:
    """Makes a layer look up the exact indices, if it is a look-up layer.

    Sets `call` of this layer only, as `use_fused_call` does. The patches that find the exact
    indices stay as long as the layer lives, or until the `disable` after that.
    """
    if isinstance(layer, _LOOK_UPS):
        vars(layer)["call"] = MethodType(_look_up, layer)  # not tracked by Keras' `__setattr__`
        patches.use(layer)


def keep_all_exact(model: keras.Model) -> None:
    """Makes all look-up layers in a model exact."""
    for layer in sublayers(model):
        keep_exact(layer)


def convert_input_patch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patches the cast of a layer's arguments."""

    @functools.wraps(original)
    def convert_input(self: keras.DTypePolicy, x: Any, autocast: bool, dtype: str) -> Any:
        return _exact_cast(x, original(self, x, autocast, dtype))

    return convert_input


def functional_inputs_patch(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Patches the cast of a functional model's arguments to the dtypes of its `Input`s.

    The dtype of a Sequential without an `Input` may be float16.
    """

    @functools.wraps(original)
    def convert_inputs(self: keras.Model, flat_inputs: list[Any]) -> list[Any]:
        pairs = zip(flat_inputs, original(self, flat_inputs), strict=False)  # some have no `Input`
        return [_exact_cast(x, cast) for x, cast in pairs]

    return convert_inputs


def category_encoding_patch(original: None) -> Callable[..., Any]:
    """Patches `__call__` of `CategoryEncoding`, which in a graph casts even integers (Keras 3.15).

    Python looks it up on the class only.
    """
    inherited: Any = super(keras.layers.CategoryEncoding, keras.layers.CategoryEncoding).__call__

    @functools.wraps(inherited)
    def call(self: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        is_exact = getattr(vars(self).get("call"), "__func__", None) is _look_up
        used = keras.Layer.__call__ if is_exact else inherited
        return used(self, *args, **kwargs)

    return call


def _exact_cast(x: Any, cast: Any) -> Any:
    """Returns Keras' cast of `x`, or of the tensor from which `x` was cast, if any.

    A result in 16 bits remembers that tensor.
    """
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


def _look_up(layer: keras.Layer, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a look-up layer with the exact indices, or warns if they are not known any more."""
    call = functools.partial(type(layer).call, layer)
    # `ReversibleEmbedding` multiplies its inputs by the embeddings.
    is_reverse = kwargs.get("reverse", next(iter(args), False)) is True
    if is_reverse or not isinstance(inputs, tf.Tensor):
        return call(inputs, *args, **kwargs)
    exact = getattr(inputs, _UNCAST, None)
    if exact is not None:
        return call(exact, *args, **kwargs)
    # A symbolic call has no values: Keras calls the layer again, with tensors that may be exact.
    dtype = inputs.dtype.name
    if dtype in DTYPES_16_BIT and not keras_internals.is_symbolic():
        rows = rows_of(layer)
        if rounds_indices(rows, dtype):
            text = f" for {rows} rows" if rows < math.inf else ""
            limit = FORMATS_16_BIT[dtype].max_exact_integer
            misuse_warnings.warn_once(layer, _ROUNDED.format(rows=text, dtype=dtype, limit=limit))
    return call(inputs, *args, **kwargs)
