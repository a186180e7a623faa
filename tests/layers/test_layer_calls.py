"""What the call of a float32 layer creates computes in float32, as in a run in float32."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import kmp

# With 300 in float16, the first two are Inf, and the last one rounds 4097 to 4096.
HELPERS = {
    "multiply": (lambda t: layers.multiply([t, t]), 90000.0),
    "dot": (lambda t: layers.dot([t, t], axes=1), 360000.0),
    "add": (lambda t: layers.add([t + 1749.0, t + 1748.0]), 4097.0),
    "layer": (lambda t: layers.Rescaling(300.0)(layers.Activation("linear")(t)), 90000.0),
    "model": (
        lambda t: keras.Sequential([layers.Dense(1, kernel_initializer="ones")])(t * 300),
        360000.0,
    ),
}
THREES = np.full((1, 4), 300.0, "float32")


class Squared(keras.layers.Layer):
    def call(self, x):
        return layers.multiply([x, x])


class SquaredModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.squared = Squared()

    def call(self, x):
        return self.squared(x)


@keras.saving.register_keras_serializable("tests.layer_calls")
class Built(keras.layers.Layer):
    """Creates a layer when it is built."""

    def build(self, shape):
        self.dense = layers.Dense(2)
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x)


def first(outputs):
    return float(np.ravel(ops.cast(outputs, "float32"))[0])


@pytest.mark.parametrize("name", HELPERS)
def test_float32_wrapper_creates_float32(name, enabled):
    function, expected = HELPERS[name]
    assert first(kmp.layers.Float32(function)(THREES)) == expected
    assert keras.config.dtype_policy().name == "mixed_float16"


def test_float32_wrapper_creates_float32_without_enable():
    keras.config.set_dtype_policy("mixed_float16")
    assert first(kmp.layers.Float32(HELPERS["multiply"][0])(THREES)) == 90000.0
    assert keras.config.dtype_policy().name == "mixed_float16"


@pytest.mark.parametrize("make", [Squared, SquaredModel])
def test_layers_in_float32_create_float32(make, enabled):
    assert first(make()(THREES)) == np.inf
    wrapped, own = kmp.layers.Float32(make()), make()
    for layer in own._flatten_layers():
        layer.dtype_policy = "float32"
    assert first(wrapped(THREES)) == first(own(THREES)) == 90000.0
    inputs = keras.Input((4,))
    model = keras.Model(inputs, wrapped(inputs))
    assert first(model.predict(THREES, verbose=0)) == 90000.0


def test_a_16_bit_layer_in_a_float32_one_creates_16_bits(enabled):
    class Outer(keras.layers.Layer):
        def __init__(self):
            super().__init__(dtype="float32")
            self.inner = Squared(dtype="mixed_float16")

        def call(self, x):
            policies.append(keras.config.dtype_policy().name)
            return self.inner(x)

    policies = []
    assert first(Outer()(THREES)) == np.inf
    assert set(policies) == {"float32"}


def test_a_float32_layer_creates_float32_whoever_builds_it(enabled, tmp_path):
    layer = Built(dtype="float32")
    layer.build((None, 4))
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4), Built(dtype="float32")])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for each in (layer, model.layers[-1], loaded.layers[-1], Built(dtype="mixed_float16")):
        each(np.ones((1, 4), "float32"))
        assert each.dense.compute_dtype == each.compute_dtype


def test_the_policy_is_restored_after_an_error(enabled):
    def fails(x):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        kmp.layers.Float32(fails)(THREES)
    assert keras.config.dtype_policy().name == "mixed_float16"


def test_a_repair_reaches_what_a_call_creates(enabled):
    """The replay in float32, and the repaired layer, compute in float32 what the call creates."""
    x = (300 * np.random.default_rng(0).normal(size=(64, 8))).astype("float32")
    root = kmp.layers.Float32(lambda t: ops.sqrt(ops.mean(t, -1, keepdims=True) + 1e-3))
    model = keras.Sequential(
        [keras.Input((8,)), layers.Dense(8), Squared(name="squared"), root, layers.Dense(1)]
    )
    model.compile("adam", "mse")
    callbacks = kmp.callbacks.defaults()
    with pytest.warns(UserWarning, match="squared"):
        history = model.fit(
            x, x[:, :1] / 300, batch_size=8, epochs=2, verbose=0, callbacks=callbacks
        )
    assert model.get_layer("squared").compute_dtype == "float32"
    assert np.isfinite(history.history["loss"][-1])
