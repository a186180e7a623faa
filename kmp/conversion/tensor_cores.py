"""Finds the dimensions of matrix products and convolutions for which Tensor Cores are slow."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from keras import layers

# Elements: 16 bytes of float16. Source: NVIDIA, "Matrix Multiplication Background User's Guide",
# section "Tensor Core Requirements".
_MULTIPLE = 8


def unaligned_dimensions(layer: Any) -> Iterator[str]:
    """Yields the dimensions of a layer's matrix products that are not divisible by 8.

    Each has the padded size, as in `units 10 -> 16`.
    """
    if not uses_tensor_cores(layer):
        return
    for classes, names, sizes_of in _DIMENSIONS:
        if not isinstance(layer, classes):
            continue
        for name, size in zip(names, sizes_of(layer), strict=True):
            if size % _MULTIPLE:
                yield f"{name} {size} -> {math.ceil(size / _MULTIPLE) * _MULTIPLE}"
        return


def uses_tensor_cores(layer: Any) -> bool:
    """Whether a layer computes matrix products or convolutions whose dimensions are known."""
    return getattr(layer, "built", False) and any(
        isinstance(layer, classes) for classes, *_ in _DIMENSIONS
    )


def _of_einsum(layer: layers.EinsumDense) -> tuple[int, int]:
    """Returns the sizes of the inputs, which are contracted, and of the outputs.

    Both may span several axes of the kernel.
    """
    operands, outputs = layer.equation.replace("...", "").split("->")
    inputs, units = 1, 1
    for axis, size in zip(operands.split(",")[1], layer.kernel.shape, strict=True):
        if axis in outputs:
            units *= size
        else:
            inputs *= size
    return inputs, units


# The first class that matches applies: a transposed convolution has the class of others as base.
_DIMENSIONS: tuple[tuple[tuple[type, ...], tuple[str, ...], Callable[[Any], Any]], ...] = (
    ((layers.Dense,), ("inputs", "units"), lambda layer: layer.kernel.shape),
    ((layers.EinsumDense,), ("inputs", "units"), _of_einsum),
    (
        (layers.LSTM, layers.GRU, layers.SimpleRNN),
        ("inputs", "units"),
        lambda layer: (layer.cell.kernel.shape[0], layer.units),
    ),
    (
        (layers.MultiHeadAttention,),
        ("key_dim", "value_dim"),
        lambda layer: (layer.key_dim, layer.value_dim),
    ),
    ((layers.GroupQueryAttention,), ("head_dim",), lambda layer: (layer.head_dim,)),
    (
        (layers.SeparableConv1D, layers.SeparableConv2D),
        ("channels", "filters"),
        lambda layer: layer.pointwise_kernel.shape[-2:],
    ),
    (
        (layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose),
        ("filters", "channels"),
        lambda layer: layer.kernel.shape[-2:],
    ),
    (
        (layers.Conv1D, layers.Conv2D, layers.Conv3D),
        ("channels", "filters"),
        lambda layer: layer.kernel.shape[-2:],
    ),
)
