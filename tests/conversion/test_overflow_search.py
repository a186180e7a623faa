"""What stays float32 because it overflows with a batch."""

import logging
import re

import keras
import numpy as np
import pytest
from keras import layers, ops

import kmp
from kmp.backend.keras_internals import layers_by_path

CONSTANT = keras.initializers.Constant


@pytest.fixture(autouse=True)
def _log(caplog):
    caplog.set_level(logging.WARNING, "kmp")


def outputs_of(model, batch):
    return np.asarray(model(batch, training=False))


def float32_layers(model):
    """The names of the layers that compute in float32."""
    found = layers_by_path(model).values()
    return {layer.name for layer in found if layer.compute_dtype == "float32"}


def test_layer_that_overflows_with_the_batch_stays_float32_and_is_logged(caplog):
    big = layers.Dense(8, kernel_initializer=keras.initializers.Constant(3e3), name="big")
    hidden = [
        layers.Dense(8, name="small"),
        big,
        layers.LayerNormalization(),
        layers.Dense(8, name="later"),
    ]
    model = keras.Sequential([keras.Input((8,)), *hidden, layers.Dense(2, name="last")])
    batch = np.full((2, 8), 100.0, "float32")
    assert not np.isfinite(outputs_of(kmp.convert(model), batch)).all()
    converted = kmp.convert(model, batch=batch)
    assert np.isfinite(outputs_of(converted, batch)).all()
    assert "big stays float32: it overflowed with the batch" in caplog.text
    assert float32_layers(converted) == {"big", "last"}


def test_operation_of_a_graph_that_overflows_stays_float32(caplog):
    inputs = keras.Input((4,))
    hidden = ops.relu(layers.Dense(4, name="first", kernel_initializer="identity")(inputs))
    scaled = layers.LayerNormalization(name="norm")(hidden * 1e3)
    model = keras.Model(inputs, layers.Dense(2, name="last")(scaled))
    batch = np.full((2, 4), 300.0, "float32")
    converted = kmp.convert(model, batch=batch)
    logged = r"multiply\S* stays float32: it overflowed with the batch: amax 3e\+05"
    assert re.search(logged, caplog.text)
    assert np.isfinite(outputs_of(converted, batch)).all()
    assert float32_layers(converted) == {"last"}


def test_only_the_layer_of_a_nested_model_that_overflows_stays_float32():
    small = layers.Dense(4, name="small", kernel_initializer="identity")
    big = layers.Dense(4, name="big", kernel_initializer=CONSTANT(3e4))
    nested = keras.Sequential([keras.Input((4,)), small, big], name="nested")
    hidden = nested, layers.LayerNormalization(name="norm")
    model = keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(2, name="last")])
    converted = kmp.convert(model, batch=np.ones((2, 4), "float32"))
    assert float32_layers(converted) == {"big", "last"}


def test_weight_that_overflows_in_16_bits_stays_float32():
    hidden = [
        layers.Dense(4, name=name, kernel_initializer=CONSTANT(value))
        for name, value in {"tiny": 1e-9, "huge": 1e12, "after": 1.0}.items()
    ]
    model = keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(2, name="last")])
    batch = np.ones((2, 4), "float32")
    for policy in ("mixed_float16", "float16"):
        converted = kmp.convert(model, policy, batch=batch)
        assert float32_layers(converted) == {"huge", "last"}
        np.testing.assert_array_equal(converted.get_layer("huge").kernel, hidden[1].kernel)


@keras.saving.register_keras_serializable(package="tests.overflow")
class Adds(layers.Layer):
    """Adds the outputs of two sublayers, and raises an error if these have two dtypes."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.big = layers.Dense(
            4, kernel_initializer=CONSTANT(3e4), name="big", dtype=self.dtype_policy
        )
        self.small = layers.Dense(4, name="small", dtype=self.dtype_policy)

    def build(self, shape):
        self.big.build(shape)
        self.small.build(shape)

    def call(self, inputs):
        big, small = self.big(inputs), self.small(inputs)
        if big.dtype != small.dtype:
            raise TypeError("two dtypes")
        return ops.tanh(big + small)

    def compute_output_shape(self, shape):
        return shape


def test_layer_that_cannot_be_float32_alone_keeps_the_layer_around_it_in_float32():
    hidden = layers.Dense(4, name="first", kernel_initializer="identity"), Adds(name="adds")
    model = keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(2, name="last")])
    batch = np.ones((2, 4), "float32")
    converted = kmp.convert(model, batch=batch)
    assert float32_layers(converted) == {"adds", "big", "small", "last"}
    np.testing.assert_allclose(outputs_of(converted, batch), outputs_of(model, batch), rtol=1e-3)


@keras.saving.register_keras_serializable(package="tests.overflow")
class ProductBetween(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = layers.Dense(4, name="first", kernel_initializer="identity")
        self.last = layers.Dense(2, name="last")

    def call(self, inputs):
        hidden = 100.0 * self.first(inputs)
        return self.last(ops.matmul(hidden, ops.transpose(hidden)) / 1e4)


def test_layer_before_an_operation_that_overflows_in_custom_code_stays_float32(caplog):
    model, batch = ProductBetween(), np.full((2, 4), 12.0, "float32")
    model(batch)
    converted = kmp.convert(model, batch=batch)
    assert float32_layers(converted) == {"first"}
    assert np.isfinite(outputs_of(converted, batch)).all()
    assert "first stays float32: it avoids NaN and Inf with the batch: amax 12" in caplog.text
    assert "have NaN or Inf" not in caplog.text


@keras.saving.register_keras_serializable(package="tests.overflow")
class ExpOfInput(ProductBetween):
    def call(self, inputs):
        outputs = self.last(self.first(inputs))
        largest = ops.max(ops.exp(ops.cast(inputs, self.compute_dtype)))
        return ops.cast(outputs, "float32") + ops.cast(largest, "float32")


def test_overflow_that_no_layer_avoids_is_logged_and_adds_no_layer(caplog):
    model, batch = ExpOfInput(name="custom"), np.full((2, 4), 12.0, "float32")
    model(batch)
    converted = kmp.convert(model, batch=batch)
    assert "With this batch the outputs of 'custom' have NaN or Inf in mixed_float16" in caplog.text
    assert "stays float32" not in caplog.text
    assert converted.compute_dtype == "float16"


@keras.saving.register_keras_serializable(package="tests.overflow")
class LogOfRest(layers.Layer):
    """Takes the logarithm of 1 - p, where p is clipped to a number that is 1 in bfloat16.

    kmp cannot look into it without a batch.
    """

    def call(self, x):
        int(x.shape[0])
        return ops.log(1.0 - ops.minimum(ops.sigmoid(20.0 * x), 1.0 - 1e-4))

    def compute_output_shape(self, shape):
        return shape


def test_layer_that_rounding_in_bfloat16_makes_infinite_stays_float32(caplog):
    hidden = layers.Dense(4, name="first", kernel_initializer="identity"), LogOfRest(name="rest")
    model = keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(2, name="last")])
    batch = np.ones((2, 4), "float32")
    assert float32_layers(kmp.convert(model, "mixed_bfloat16")) == {"last"}
    converted = kmp.convert(model, "mixed_bfloat16", batch=batch)
    assert float32_layers(converted) == {"rest", "last"}
    assert "rest stays float32: it was NaN or Inf with the batch: amax 9.21" in caplog.text
    np.testing.assert_allclose(outputs_of(converted, batch), outputs_of(model, batch), rtol=0.02)
