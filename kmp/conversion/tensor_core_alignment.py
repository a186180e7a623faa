"""Finds the dimensions that prevent the use of Tensor Cores, and their padded sizes."""

import math
from collections.abc import Iterator
from typing import Any

import keras

# Elements: 16 bytes of float16. Source: NVIDIA, "Matrix Multiplication Background User's Guide", section "Tensor Core
# Requirements".
_MULTIPLE = 8


def unaligned(layer: keras.Operation) -> list[str]:
    """Returns the dimensions of a layer's matrix products that are not divisible by 8, each with the padded size.

    Example:
    >>> layer = keras.layers.Dense(10)
    >>> layer.build((None, 16))
    >>> unaligned(layer)
    ['units 10 -> 16']
    """
    sizes = _sizes(layer) if getattr(layer, "built", False) else ()
    padded_sizes = ((name, size, math.ceil(size / _MULTIPLE) * _MULTIPLE) for name, size in sizes)
    return [f"{name} {size} -> {padded}" for name, size, padded in padded_sizes if size != padded]


def _sizes(layer: Any) -> Iterator[tuple[str, int]]:
    match layer:
        case keras.layers.Dense():
            yield from zip(("inputs", "units"), layer.kernel.shape, strict=True)
        case keras.layers.EinsumDense():
            yield from _einsum_sizes(layer.equation, layer.kernel.shape)
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


def _einsum_sizes(equation: str, kernel_shape: tuple[int, ...]) -> Iterator[tuple[str, int]]:
    """Yields the sizes of the contracted and the output dimension of an einsum; each may span several kernel axes."""
    operands, outputs = equation.replace("...", "").split("->")
    _, kernel = operands.split(",")
    sizes = dict(zip(kernel, kernel_shape, strict=True))
    yield "inputs", math.prod(size for axis, size in sizes.items() if axis not in outputs)
    yield "units", math.prod(size for axis, size in sizes.items() if axis in outputs)
