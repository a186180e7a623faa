import keras
import numpy as np
import pytest
from keras import layers, ops

import kmp
from kmp.conversion.model_parts import Part, parts_of
from kmp.conversion.precision_rules import FOLLOWS_INPUTS, NEEDS_FLOAT32, RUNS_IN_FLOAT16, rule_for


def rule_for_layer(layer):
    return rule_for(Part("", layer, layer))


def rule_for_operation(function, dtype="float16"):
    inputs = keras.Input((4,))
    model = keras.Model(inputs, function(inputs))
    return rule_for(parts_of(model)[-1], dtype)


NANMEAN = pytest.mark.skipif(not hasattr(ops, "nanmean"), reason="requires a later Keras")


class AddsLoss(layers.Layer):
    def call(self, x):
        self.add_loss(ops.mean(x))
        return x


class AddsLossWithSublayer(AddsLoss):
    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(2)


@pytest.mark.parametrize(
    ("layer", "category"),
    [
        (layers.Softmax(), NEEDS_FLOAT32),
        (layers.Dense(2, activation="softmax"), NEEDS_FLOAT32),
        (layers.Activation("exponential"), NEEDS_FLOAT32),
        (layers.Activation("log_softmax"), NEEDS_FLOAT32),
        (layers.UnitNormalization(), NEEDS_FLOAT32),
        (layers.ActivityRegularization(l2=0.1), NEEDS_FLOAT32),
        (AddsLoss(), NEEDS_FLOAT32),
        (AddsLossWithSublayer(), FOLLOWS_INPUTS),
        (layers.SpectralNormalization(layers.Dense(2)), NEEDS_FLOAT32),
        (layers.Normalization(), NEEDS_FLOAT32),
        (layers.Rescaling(1 / 255), NEEDS_FLOAT32),
        (layers.RandomFlip(), NEEDS_FLOAT32),
        (layers.Lambda(lambda x: x), NEEDS_FLOAT32),
        (kmp.layers.Softmax(), NEEDS_FLOAT32),
        (kmp.layers.Float32(layers.Dense(2)), NEEDS_FLOAT32),
        (layers.Dense(2), RUNS_IN_FLOAT16),
        (layers.Dense(2, activation="relu"), RUNS_IN_FLOAT16),
        (layers.Conv2D(2, 3), RUNS_IN_FLOAT16),
        (layers.LSTM(2), RUNS_IN_FLOAT16),
        (layers.MultiHeadAttention(2, 2), RUNS_IN_FLOAT16),
        (layers.BatchNormalization(), RUNS_IN_FLOAT16),
        (kmp.layers.BatchNormalization(), RUNS_IN_FLOAT16),
        (layers.LayerNormalization(), RUNS_IN_FLOAT16),
        (layers.GroupNormalization(), RUNS_IN_FLOAT16),
        (layers.ReLU(), FOLLOWS_INPUTS),
        (layers.Add(), FOLLOWS_INPUTS),
        (layers.Dropout(0.1), FOLLOWS_INPUTS),
        (layers.MaxPooling2D(), FOLLOWS_INPUTS),
        (layers.GlobalAveragePooling2D(), FOLLOWS_INPUTS),
        (layers.GlobalAveragePooling1D(), NEEDS_FLOAT32),
        (layers.Dense(2, activation=layers.Softmax()), NEEDS_FLOAT32),
        (layers.LSTM(2, recurrent_activation="softmax"), NEEDS_FLOAT32),
        (layers.Dot(axes=1), RUNS_IN_FLOAT16),
        (layers.StringLookup(), FOLLOWS_INPUTS),
    ],
    ids=lambda value: value.name if isinstance(value, keras.Layer) else value,
)
def test_layers_have_the_category_of_their_source(layer, category):
    assert rule_for_layer(layer).category == category


@pytest.mark.parametrize(
    ("function", "category"),
    [
        (ops.exp, NEEDS_FLOAT32),
        (ops.log, NEEDS_FLOAT32),
        (lambda x: ops.power(x, 3), NEEDS_FLOAT32),
        (ops.square, NEEDS_FLOAT32),
        (lambda x: ops.sum(x, axis=-1), NEEDS_FLOAT32),
        (lambda x: ops.std(x, axis=-1), NEEDS_FLOAT32),
        (lambda x: ops.norm(x, axis=-1), NEEDS_FLOAT32),
        (ops.softmax, NEEDS_FLOAT32),
        (ops.reciprocal, NEEDS_FLOAT32),
        (lambda x: x * 1e5, NEEDS_FLOAT32),
        (lambda x: x * 100000, NEEDS_FLOAT32),
        (lambda x: ops.clip(x, -1e9, 1e9), NEEDS_FLOAT32),
        (lambda x: 1.0 / x, NEEDS_FLOAT32),
        (lambda x: x * x, NEEDS_FLOAT32),
        (lambda x: x / 2.0, FOLLOWS_INPUTS),
        (lambda x: ops.image.resize(ops.reshape(x, (-1, 2, 2, 1)), (4, 4)), NEEDS_FLOAT32),  # its gradient is float32
        (ops.squareplus, NEEDS_FLOAT32),
        (ops.softplus, FOLLOWS_INPUTS),
        (lambda x: x + (-1e9), NEEDS_FLOAT32),
        (lambda x: x + 1e-8, NEEDS_FLOAT32),
        (lambda x: x * np.array([1.0, 2.0, 7e4, 1.0], "float32"), NEEDS_FLOAT32),
        (lambda x: ops.matmul(x, ops.transpose(x)), RUNS_IN_FLOAT16),
        pytest.param(lambda x: ops.nanmean(x, axis=-1), NEEDS_FLOAT32, marks=NANMEAN),
        (lambda x: ops.mean(x, axis=-1), FOLLOWS_INPUTS),
        (lambda x: ops.segment_sum(x, np.zeros(2, "int32"), num_segments=1), NEEDS_FLOAT32),
        (lambda x: ops.segment_max(x, np.zeros(2, "int32"), num_segments=1), FOLLOWS_INPUTS),
        (lambda x: ops.scatter(np.zeros((4, 1), "int32"), ops.sum(x, axis=0), (2,)), NEEDS_FLOAT32),
        (lambda x: ops.outer(x, x), NEEDS_FLOAT32),
        (lambda x: ops.round(x, 2), NEEDS_FLOAT32),  # multiplies by 100
        (ops.round, FOLLOWS_INPUTS),
        (lambda x: ops.image.rgb_to_hsv(ops.reshape(x, (4, 1, 1, -1))), NEEDS_FLOAT32),  # NaN of small values
        (lambda x: ops.map(ops.sum, x), NEEDS_FLOAT32),
        (lambda x: ops.vectorized_map(lambda row: row * row, x), NEEDS_FLOAT32),
        (lambda x: ops.scan(lambda carry, row: (carry + row, row), ops.max(x, axis=0), x)[0], NEEDS_FLOAT32),
        (lambda x: ops.associative_scan(lambda a, b: a + b, x), NEEDS_FLOAT32),
        (lambda x: ops.fori_loop(0, 3, lambda i, value: value * value, x), NEEDS_FLOAT32),
        (lambda x: ops.switch(0, [lambda value: value * value], x), NEEDS_FLOAT32),
        (ops.relu, FOLLOWS_INPUTS),
        (lambda x: x + 1.0, FOLLOWS_INPUTS),
        (lambda x: x * 1e4, FOLLOWS_INPUTS),
        (lambda x: x + 1e-6, FOLLOWS_INPUTS),
        (lambda x: ops.where(x > 0, x, -np.inf), FOLLOWS_INPUTS),
    ],
)
def test_operations_have_the_category_of_their_source(function, category):
    assert rule_for_operation(function).category == category


def test_reason_contains_a_constant_outside_float16s_range():
    assert rule_for_operation(lambda x: x * 1e5).reason == "the constant 100000 exceeds 65504 and overflows in float16"
    assert rule_for_operation(lambda x: x * 1e5, "bfloat16").category == FOLLOWS_INPUTS
    assert rule_for_operation(ops.exp, "bfloat16").reason.startswith("bfloat16 has 8 significant bits")
    assert rule_for_operation(lambda x: x + 1e-41, "bfloat16").reason.endswith("below 9e-41 and is zero in bfloat16")
    assert rule_for_operation(lambda x: x + 1e-8).reason == "the constant 1e-08 is below 6e-08 and is zero in float16"


def test_epsilon_of_a_custom_layer_is_checked():
    class CustomLayer(keras.layers.Layer):
        epsilon = 1e-12

        def call(self, x):
            return x / self.epsilon

    in_bfloat16 = rule_for(Part("", CustomLayer(), None), "bfloat16")
    assert (in_bfloat16.category, in_bfloat16.reason) == (
        FOLLOWS_INPUTS,
        "a custom layer: kmp does not examine its `call`",
    )
    assert rule_for_layer(CustomLayer()).reason == "the constant 1e-12 is below 6e-08 and is zero in float16"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_layer_with_an_activity_regularizer_needs_float32(dtype):
    layer = layers.Dense(2, activity_regularizer="l2")
    assert rule_for(Part("", layer, layer), dtype).category == NEEDS_FLOAT32


def test_subclass_has_the_rule_of_its_base_class():
    class CustomDense(keras.layers.Dense):
        pass

    assert rule_for_layer(CustomDense(2)).category == RUNS_IN_FLOAT16


@pytest.mark.parametrize("name", ["mean", "var", "std", pytest.param("nanmean", marks=NANMEAN)])
def test_only_mean_is_finite_in_float16_as_the_rules_say(name):
    x = ops.convert_to_tensor(np.array([[300.0, -299.0] * 256 + [300.0] * 512]), "float16")
    is_finite = bool(ops.all(ops.isfinite(getattr(ops, name)(x, axis=-1))))
    assert is_finite == (name == "mean")


@pytest.mark.parametrize(
    "layer", [layers.BatchNormalization(), layers.LayerNormalization(), layers.GroupNormalization(1)]
)
def test_float16_normalization_layers_accept_values_whose_squares_overflow(layer):
    layer = type(layer).from_config(layer.get_config() | {"dtype": "mixed_float16"})
    x = ops.convert_to_tensor(np.random.default_rng(0).normal(size=(64, 64)) * 1e4, "float16")
    outputs = np.asarray(layer(x, training=True), np.float64)
    assert np.isfinite(outputs).all()
    assert 0.9 < outputs.std() < 1.1


def test_unit_normalization_is_wrong_for_values_whose_squares_overflow():
    x = ops.convert_to_tensor(np.full((1, 64), 1e3), "float16")
    outputs = np.asarray(layers.UnitNormalization(dtype="mixed_float16")(x), np.float64)
    assert not np.isclose(np.linalg.norm(outputs), 1.0, atol=0.1)


def test_float_constants_of_a_where_with_a_boolean_mask_are_checked():
    mask = keras.Input((4,), dtype="bool")
    model = keras.Model(mask, ops.where(mask, 0.0, -1e9))
    (rule,) = (rule_for(part) for part in parts_of(model) if not part.is_layer)
    assert (rule.category, "-1e+09" in rule.reason) == (NEEDS_FLOAT32, True)


def test_integer_constants_are_not_checked():
    ids = keras.Input((4,), dtype="int32")
    model = keras.Model(ids, ops.one_hot(ids % 1_000_003, 70_000))
    assert {rule_for(part).category for part in parts_of(model) if not part.is_layer} == {FOLLOWS_INPUTS}
