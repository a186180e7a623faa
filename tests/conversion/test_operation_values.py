"""Graphs of operations compute in a converted model what they compute in float32.

Each graph stands between a layer that runs in 16 bits and the output of the model, as in users'
models. Its inputs are exact in float16, so all of the error comes from the graph.
"""

from functools import partial

import keras
import numpy as np
import pytest
from conftest import exhaustive_unless
from keras import layers, ops

import kmp


def values(low, high, shape):
    random = np.random.default_rng(0)
    return random.uniform(low, high, (4, *shape)).astype("float16").astype("float32")


SMALL = partial(values, 0.1, 2.0, (8,))
LOGITS = partial(values, -18.0, 12.0, (8,))
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


def dense(activation, *, scale=1.0):
    """A layer that passes its inputs through an activation, times a scale."""
    kernel = keras.initializers.Identity(gain=scale)
    return layers.Dense(8, activation, kernel_initializer=kernel)


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
    "einsum as product": (LARGE, of_halves(lambda a, b: ops.einsum("bi,bi->bi", a, b))),
    "einsum as outer product": (LARGE, of_halves(lambda a, b: ops.einsum("bi,bj->bij", a, b))),
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
if hasattr(ops, "adaptive_average_pool"):  # Keras 3.12 does not have it
    SUMS.update(
        {
            "adaptive average pooling": (IMAGE, layers.AdaptiveAveragePooling2D(1)),
            "adaptive average pooling of steps": (STEPS, layers.AdaptiveAveragePooling1D(2)),
            "adaptive_average_pool": (
                STEPS,
                lambda x: ops.adaptive_average_pool(x, (1,), data_format="channels_last"),
            ),
        }
    )

LOGARITHMS = {
    "log of sigmoid": (LOGITS, lambda x: ops.log(ops.sigmoid(x))),
    "log of negative sigmoid": (LOGITS, lambda x: ops.log(ops.sigmoid(-x))),
    "log of a sigmoid layer": (LOGITS, lambda x: ops.log(layers.Activation("sigmoid")(x))),
    "log of a dense sigmoid": (LOGITS, lambda x: ops.log(dense("sigmoid")(x))),
    "log of a part of a sigmoid": (
        LOGITS,
        lambda x: ops.log(ops.reshape(ops.sigmoid(x), (-1, 2, 4))[:, 1]),
    ),
    "log of sigmoid plus epsilon": (NEGATIVE, lambda x: ops.log(ops.sigmoid(x) + 1e-7)),
    "log of softmax": (LOGITS, lambda x: ops.log(ops.softmax(x))),
    "log of a dense softmax": (LOGITS, lambda x: ops.log(dense("softmax")(x))),
    "log of one minus sigmoid": (LOGITS, lambda x: ops.log(1.0 - ops.sigmoid(x))),
    "log1p of minus sigmoid": (LOGITS, lambda x: ops.log1p(-ops.sigmoid(x))),
    "log2 of sigmoid": (LOGITS, lambda x: ops.log2(ops.sigmoid(x))),
    "log10 of sigmoid": (LOGITS, lambda x: ops.log10(ops.sigmoid(x))),
    "log of a product of sigmoids": (
        NEGATIVE,
        of_halves(lambda a, b: ops.log(ops.sigmoid(a) * ops.sigmoid(b))),
    ),
    "log of a difference of sigmoids": (
        NEGATIVE,
        lambda x: ops.log(ops.sigmoid(x + 1.0) - ops.sigmoid(x)),
    ),
    "log of a clipped sigmoid": (
        LOGITS,
        lambda x: ops.log(ops.clip(ops.sigmoid(x), 1e-6, 1.0)),
    ),
    "log of softplus": (NEGATIVE, lambda x: ops.log(ops.softplus(x))),
    "log of one minus tanh": (
        partial(values, 4.0, 6.0, (8,)),
        lambda x: ops.log(1.0 - ops.tanh(x)),
    ),
    "binary cross-entropy": (
        LOGITS,
        lambda x: ops.binary_crossentropy(ops.ones((4, 8)), ops.sigmoid(x)),
    ),
    "entropy": (
        LOGITS,
        lambda x: -ops.sum(ops.softmax(x) * ops.log(ops.softmax(x)), axis=-1, keepdims=True),
    ),
    "exp of log": (LOGITS, lambda x: ops.exp(2.0 * ops.log(ops.sigmoid(x))) * 1e3),
    "exp of half a logarithm of a variance": (LOGITS, lambda x: ops.exp(0.5 * x)),
    "logit": (LOGITS, lambda x: ops.log(ops.sigmoid(x) / (1.0 - ops.sigmoid(x)))),
    "inverse hyperbolic tangent": (
        partial(values, 4.0, 6.0, (8,)),
        lambda x: ops.arctanh(ops.tanh(x)),
    ),
    "logsumexp by hand": (LARGE, lambda x: ops.log(ops.sum(ops.exp(x / 100.0), axis=-1))[:, None]),
}

QUOTIENTS = {
    "sigmoid by hand": (LOGITS, lambda x: 1.0 / (1.0 + ops.exp(x))),
    "reciprocal of sigmoid": (LOGITS, lambda x: ops.log(1.0 / ops.sigmoid(x))),
    "odds": (partial(values, 8.0, 10.0, (8,)), lambda x: 1e-3 / (1.0 - ops.sigmoid(x))),
    "quotient of sigmoids": (
        NEGATIVE,
        of_halves(lambda a, b: ops.sigmoid(a) / ops.sigmoid(b)),
    ),
    "divide_no_nan": (
        NEGATIVE,
        of_halves(lambda a, b: ops.divide_no_nan(ops.sigmoid(a), ops.sigmoid(b))),
    ),
    "rsqrt of sigmoid": (NEGATIVE, lambda x: ops.rsqrt(ops.sigmoid(x))),
    "root of sigmoid": (NEGATIVE, lambda x: 1e3 * ops.sqrt(ops.sigmoid(x))),
    "sine by cosine": (
        partial(values, 0.01, 0.1, (8,)),
        lambda x: ops.sqrt(1.0 - ops.square(ops.cos(x))),
    ),
    "sech": (partial(values, 4.0, 6.0, (8,)), lambda x: 1e3 * ops.sqrt(1 - ops.tanh(x) ** 2)),
    "root of one minus square": (
        partial(values, 0.99, 1.0, (8,)),
        lambda x: ops.sqrt(1.0 - x * x + 1e-4),
    ),
    "linear attention": (NEGATIVE, lambda x: 1e-5 / (1.0 + ops.elu(x) + 1e-6)),
    "quotient beyond the range": (SMALL, of_halves(lambda a, b: 1e3 * a / (b * 1e-3 * 10.0))),
    "normalization by hand": (
        LARGE,
        lambda x: (
            (x - ops.mean(x, axis=-1, keepdims=True))
            / ops.sqrt(ops.var(x, axis=-1, keepdims=True) + 1e-3)
        ),
    ),
    "cosine similarity": (
        LARGE,
        of_halves(
            lambda a, b: (
                ops.sum(a * b, axis=-1, keepdims=True)
                / (ops.norm(a, axis=-1, keepdims=True) * ops.norm(b, axis=-1, keepdims=True))
            )
        ),
    ),
}

PRODUCTS = {
    "width times height": (LARGE, of_halves(lambda a, b: a * b)),
    "width times height of boxes": (
        LARGE,
        lambda x: (x[:, 2:3] + x[:, 0:1]) * ops.relu(x[:, 3:4] + x[:, 1:2]),
    ),
    "intersection over union": (
        LARGE,
        of_halves(
            lambda a, b: (
                ops.minimum(a, b)[:, :2]
                * ops.minimum(a, b)[:, 2:]
                / (a[:, :2] * a[:, 2:] + b[:, :2] * b[:, 2:])
            )
        ),
    ),
    "product of maxima": (LARGE, of_halves(lambda a, b: ops.maximum(a, 0.0) * ops.maximum(b, 0.0))),
    "product of three": (
        partial(values, 30.0, 90.0, (9,)),
        lambda x: x[:, :3] * x[:, 3:6] * x[:, 6:],
    ),
    "Multiply layer": (LARGE, of_halves(lambda a, b: layers.Multiply()([a, b]))),
    "square": (LARGE, lambda x: x * x),
    "cube": (LARGE, lambda x: x * x * x / 1e3),
    "power": (LARGE, lambda x: ops.power(x, 2.5)),
    "squared difference": (
        partial(values, -500.0, 500.0, (8,)),
        of_halves(lambda a, b: ops.square(a - b)),
    ),
    "variance": (LARGE, lambda x: ops.var(x, axis=-1, keepdims=True)),
    "outer product": (
        partial(values, 300.0, 1000.0, (2,)),
        lambda x: ops.reshape(ops.outer(x[0], x[1]), (1, 4)),
    ),
    "two to the power": (partial(values, 0.0, 20.0, (8,)), ops.exp2),
}
ALL = {**SUMS, **LOGARITHMS, **QUOTIENTS, **PRODUCTS}
# Other ways to write what another graph computes, for which kmp has the same rule, and forms of
# einsum: numerics/test_functions.py has what kmp reads of each.
SAME_RULE = {
    "average pooling of steps",
    "global average pooling of steps",
    "adaptive average pooling of steps",
    "einsum as sum of an ellipsis",
    "einsum as implicit sum",
    "einsum as trace",
    "einsum as sum of one of two",
    "einsum as sum of all squares",
    "einsum as product",
    "dot of vectors",
    "inner of vectors",
    "norm by sum of squares",
    "log of a dense softmax",
    "log of one minus tanh",
    "log2 of sigmoid",
    "log10 of sigmoid",
    "reciprocal of sigmoid",
    "sech",
    "width times height of boxes",
    "product of three",
    "cube",
}


def model_of(function, shape):
    """Returns a model that applies a function between two layers."""
    inputs = keras.Input(shape, batch_size=4)
    kernel = keras.initializers.Identity()
    hidden = layers.Dense(shape[-1], use_bias=False, kernel_initializer=kernel)(inputs)
    outputs = layers.Activation("linear", name="last")(function(hidden))
    return keras.Model(inputs, outputs)


def pair(function, activation="linear", *, layer=layers.Dense):
    """A function of two tensors, the first of which has an activation."""
    return lambda x: function(layer(8, activation=activation)(x), layers.Dense(8)(x))


def product(first, second):
    return first * second


def squeeze_and_excite(x):
    """As in MobileNetV3."""
    squeezed = layers.Dense(8)(ops.mean(x, axis=-1, keepdims=True))
    excited = layers.ReLU(6.0)(squeezed + 3.0) * (1.0 / 6.0)
    return layers.Multiply()([x, excited])


def nested_gate(x):
    inner = keras.Sequential([keras.Input((8,)), layers.Dense(4), layers.Dense(8, "sigmoid")])
    return x * inner(x)


def adaptive_norm(x):
    """As in diffusion models."""
    scale = layers.Dense(8)(x)
    return layers.LayerNormalization()(x) * (1.0 + scale)


def residual_stream(x):
    """Ends in a logarithm of what no function saturates."""
    x += layers.Dense(8, "relu")(x)
    x += layers.Dense(8, "relu")(x)
    return ops.log(ops.relu(x))


def embeddings(x):
    ids = ops.cast(ops.round(x), "int32")
    return layers.Embedding(40, 8)(ids) * layers.Embedding(40, 8)(ids)


GATES = {
    "gated linear unit": pair(product, "sigmoid"),
    "gated linear unit of operations": pair(lambda a, b: ops.sigmoid(a) * b),
    "gated linear unit by layers": pair(lambda a, b: layers.Multiply()([a, b]), "sigmoid"),
    "SwiGLU": pair(product, "silu"),
    "SwiGLU of operations": pair(lambda a, b: ops.silu(a) * b),
    "GEGLU": pair(lambda a, b: layers.Multiply()([a, b]), "gelu"),
    "tanh": pair(product, "tanh"),
    "highway": pair(lambda a, b: a * b + (1.0 - a) * b, "sigmoid"),
    "squeeze and excite": squeeze_and_excite,
    "nested": nested_gate,
    "softmax attention": pair(product, "softmax"),
    "mask": pair(lambda a, b: ops.cast(a > 0, "float32") * b),
    "adaptive normalization": adaptive_norm,
    "embeddings": embeddings,
    "clipped": pair(lambda a, b: ops.clip(a, -10.0, 10.0) * b),
    "constant": lambda x: x * 1000.0,
    "weights": lambda x: x * np.ones(8, "float32"),
}


def float32_operations(function):
    model = model_of(function, (8,))
    plan = kmp.audit(model).plan
    return {path for path in plan.float32 if path != "last"}


@pytest.mark.parametrize("name", GATES)
def test_gate_stays_in_16_bits(name):
    paths = float32_operations(GATES[name])
    assert [path for path in paths if not path.startswith("dense")] == []


def test_logarithm_does_not_keep_a_residual_stream_in_float32():
    (path,) = float32_operations(residual_stream)
    assert path.startswith("log")


def test_range_of_bfloat16_is_that_of_float32():
    model = model_of(pair(product), (8,))
    assert len(kmp.audit(model, policy="mixed_float16").plan.float32) == 2
    assert len(kmp.audit(model, policy="mixed_bfloat16").plan.float32) == 1


def test_reason_names_the_operation_that_amplifies():
    model = model_of(lambda x: ops.log(1.0 - ops.sigmoid(x)), (8,))
    reasons = [text for text in kmp.audit(model).plan.float32.values() if "amplifies" in text]
    assert len(reasons) == 2
    assert all(text.startswith("log") for text in reasons)


@pytest.mark.parametrize("name", exhaustive_unless(ALL.keys() - SAME_RULE, ALL))
def test_graph_computes_after_convert_what_it_computes_in_float32(name):
    make, function = ALL[name]
    x = make()
    model = model_of(function, x.shape[1:])
    expected = np.asarray(model(x))
    converted = kmp.convert(model)
    found = np.asarray(converted(x), "float32")
    assert np.isfinite(expected).all()
    assert any(layer.compute_dtype == "float16" for layer in converted.layers[1:])
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=1e-3)
