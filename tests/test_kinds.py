import keras
import numpy as np
import pytest
from keras import layers, ops

import kmp
from kmp._kinds import ENDANGERED, FOLLOWS, MADE_FOR_IT, judge
from kmp._structure import Part, parts_of


def judged(layer):
    return judge(Part("", layer, layer))


def judged_operation(function):
    inputs = keras.Input((4,))
    model = keras.Model(inputs, function(inputs))
    return judge(parts_of(model)[-1])


NANMEAN = pytest.mark.skipif(not hasattr(ops, "nanmean"), reason="of a later Keras")


class AddsLoss(layers.Layer):
    def call(self, x):
        self.add_loss(ops.mean(x))
        return x


class Holds(AddsLoss):
    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(2)


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        (layers.Softmax(), ENDANGERED),
        (layers.Dense(2, activation="softmax"), ENDANGERED),
        (layers.Activation("exponential"), ENDANGERED),
        (layers.Activation("log_softmax"), ENDANGERED),
        (layers.UnitNormalization(), ENDANGERED),
        (layers.ActivityRegularization(l2=0.1), ENDANGERED),
        (layers.Dense(2, activity_regularizer="l2"), ENDANGERED),
        (AddsLoss(), ENDANGERED),
        (Holds(), FOLLOWS),
        (layers.SpectralNormalization(layers.Dense(2)), ENDANGERED),
        (layers.Normalization(), ENDANGERED),
        (layers.Rescaling(1 / 255), ENDANGERED),
        (layers.RandomFlip(), ENDANGERED),
        (layers.Lambda(lambda x: x), ENDANGERED),
        (kmp.layers.Softmax(), ENDANGERED),
        (kmp.layers.Float32(layers.Dense(2)), ENDANGERED),
        (layers.Dense(2), MADE_FOR_IT),
        (layers.Dense(2, activation="relu"), MADE_FOR_IT),
        (layers.Conv2D(2, 3), MADE_FOR_IT),
        (layers.LSTM(2), MADE_FOR_IT),
        (layers.MultiHeadAttention(2, 2), MADE_FOR_IT),
        (layers.BatchNormalization(), MADE_FOR_IT),
        (kmp.layers.BatchNormalization(), MADE_FOR_IT),
        (layers.LayerNormalization(), MADE_FOR_IT),
        (layers.GroupNormalization(), MADE_FOR_IT),
        (layers.ReLU(), FOLLOWS),
        (layers.Add(), FOLLOWS),
        (layers.Dropout(0.1), FOLLOWS),
        (layers.MaxPooling2D(), FOLLOWS),
        (layers.GlobalAveragePooling2D(), FOLLOWS),
        (layers.GlobalAveragePooling1D(), ENDANGERED),
        (layers.Dense(2, activation=layers.Softmax()), ENDANGERED),
        (layers.LSTM(2, recurrent_activation="softmax"), ENDANGERED),
        (layers.Dot(axes=1), MADE_FOR_IT),
        (layers.StringLookup(), FOLLOWS),
    ],
    ids=lambda value: value.name if isinstance(value, keras.Layer) else value,
)
def test_layers_are_of_the_kind_that_their_source_says(layer, kind):
    assert judged(layer).kind == kind


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (ops.exp, ENDANGERED),
        (ops.log, ENDANGERED),
        (lambda x: ops.power(x, 3), ENDANGERED),
        (ops.square, ENDANGERED),
        (lambda x: ops.sum(x, axis=-1), ENDANGERED),
        (lambda x: ops.std(x, axis=-1), ENDANGERED),
        (lambda x: ops.norm(x, axis=-1), ENDANGERED),
        (ops.softmax, ENDANGERED),
        (ops.reciprocal, ENDANGERED),
        (lambda x: x * 1e5, ENDANGERED),
        (lambda x: x * 100000, ENDANGERED),
        (lambda x: ops.clip(x, -1e9, 1e9), ENDANGERED),
        (lambda x: 1.0 / x, ENDANGERED),
        (lambda x: x * x, ENDANGERED),
        (lambda x: x / 2.0, FOLLOWS),
        (ops.squareplus, ENDANGERED),
        (ops.softplus, FOLLOWS),
        (lambda x: x + (-1e9), ENDANGERED),
        (lambda x: x + 1e-8, ENDANGERED),
        (lambda x: x * np.array([1.0, 2.0, 7e4, 1.0], "float32"), ENDANGERED),
        (lambda x: ops.matmul(x, ops.transpose(x)), MADE_FOR_IT),
        pytest.param(lambda x: ops.nanmean(x, axis=-1), ENDANGERED, marks=NANMEAN),
        (lambda x: ops.mean(x, axis=-1), FOLLOWS),
        (ops.relu, FOLLOWS),
        (lambda x: x + 1.0, FOLLOWS),
        (lambda x: x * 1e4, FOLLOWS),
        (lambda x: x + 1e-6, FOLLOWS),
        (lambda x: ops.where(x > 0, x, -np.inf), FOLLOWS),
    ],
)
def test_operations_are_of_the_kind_that_their_source_says(function, kind):
    assert judged_operation(function).kind == kind


def test_constant_beyond_the_range_is_named():
    assert judged_operation(lambda x: x * 1e5).reason == "the constant 100000 is beyond 65504, and inf in float16"
    assert judged_operation(lambda x: x + 1e-8).reason == "the constant 1e-08 is below 6e-8, and 0 in float16"


def test_epsilon_of_a_layer_of_ones_own_is_looked_at():
    class Mine(keras.layers.Layer):
        epsilon = 1e-12

    assert judged(Mine()).reason == "the constant 1e-12 is below 6e-8, and 0 in float16"


def test_subclass_is_judged_as_what_it_is_made_from():
    class Mine(keras.layers.Dense):
        pass

    assert judged(Mine(2)).kind == MADE_FOR_IT


@pytest.mark.parametrize("name", ["mean", "var", "std", pytest.param("nanmean", marks=NANMEAN)])
def test_what_keras_does_with_float16_is_as_the_rules_say(name):
    x = ops.convert_to_tensor(np.array([[300.0, -299.0] * 256 + [300.0] * 512]), "float16")
    is_finite = bool(ops.all(ops.isfinite(getattr(ops, name)(x, axis=-1))))
    assert is_finite == (name == "mean")


@pytest.mark.parametrize(
    "layer", [layers.BatchNormalization(), layers.LayerNormalization(), layers.GroupNormalization(1)]
)
def test_norms_that_may_be_float16_stand_values_whose_squares_overflow(layer):
    layer = type(layer).from_config(layer.get_config() | {"dtype": "mixed_float16"})
    x = ops.convert_to_tensor(np.random.default_rng(0).normal(size=(64, 64)) * 1e4, "float16")
    outputs = np.asarray(layer(x, training=True), np.float64)
    assert np.isfinite(outputs).all()
    assert 0.9 < outputs.std() < 1.1


def test_unit_normalization_does_not_stand_them():
    x = ops.convert_to_tensor(np.full((1, 64), 1e3), "float16")
    outputs = np.asarray(layers.UnitNormalization(dtype="mixed_float16")(x), np.float64)
    assert not np.isclose(np.linalg.norm(outputs), 1.0, atol=0.1)


def test_constants_that_a_mask_chooses_from_are_judged_as_floats():
    mask = keras.Input((4,), dtype="bool")
    model = keras.Model(mask, ops.where(mask, 0.0, -1e9))
    (found,) = (judge(part) for part in parts_of(model) if not part.is_layer)
    assert (found.kind, "-1e+09" in found.reason) == (ENDANGERED, True)


def test_integers_are_in_no_danger_of_float16s_range():
    ids = keras.Input((4,), dtype="int32")
    model = keras.Model(ids, ops.one_hot(ids % 1_000_003, 70_000))
    assert {judge(part).kind for part in parts_of(model) if not part.is_layer} == {FOLLOWS}
