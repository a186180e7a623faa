"""Graphs of operations compute in a converted model what they compute in float32.

Each graph stands between a layer that runs in 16 bits and the output of the model, as in users'
models. Its inputs are exact in float16, so all of the error comes from the graph.
"""

from functools import partial

import keras
import numpy as np
import pytest
from keras import layers, ops

import kmp


def values(low, high, shape):
    random = np.random.default_rng(0)
    return random.uniform(low, high, (4, *shape)).astype("float16").astype("float32")


SMALL = partial(values, 0.1, 2.0, (8,))
LOGITS = partial(values, -18.0, 18.0, (8,))
NEGATIVE = partial(values, -18.0, -14.0, (8,))
LARGE = partial(values, 300.0, 1000.0, (8,))
STEPS = partial(values, 20.0, 40.0, (4096, 2))
IMAGE = partial(values, 90.0, 110.0, (64, 64, 2))


def halves(x):
    return x[..., :4], x[..., 4:]


def of_halves(function):
    return lambda x: function(*halves(x))


def with_kernel(function, *shape):
    kernel = np.full(shape, 0.01, "float32")
    return lambda x: function(x, kernel)


def mean_of(function):
    return lambda x: function(x) / 4096.0


def batch_dot(x):
    first, second = halves(x)
    return ops.matmul(first[:, None, :], second[:, :, None])


SUMS = {
    "average pooling": (IMAGE, lambda x: ops.average_pool(x, 64)),
    "average pooling of an odd window": (IMAGE, lambda x: ops.average_pool(x, (33, 31))),
    "average pooling layer": (IMAGE, layers.AveragePooling2D(64)),
    "average pooling of steps": (STEPS, layers.AveragePooling1D(4096)),
    "global average pooling": (IMAGE, layers.GlobalAveragePooling2D()),
    "global average pooling of steps": (STEPS, layers.GlobalAveragePooling1D()),
    "adaptive average pooling": (IMAGE, layers.AdaptiveAveragePooling2D(1)),
    "adaptive average pooling of steps": (STEPS, layers.AdaptiveAveragePooling1D(2)),
    "adaptive_average_pool": (
        STEPS,
        lambda x: ops.adaptive_average_pool(x, (1,), data_format="channels_last"),
    ),
    "depthwise convolution": (IMAGE, with_kernel(ops.depthwise_conv, 48, 48, 2, 1)),
    "depthwise convolution layer": (
        partial(values, 0.0, 1.0, (64, 64, 2)),
        layers.DepthwiseConv2D(64, depthwise_initializer="ones"),
    ),
    "separable convolution layer": (
        partial(values, 0.0, 1.0, (4096, 2)),
        layers.SeparableConv1D(2, 4096, depthwise_initializer="ones"),
    ),
    "mean": (STEPS, lambda x: ops.mean(x, axis=1)),
    "sum": (STEPS, mean_of(partial(ops.sum, axis=1))),
    "einsum as sum": (STEPS, mean_of(lambda x: ops.einsum("btc->bc", x))),
    "einsum as sum of an ellipsis": (STEPS, mean_of(lambda x: ops.einsum("bt...->b...", x))),
    "einsum as implicit sum": (
        partial(values, 200.0, 300.0, (64, 64)),
        mean_of(lambda x: ops.einsum("bii", x)),
    ),
    "einsum as trace": (
        partial(values, 500.0, 1000.0, (128, 128)),
        mean_of(lambda x: ops.einsum("bii->b", x)),
    ),
    "einsum as sum of one of two": (
        STEPS,
        mean_of(lambda x: ops.einsum("btc,bd->bd", x, x[:, 0])),
    ),
    "einsum as dot product": (
        LARGE,
        of_halves(lambda a, b: ops.einsum("bi,bi->b", a, b)[:, None]),
    ),
    "einsum as sum of all squares": (
        STEPS,
        lambda x: ops.mean(x, axis=1) + ops.einsum("btc,btc->", x, x) / 1e6,
    ),
    "matmul as dot product": (LARGE, batch_dot),
    "tensordot of all axes": (
        LARGE,
        of_halves(lambda a, b: a * 0 + ops.tensordot(a, b, axes=[[0, 1], [0, 1]]) / 1e3),
    ),
    "vdot": (LARGE, of_halves(lambda a, b: a * 0 + ops.vdot(a, b) / 1e3)),
    "dot of vectors": (LARGE, lambda x: x * 0 + ops.dot(x[:, 0], x[:, 1]) / 1e3),
    "inner of vectors": (LARGE, lambda x: x * 0 + ops.inner(x[:, 0], x[:, 1]) / 1e3),
    "trace": (
        partial(values, 500.0, 1000.0, (128, 128)),
        mean_of(lambda x: ops.trace(x, axis1=1, axis2=2)[:, None]),
    ),
    "norm": (LARGE, lambda x: ops.norm(x, axis=-1, keepdims=True)),
    "norm by sum of squares": (
        LARGE,
        lambda x: ops.sqrt(ops.sum(x * x, axis=-1, keepdims=True)),
    ),
    "cumulative sum": (STEPS, mean_of(partial(ops.cumsum, axis=1))),
}


def model_of(function, shape):
    """Returns a model that applies a function between two layers."""
    inputs = keras.Input(shape, batch_size=4)
    kernel = keras.initializers.Identity()
    hidden = layers.Dense(shape[-1], use_bias=False, kernel_initializer=kernel)(inputs)
    outputs = layers.Activation("linear", name="last")(function(hidden))
    return keras.Model(inputs, outputs)


@pytest.mark.parametrize("name", SUMS)
def test_graph_computes_after_convert_what_it_computes_in_float32(name):
    make, function = SUMS[name]
    x = make()
    model = model_of(function, x.shape[1:])
    expected = np.asarray(model(x))
    converted = kmp.convert(model)
    found = np.asarray(converted(x), "float32")
    assert np.isfinite(expected).all()
    assert any(layer.compute_dtype == "float16" for layer in converted.layers[1:])
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=1e-3)
