from functools import partial

import keras
import numpy as np
import pytest
from keras import layers, ops

import kmp
from kmp.conversion.model_parts import parts_of
from kmp.conversion.precision import (
    FOLLOWS_INPUTS,
    NEEDS_FLOAT32,
    NOT_EXAMINED,
    RUNS_IN_16_BITS,
    Rule,
    precision_of,
)


def rule_of_operation(function, policy="mixed_float16"):
    """Returns the rule of the last operation that a function adds to a graph."""
    inputs = keras.Input((4,))
    model = keras.Model(inputs, function(layers.Dense(4)(inputs)))
    return parts_of(model, precision_of(model, policy))[-1].rule


def rule_of_layer(layer, policy="mixed_float16"):
    """Returns the rule of a layer in a model of its own."""
    for shape in ((32,), (8, 32), (8, 8, 32)):
        try:
            inputs = keras.Input(shape)
            takes_several = isinstance(layer, layers.Dot | layers.Add)
            copies = [keras.Input((8, 4)), keras.Input((8, 4))] if takes_several else inputs
            arguments = (inputs,) if isinstance(layer, layers.MultiHeadAttention) else ()
            if isinstance(layer, layers.StringLookup):
                copies = keras.Input((4,), dtype="string")
            outputs = layer(copies, *arguments)
        except ValueError:
            continue
        model = keras.Model(inputs if copies is not inputs and arguments else copies, outputs)
        return precision_of(model, policy).rule_of(layer)
    raise AssertionError(layer)


def each(category, *cases):
    return [(case, category) for case in cases]


NANMEAN = pytest.mark.skipif(not hasattr(ops, "nanmean"), reason="requires a later Keras")


class CustomDense(layers.Dense):
    """Has the rule of its base class."""


class AddsLoss(layers.Layer):
    def call(self, x):
        self.add_loss(ops.mean(x))
        return x


class AddsLossWithSublayer(AddsLoss):
    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(2)

    def build(self, shape):
        self.inner.build(shape)


class OwnSpectralNormalization(layers.SpectralNormalization):
    """May compute the kernel in another way."""


@pytest.mark.parametrize(
    ("layer", "category"),
    [
        *each(
            NEEDS_FLOAT32,
            layers.Softmax(),
            layers.Activation("exponential"),
            layers.Activation("log_softmax"),
        ),
        *each(
            NEEDS_FLOAT32, layers.Dense(2, "softmax"), layers.Dense(2, activation=layers.Softmax())
        ),
        *each(
            NEEDS_FLOAT32,
            layers.LSTM(2, recurrent_activation="softmax"),
            layers.LSTM(2, activation="exponential"),
            layers.UnitNormalization(),
        ),
        *each(
            NEEDS_FLOAT32,
            layers.ActivityRegularization(l2=0.1),
            layers.Dense(2, activity_regularizer="l2"),
        ),
        *each(NEEDS_FLOAT32, AddsLoss(), OwnSpectralNormalization(layers.Dense(2))),
        *each(NEEDS_FLOAT32, layers.Normalization()),
        *each(NEEDS_FLOAT32, layers.Rescaling(1 / 255), layers.RandomFlip()),
        *each(NEEDS_FLOAT32, layers.Lambda(lambda x: x * x)),
        *each(FOLLOWS_INPUTS, layers.Lambda(lambda x: 2.0 * x)),
        *each(NEEDS_FLOAT32, layers.GlobalAveragePooling1D()),
        *each(NEEDS_FLOAT32, kmp.layers.Softmax(), kmp.layers.Float32(layers.Dense(2))),
        *each(
            RUNS_IN_16_BITS,
            layers.Dense(2),
            layers.Dense(2, "relu"),
            layers.Conv2D(2, 3),
            layers.LSTM(2),
        ),
        *each(
            RUNS_IN_16_BITS,
            layers.SeparableConv2D(2, 3),
            layers.DepthwiseConv2D(3),
            layers.Conv2DTranspose(2, 3),
        ),
        *each(RUNS_IN_16_BITS, CustomDense(2), layers.MultiHeadAttention(2, 2), layers.Dot(axes=1)),
        *each(RUNS_IN_16_BITS, layers.BatchNormalization(), kmp.layers.BatchNormalization()),
        *each(RUNS_IN_16_BITS, layers.LayerNormalization(), layers.GroupNormalization()),
        *each(RUNS_IN_16_BITS, layers.SpectralNormalization(layers.Dense(2))),
        *each(RUNS_IN_16_BITS, AddsLossWithSublayer()),
        *each(FOLLOWS_INPUTS, layers.ReLU(), layers.Add(), layers.Dropout(0.1)),
        *each(
            FOLLOWS_INPUTS,
            layers.MaxPooling2D(),
            layers.GlobalAveragePooling2D(),
            layers.StringLookup(),
        ),
        *each(
            FOLLOWS_INPUTS, layers.Cropping2D(), layers.ZeroPadding2D(), layers.AveragePooling2D(2)
        ),
    ],
    ids=lambda value: value.name if isinstance(value, keras.Layer) else value,
)
def test_layers_have_the_category_of_their_source(layer, category):
    assert rule_of_layer(layer).category == category


@pytest.mark.parametrize(
    ("function", "category"),
    [
        *each(
            NEEDS_FLOAT32, ops.exp, ops.log, ops.square, ops.softmax, ops.reciprocal, ops.squareplus
        ),
        *each(
            NEEDS_FLOAT32,
            lambda x: ops.power(x, 3),
            lambda x: 1.0 / x,
            lambda x: x * x,
            lambda x: ops.outer(x, x),
        ),
        *each(
            NEEDS_FLOAT32,
            *(partial(function, axis=-1) for function in (ops.std, ops.norm)),
            ops.sum,
            lambda x: ops.sum(ops.repeat(x, 100, axis=-1), axis=-1),
        ),
        pytest.param(lambda x: ops.nanmean(x, axis=-1), NEEDS_FLOAT32, marks=NANMEAN),
        *each(NEEDS_FLOAT32, lambda x: x * 1e5, lambda x: x * 100000),
        *each(NEEDS_FLOAT32, lambda x: x + (-1e9), lambda x: x + 1e-8),
        *each(NEEDS_FLOAT32, lambda x: ops.where(x > 0, x, -1e9)),
        *each(NEEDS_FLOAT32, lambda x: x * np.array([1.0, 2.0, 7e4, 1.0], "float32")),
        # Its gradient is float32.
        *each(NEEDS_FLOAT32, lambda x: ops.image.resize(ops.reshape(x, (-1, 2, 2, 1)), (4, 4))),
        *each(NEEDS_FLOAT32, lambda x: ops.segment_sum(x, np.zeros(2, "int32"), num_segments=1)),
        *each(
            NEEDS_FLOAT32,
            lambda x: ops.scatter(np.zeros((4, 1), "int32"), ops.max(x, axis=0), (2,)),
        ),
        *each(NEEDS_FLOAT32, lambda x: ops.round(x, 2)),  # multiplies by 100
        # NaN of small values.
        *each(NEEDS_FLOAT32, lambda x: ops.image.rgb_to_hsv(ops.reshape(x, (4, 1, 1, -1)))),
        *each(
            NEEDS_FLOAT32,
            lambda x: ops.map(ops.exp, x),
            lambda x: ops.vectorized_map(lambda row: row * row, x),
        ),
        *each(
            NEEDS_FLOAT32,
            lambda x: ops.scan(lambda carry, row: (carry + row, row), ops.max(x, axis=0), x)[0],
        ),
        *each(NEEDS_FLOAT32, lambda x: ops.associative_scan(lambda a, b: a * b, x, axis=1)),
        *each(NEEDS_FLOAT32, lambda x: ops.fori_loop(0, 3, lambda i, value: value * value, x)),
        *each(NEEDS_FLOAT32, lambda x: ops.switch(0, [lambda value: value * value], x)),
        *each(
            RUNS_IN_16_BITS,
            lambda x: ops.matmul(x, ops.transpose(x)),
            lambda x: ops.einsum("bi,ij->bj", x, np.eye(4)),
            lambda x: ops.einsum("...i,i", x, np.ones(4)),
            lambda x: ops.tensordot(x, np.eye(4), axes=1),
        ),
        *each(FOLLOWS_INPUTS, ops.softplus, ops.round, ops.relu, lambda x: ops.mean(x, axis=-1)),
        *each(FOLLOWS_INPUTS, lambda x: ops.segment_max(x, np.zeros(2, "int32"), num_segments=1)),
        *each(
            FOLLOWS_INPUTS,
            lambda x: ops.einsum("bi->ib", x),
            lambda x: ops.sum(x, axis=-1),
            lambda x: x / 2.0,
            lambda x: x + 1.0,
            lambda x: x * 1e4,
            lambda x: x + 1e-6,
            lambda x: ops.clip(x, -1e9, 1e9),
        ),
        *each(FOLLOWS_INPUTS, lambda x: ops.where(x > 0, x, -np.inf)),
    ],
)
def test_operations_have_the_category_of_their_source(function, category):
    assert rule_of_operation(function).category == category


def test_reason_contains_a_constant_outside_float16s_range():
    assert (
        rule_of_operation(lambda x: x * 1e5).reason
        == "the constant 100000 exceeds 65504 and overflows in float16"
    )
    assert rule_of_operation(lambda x: x * 1e5, "mixed_bfloat16").category == FOLLOWS_INPUTS
    regularized = layers.Dense(2, activity_regularizer="l2")
    assert rule_of_layer(regularized, "mixed_bfloat16").category == NEEDS_FLOAT32
    assert rule_of_operation(ops.exp, "mixed_bfloat16").reason.startswith(
        "bfloat16 has 8 significant bits"
    )
    assert rule_of_operation(lambda x: x + 1e-41, "mixed_bfloat16").reason.endswith(
        "below 9e-41 and is zero in bfloat16"
    )
    assert (
        rule_of_operation(lambda x: x + 1e-8).reason
        == "the constant 1e-08 is below 6e-08 and is zero in float16"
    )
    for masked in (
        lambda x: ops.where(x > 0, x, -1e9),
        lambda x: x * np.array([[1.0], [-1e9]]),
    ):
        assert "the constant -1e+09 exceeds" in rule_of_operation(masked).reason
        assert "the constant -1e+09 exceeds" in rule_of_layer(layers.Lambda(masked)).reason


def test_epsilon_of_a_custom_layer_is_checked():
    class CustomLayer(keras.layers.Layer):
        epsilon = 1e-12

        def call(self, x):
            return x / self.epsilon

    assert rule_of_layer(CustomLayer(), "mixed_bfloat16") == Rule()
    reason = rule_of_layer(CustomLayer()).reason
    assert reason.endswith("the constant 1e-12 is below 6e-08 and is zero in float16")


def test_layer_that_cannot_be_traced_is_not_examined():
    class NeedsRows(keras.layers.Layer):
        def call(self, x):
            return x * x if int(x.shape[0]) else x

        def compute_output_shape(self, shape):
            return shape

    rule = rule_of_layer(NeedsRows())
    assert (rule.category, rule.reason) == (FOLLOWS_INPUTS, NOT_EXAMINED)


def test_mean_of_float16_values_whose_sum_overflows_is_finite_as_the_rules_say():
    x = ops.convert_to_tensor(np.array([[300.0, -299.0] * 256 + [300.0] * 512]), "float16")
    assert bool(ops.all(ops.isfinite(ops.mean(x, axis=-1))))


@pytest.mark.parametrize("name", ["BatchNormalization", "LayerNormalization", "GroupNormalization"])
def test_float16_normalization_layers_accept_values_whose_squares_overflow(name):
    layer = getattr(layers, name)(
        **{"groups": 1} if name == "GroupNormalization" else {}, dtype="mixed_float16"
    )
    x = ops.convert_to_tensor(np.random.default_rng(0).normal(size=(64, 64)) * 1e4, "float16")
    outputs = np.asarray(layer(x, training=True), np.float64)
    assert np.isfinite(outputs).all()
    assert 0.9 < outputs.std() < 1.1


def test_integers_that_are_no_floats_are_not_checked():
    mask, ids = keras.Input((4,), dtype="bool"), keras.Input((4,), dtype="int32")
    model = keras.Model(
        [mask, ids], [ops.where(mask, 0, 100_000), ops.one_hot(ids % 1_000_003, 70_000)]
    )
    parts = parts_of(model, precision_of(model, "mixed_float16"))
    categories = {part.rule.category for part in parts if not part.is_layer}
    assert categories == {FOLLOWS_INPUTS}
