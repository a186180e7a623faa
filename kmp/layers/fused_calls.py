"""Gives layers of Keras a `call` that needs few kernels in 16 bits in graph mode."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import keras

from kmp.layers.compiled_functions import softmax_layer
from kmp.layers.fused_normalization import (
    batch_normalization,
    group_normalization,
    layer_normalization,
    rms_normalization,
    spectral_normalization,
)

_FUSED_CALLS: dict[type, Callable[..., Any]] = {
    keras.layers.BatchNormalization: batch_normalization,
    keras.layers.LayerNormalization: layer_normalization,
    keras.layers.GroupNormalization: group_normalization,
    keras.layers.RMSNormalization: rms_normalization,
    keras.layers.Softmax: softmax_layer,
    keras.layers.SpectralNormalization: spectral_normalization,
}


def use_fused_call(layer: keras.Layer) -> None:
    """Makes a layer of Keras compute in few kernels where it can.

    Does nothing for other layers and subclasses. Sets `call` of this layer only.
    """
    call = _FUSED_CALLS.get(type(layer))
    if call:
        vars(layer)["call"] = MethodType(call, layer)  # not tracked by Keras' `__setattr__`


def use_call_of_keras(layer: keras.Layer) -> None:
    """Undoes `use_fused_call`."""
    if getattr(vars(layer).get("call"), "__func__", None) in _FUSED_CALLS.values():
        del vars(layer)["call"]
