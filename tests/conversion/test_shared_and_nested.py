"""What a call gets is known through nested models, and of each call of a shared layer or model."""

import re

import keras
import numpy as np
import pytest
from keras import layers, ops

import kmp


def nested(function, name="inner", shape=(8,)):
    inputs = keras.Input(shape)
    return keras.Model(inputs, function(inputs), name=name)


def model_of(function, shape=(8,)):
    """Returns a model that applies a function to what a layer returns."""
    inputs = keras.Input(shape)
    hidden = layers.Dense(shape[-1], name="before")(inputs)
    return keras.Model(inputs, layers.Dense(2, name="after")(function(hidden)))


def float32_in(model):
    """The layers and operations that stay float32, without the output layer, models and numbers."""
    names = [path.split("/")[-1] for path in kmp.audit(model).plan.float32]
    return {name.rstrip("_0123456789") for name in names} - {"after"}


BEFORE = {
    "data": lambda x: x,
    "bounded": ops.tanh,
    "saturated": ops.sigmoid,
    "positive": lambda x: ops.relu(x) + 1.0,
}
INSIDE = {"exponential": ops.exp, "logarithm": ops.log, "quotient": lambda x: 1.0 / x}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("inside", INSIDE)
def test_layers_in_a_nested_model_have_the_precision_that_they_have_outside(before, inside):
    def float32_with(wrap):
        layer = layers.Lambda(INSIDE[inside], name="inside")
        return float32_in(model_of(lambda x: wrap(layer)(BEFORE[before](x))))

    flat = float32_with(lambda layer: layer)
    assert float32_with(nested) == flat
    assert float32_with(lambda layer: nested(nested(layer, "innermost"))) == flat


def test_operations_of_a_nested_model_follow_its_float32_inputs_whose_errors_they_amplify():
    model = model_of(lambda x: nested(lambda x: ops.log(ops.exp(x)))(ops.sigmoid(x)))
    assert float32_in(model) == set()
    model = model_of(lambda x: nested(ops.log)(ops.sigmoid(x)))
    assert float32_in(model) == {"sigmoid"}
    kernel = -12.0 * np.eye(8, dtype="float32")
    model.get_layer("before").set_weights([kernel, np.zeros(8, "float32")])
    x = np.random.default_rng(0).uniform(0.5, 1.5, (4, 8)).astype("float32")
    np.testing.assert_allclose(kmp.convert(model)(x), model(x), rtol=0.01)


@pytest.mark.parametrize("wrap", [nested, lambda layer: layer], ids=["model", "layer"])
@pytest.mark.parametrize(("second", "expected"), [(ops.tanh, set()), (ops.relu, {"exp"})])
def test_shared_layer_or_model_is_float32_if_one_of_its_calls_needs_it(wrap, second, expected):
    def function(x):
        shared = wrap(layers.Lambda(ops.exp, name="exp"))
        return shared(ops.tanh(x)) + shared(second(x))

    assert float32_in(model_of(function)) == expected


def test_second_call_of_a_shared_layer_gets_what_follows_from_its_first_call():
    def function(x):
        shared = layers.Lambda(ops.exp, name="shared")
        return shared(ops.tanh(layers.Dense(8)(shared(ops.tanh(x)))))

    assert float32_in(model_of(function)) == set()


class Pair(layers.Layer):
    """Returns probabilities and scores."""

    def call(self, x):
        return ops.sigmoid(x), 2.0 * x


@pytest.mark.parametrize(("index", "expected"), [(0, set()), (1, {"exp"})])
def test_each_output_of_a_layer_has_its_own_range(index, expected):
    assert float32_in(model_of(lambda x: ops.exp(Pair()(x)[index]))) == expected


def test_only_the_outputs_of_a_nested_model_that_the_model_returns_are_float32():
    heads = nested(lambda x: [layers.Dense(2, name=name)(x) for name in ("left", "right")])
    x = keras.Input((8,))
    left, right = heads(x)
    model = keras.Model(x, [left, layers.Dense(2, name="last")(right)])
    assert set(kmp.audit(model).plan.float32) == {"inner/left", "last"}


def test_layer_that_gets_the_float32_inputs_of_the_model_in_a_nested_one_follows_them():
    def trunk(x):
        return layers.Dense(4)(layers.Flatten(name="start")(x))

    x = keras.Input((8,))
    assert float32_in(keras.Model(x, layers.Dense(2, name="after")(nested(trunk)(x)))) == {"start"}
    assert float32_in(model_of(nested(trunk))) == set()


def test_shared_layer_follows_the_inputs_of_all_its_calls_in_the_model_and_of_no_others():
    x = keras.Input((8,))
    shared = layers.Flatten(name="shared")
    start = shared(layers.Reshape((2, 4), name="reshape")(x))
    one = layers.Dense(8, name="after")(start)
    assert float32_in(keras.Model(x, one)) == {"reshape", "shared"}
    two = layers.Dense(2, name="after")(shared(layers.Dense(8, name="hidden")(start)))
    assert float32_in(keras.Model(x, two)) == {"reshape"}
    assert float32_in(keras.Model(x, one)) == {"reshape", "shared"}


def test_outputs_of_a_functional_model_with_a_call_of_its_own_stay_float32():
    class Scaled(keras.Model):
        def call(self, x):
            return super().call(x) * 20.0

    inputs = keras.Input((4,))
    model = Scaled(inputs, layers.Dense(4, "tanh", name="last")(layers.Dense(4)(inputs)))
    assert "last" in kmp.audit(model).plan.float32


def test_cast_in_a_constructor_that_runs_again_is_not_relied_on(caplog):
    class Mean(keras.Model):
        """Is functional, as the models of keras-hub are, and casts to the dtype of a layer."""

        def __init__(self, **kwargs):
            inputs = keras.Input((8, 4)), keras.Input((8,), dtype="int32")
            hidden = layers.Dense(4)(inputs[0])
            mask = ops.expand_dims(ops.cast(inputs[1], hidden.dtype), -1)
            total = ops.maximum(ops.sum(mask, axis=1), 1e-9)
            super().__init__(inputs, ops.sum(hidden * mask, axis=1) / total, **kwargs)

        def get_config(self):
            return {"name": self.name}

    kmp.convert(Mean(name="mean"))
    assert re.search(r"maximum\S* needs float32 but follows its inputs", caplog.text)


def test_average_and_nearest_neighbors_are_of_few_terms():
    inputs = keras.Input((4, 4, 3))
    hidden = [layers.Conv2D(4, 1)(inputs) for _ in range(2)]
    average = layers.Average(name="average")(hidden)
    larger = layers.UpSampling2D(2, name="larger")(average)
    model = keras.Model(inputs, layers.Conv2D(2, 1, name="last")(larger))
    for policy in ("mixed_float16", "mixed_bfloat16"):
        assert kmp.audit(model, policy=policy).plan.float32.keys() == {"last"}
