import keras
import numpy as np
import pytest
from keras import layers

from kmp.conversion.tensor_core_alignment import unaligned


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (layers.Dense(16), (8,), []),
        (layers.Dense(10), (12,), ["inputs 12 -> 16", "units 10 -> 16"]),
        (layers.EinsumDense("abc,cde->abde", (None, 3, 4)), (2, 16), ["units 12 -> 16"]),
        (layers.Conv2D(12, 3), (8, 8, 3), ["channels 3 -> 8", "filters 12 -> 16"]),
        (layers.Conv2DTranspose(12, 3), (8, 8, 16), ["filters 12 -> 16"]),
        (layers.SeparableConv2D(9, 3), (8, 8, 8), ["filters 9 -> 16"]),
        (layers.DepthwiseConv2D(3), (8, 8, 3), []),
        (layers.LSTM(20), (3, 8), ["units 20 -> 24"]),
        (layers.GRU(8), (3, 5), ["inputs 5 -> 8"]),
        (layers.ReLU(), (5,), []),
    ],
    ids=lambda value: value.name if isinstance(value, keras.Layer) else "",
)
def test_dimensions_not_divisible_by_8_are_returned_with_the_padded_size(layer, shape, expected):
    layer(np.zeros((1, *shape), "float32"))
    assert unaligned(layer) == expected


def test_attention_uses_the_dimensions_of_its_heads():
    layer = layers.MultiHeadAttention(2, 12, value_dim=8)
    layer(*[np.zeros((1, 3, 16), "float32")] * 2)
    assert unaligned(layer) == ["key_dim 12 -> 16"]


def test_unbuilt_layer_has_no_dimensions():
    assert unaligned(layers.Dense(10)) == []
