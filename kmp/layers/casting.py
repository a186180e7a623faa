"""Casts and dtype arguments shared by the float32 layers."""

from typing import Any

import keras
from keras import ops

from kmp.utils import DTYPES_16_BIT


def to_float32(value: Any) -> Any:
    """Returns a float16 or bfloat16 tensor cast to float32, and any other value unchanged."""
    is_half = keras.backend.standardize_dtype(value.dtype) in DTYPES_16_BIT if hasattr(value, "dtype") else False
    return ops.cast(value, "float32") if is_half else value


def with_float32_dtype(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns a layer's keyword arguments with `dtype="float32"`.

    Raises:
        ValueError: If `kwargs` contains another dtype.
    """
    dtype = kwargs.get("dtype", "float32")
    policy = keras.dtype_policies.get(dtype)
    if (policy.compute_dtype, policy.variable_dtype) != ("float32", "float32"):
        raise ValueError(f"`dtype` must be float32 or omitted. Received: dtype={dtype!r}")
    return kwargs | {"dtype": "float32"}
