"""With a batch, what was measured takes the place of bounds for any data."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import kmp

NORMAL = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")


def variance(x):
    mean = ops.mean(x, axis=-1, keepdims=True)
    return ops.mean(x * x, axis=-1, keepdims=True) - mean * mean


def model_of(function, shift=0.0):
    """A model that computes a function of its inputs, which a layer shifts."""
    bias = keras.initializers.Constant(shift)
    first = layers.Dense(8, kernel_initializer="identity", bias_initializer=bias, name="first")
    inputs = keras.Input((8,))
    return keras.Model(inputs, layers.Dense(2, name="last")(function(first(inputs))))


def in_float32(model, batch=None):
    """The paths that stay float32, but for the last layer."""
    return kmp.audit(model, batch).plan.float32.keys() - {"last"}


@pytest.mark.parametrize("function", [ops.square, ops.exp, lambda x: x * x])
def test_result_that_stays_in_range_for_numbers_16_times_as_large_is_in_16_bits(function):
    model = model_of(function)
    (operation,) = in_float32(model)
    assert in_float32(model, 0.1 * NORMAL) == set()
    assert in_float32(model, 10.0 * NORMAL) == {operation}
    converted = kmp.convert(model, batch=0.1 * NORMAL)
    exact = np.asarray(model(NORMAL))
    np.testing.assert_allclose(converted(NORMAL), exact, atol=0.02 * np.abs(exact).max())


@pytest.mark.parametrize(
    "function", [lambda x: ops.log(ops.sigmoid(x)), lambda x: 1.0 / (ops.abs(x) + 1e-7)]
)
def test_function_with_a_pole_is_bounded_for_any_data(function):
    """How close to the pole other batches come does not follow from how large their numbers are."""
    model = model_of(function)
    assert in_float32(model, NORMAL) == in_float32(model) != set()


def test_function_of_one_measured_tensor_is_judged_inside_of_layers_too():
    squares = layers.Lambda(lambda x: ops.mean(ops.square(x), axis=-1, keepdims=True), name="f")
    model = model_of(squares)
    assert in_float32(model) == {"f"}
    assert in_float32(model, NORMAL) == set()


def test_difference_of_measured_numbers_that_are_close_is_computed_in_float32():
    model, batch = model_of(variance, shift=10.0), 0.05 * NORMAL
    found = kmp.audit(model, batch).plan.float32
    reason = "the difference amplifies rounding errors, to up to "
    assert found["subtract"].startswith(reason)
    assert "subtract amplifies the rounding errors of what it returns" in found.values()
    exact, converted = np.asarray(model(batch)), kmp.convert(model, batch=batch)
    # What is left is the rounding of the first layer, beside its result of 10.
    assert np.abs(np.asarray(converted(batch)) - exact).max() < 0.5 * np.ptp(exact)
    assert "subtract" not in in_float32(model_of(variance), NORMAL)


def test_what_a_custom_layer_computes_of_two_tensors_is_bounded_for_any_data():
    class Variance(layers.Layer):
        def call(self, x):
            return variance(x)

    model = model_of(Variance(name="variance"), shift=10.0)
    assert in_float32(model, 0.05 * NORMAL) == {"variance"}


def test_batch_of_several_inputs_is_measured_for_each():
    inputs = {name: keras.Input((8,), name=name) for name in ("small", "large")}
    casts = {name: layers.Dense(8, kernel_initializer="identity")(x) for name, x in inputs.items()}
    squares = [ops.square(casts["small"]), ops.square(casts["large"])]
    model = keras.Model(inputs, layers.Dense(2, name="last")(ops.concatenate(squares)))
    batch = {"small": 0.1 * NORMAL, "large": 100.0 * NORMAL}
    assert len(in_float32(model, batch)) == 1
    assert len(in_float32(model)) == 2


def test_batch_with_nan_measures_nothing():
    model = model_of(ops.square)
    batch = np.full((2, 8), np.nan, "float32")
    assert in_float32(model, batch) == in_float32(model)


class SquaresByWeight(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return ops.square(x) * self.scale


def test_dictionary_of_inputs_is_measured_by_name():
    first, second = (keras.Input((8,), name=name) for name in ("b", "a"))
    joined = ops.concatenate([SquaresByWeight(name="squares")(first), second])
    model = keras.Model([first, second], layers.Dense(1, name="last")(joined))
    batch = {"b": 30.0 * NORMAL, "a": 0.01 * NORMAL}
    assert in_float32(model, batch) == in_float32(model) == {"squares"}


def test_inputs_of_any_length_and_of_integers_are_measured():
    inputs = keras.Input((None, 4))
    squares = layers.Lambda(ops.square, name="squares")(inputs)
    model = keras.Model(inputs, layers.Dense(1, name="last")(squares))
    assert in_float32(model) == {"squares"}
    found = kmp.audit(model, np.ones((2, 5, 4), "uint8")).plan.float32
    assert found["squares"] == "all its inputs are float32"


def test_result_that_is_always_0_is_measured():
    difference = layers.Lambda(lambda x: ops.maximum(ops.square(x), 1.0) - 1.0)
    model, batch = model_of(difference), 0.1 * NORMAL
    converted = kmp.convert(model, batch=batch)
    np.testing.assert_array_equal(converted(batch), model(batch))


class MayAdd(layers.Layer):
    def call(self, x, other=None):
        return x if other is None else x + other

    def compute_output_shape(self, x_shape, other_shape=None):
        return x_shape


def test_optional_input_may_be_missing_in_a_batch():
    x, other = keras.Input((8,)), keras.Input((8,), optional=True)
    outputs = layers.Dense(2, name="last")(ops.square(MayAdd()(layers.Dense(8)(x), other)))
    model = keras.Model([x, other], outputs)
    assert "square" in " ".join(in_float32(model))
    assert in_float32(model, [NORMAL, None]) == set()
    other_first = keras.Model([other, x], outputs)
    assert in_float32(other_first, [None, NORMAL]) == set()
