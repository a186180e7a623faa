"""Dimensions that keep Tensor Cores idle, and what to pad them to."""

import math
from collections.abc import Iterator
from typing import Any

import keras

# Elements: 16 bytes of float16. Source: NVIDIA, "Matrix Multiplication Background User's Guide", section "Tensor Core
# Requirements".
_MULTIPLE = 8


def unaligned(layer: keras.Operation) -> list[str]:
    """Returns the dimensions of a layer's matrix products that 8 does not divide, each with the padded number.

    Example:
    >>> layer = keras.layers.Dense(10)
    >>> layer.build((None, 16))
    >>> unaligned(layer)
    ['units 10 -> 16']
    """
    sizes = _sizes(layer) if getattr(layer, "built", False) else ()
    padded = ((name, size, math.ceil(size / _MULTIPLE) * _MULTIPLE) for name, size in sizes)
    return [f"{name} {size} -> {to}" for name, size, to in padded if size != to]


def _sizes(layer: Any) -> Iterator[tuple[str, int]]:
    match layer:
        case keras.layers.Dense():
            yield from zip(("inputs", "units"), layer.kernel.shape, strict=True)
        case keras.layers.EinsumDense():
            yield from _of_equation(layer.equation, layer.kernel.shape)
        case keras.layers.MultiHeadAttention():
            yield "key_dim", layer.key_dim
            yield "value_dim", layer.value_dim
        case keras.layers.GroupQueryAttention():
            yield "head_dim", layer.head_dim
        case keras.layers.DepthwiseConv1D() | keras.layers.DepthwiseConv2D():
            return  # no matrix product
        case keras.layers.SeparableConv1D() | keras.layers.SeparableConv2D():
            yield from zip(("channels", "filters"), layer.pointwise_kernel.shape[-2:], strict=True)
        case keras.layers.Conv1DTranspose() | keras.layers.Conv2DTranspose() | keras.layers.Conv3DTranspose():
            yield from zip(("filters", "channels"), layer.kernel.shape[-2:], strict=True)
        case keras.layers.Conv1D() | keras.layers.Conv2D() | keras.layers.Conv3D():
            yield from zip(("channels", "filters"), layer.kernel.shape[-2:], strict=True)
        case keras.layers.LSTM() | keras.layers.GRU() | keras.layers.SimpleRNN():
            yield "inputs", layer.cell.kernel.shape[0]
            yield "units", layer.units


def _of_equation(equation: str, shape: tuple[int, ...]) -> Iterator[tuple[str, int]]:
    """Yields the size that a product sums over and the one that it makes, each of them maybe of several axes."""
    operands, outputs = equation.replace("...", "").split("->")
    _, kernel = operands.split(",")
    sizes = dict(zip(kernel, shape, strict=True))
    yield "inputs", math.prod(size for axis, size in sizes.items() if axis not in outputs)
    yield "units", math.prod(size for axis, size in sizes.items() if axis in outputs)
