import json
import random
import zipfile

import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from conftest import assert_equal, values
from keras import layers, ops

import kmp


def twice(values):
    return 2 * values


def test_saved_model_layer_is_float32_and_its_file_is_loaded_again(tmp_path):
    exported = keras.Sequential([keras.Input((4,)), layers.Dense(4)])
    exported.export(tmp_path / "exported", verbose=False)
    inside = layers.TFSMLayer(str(tmp_path / "exported"), call_endpoint="serve")
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4), inside, layers.Dense(2)])
    batch = np.ones((2, 4), "float32")
    converted = kmp.convert(model)
    assert [layer.compute_dtype for layer in converted.layers] == ["float16", "float32", "float32"]
    np.testing.assert_allclose(converted(batch), model(batch), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("function", [kmp.to_float32, kmp.audit])
def test_cloning_draws_no_seeds(function):
    model, _ = models.custom_layers()
    random.seed(0)
    function(model)
    drawn = random.random()
    random.seed(0)
    assert drawn == random.random()


class Deserializes(layers.Layer):
    """Has settings in its config that are deserialized only when it is created again."""

    def __init__(self, settings, **kwargs):
        super().__init__(**kwargs)
        self.settings = settings

    def call(self, inputs):
        return inputs

    def get_config(self):
        return super().get_config() | {"settings": self.settings}

    @classmethod
    def from_config(cls, config):
        keras.saving.deserialize_keras_object(config["settings"])
        return cls(**config)


@pytest.mark.filterwarnings("ignore:The object being serialized includes a `lambda`")
def test_code_in_a_config_that_keras_did_not_run_is_not_deserialized():
    code = keras.saving.serialize_keras_object(lambda: 0)
    model = keras.Sequential([keras.Input((4,)), Deserializes(code, name="layer")])
    for function in (kmp.convert, kmp.to_float32):
        with pytest.raises(
            ValueError, match="'layer' cannot be rebuilt.* deserialization of a Python lambda"
        ):
            function(model)
    assert "deserialization of a Python lambda" in kmp.audit(model).conversion_error


def test_model_saved_while_another_one_is_converted_is_saved_as_by_keras(tmp_path):
    another = keras.Sequential([keras.Input((4,)), layers.Dense(1, activation=twice)])
    layer = layers.Dense(2, activation=lambda x: 2 * x)
    model = keras.Sequential([keras.Input((4,)), layer])

    def get_config():
        another.save(tmp_path / "during.keras")  # as another thread may do
        return layers.Dense.get_config(layer)

    another.save(tmp_path / "before.keras")
    layer.get_config = get_config
    kmp.convert(model)
    before, during = (
        json.loads(zipfile.ZipFile(tmp_path / name).read("config.json"))
        for name in ("before.keras", "during.keras")
    )
    assert during == before


def nested_pair(kinds):
    """Two nested models that share a layer, one after the other."""
    shared, inputs = layers.Dense(4, name="shared"), keras.Input((4,))
    x = inputs
    for name, kind in zip(("first", "second"), kinds, strict=True):
        if kind == "sequential":
            x = keras.Sequential([keras.Input((4,)), shared, layers.ReLU()], name=name)(x)
        else:
            own = keras.Input((4,))
            x = keras.Model(own, ops.relu(shared(own)), name=name)(x)
    return keras.Model(inputs, layers.Dense(2, name="end")(x))


@pytest.mark.parametrize("kinds", [("sequential", "functional"), ("functional", "sequential")])
def test_layer_shared_by_two_nested_models_stays_shared(kinds):
    model = nested_pair(kinds)
    converted = kmp.convert(model)
    first, second = converted.get_layer("first"), converted.get_layer("second")
    assert first.get_layer("shared") is second.get_layer("shared")
    assert first.get_layer("shared").compute_dtype == "float16"
    batch = np.ones((2, 4), "float32")
    np.testing.assert_allclose(converted(batch), model(batch), atol=1e-2)
    np.testing.assert_array_equal(kmp.to_float32(converted)(batch), model(batch))


class Subclassed(keras.Model):
    """A subclassed model without a `build`, around a functional one."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        inputs = keras.Input((4,))
        self.inside = keras.Model(inputs, ops.softmax(layers.Dense(4)(inputs)))
        self.last = layers.Dense(2)

    def call(self, inputs):
        return self.last(self.inside(inputs))

    def get_config(self):
        return super().get_config()


def test_subclassed_model_without_a_build_is_built_and_converts_back():
    model, batch = Subclassed(), np.random.default_rng(0).normal(size=(2, 4)).astype("float32")
    expected = model(batch)
    converted = kmp.convert(model)
    assert converted.built
    np.testing.assert_allclose(converted(batch), expected, atol=1e-2)
    np.testing.assert_array_equal(kmp.to_float32(converted)(batch), expected)


def test_frozen_model_that_is_called_in_inference_mode_stays_so():
    inputs, outer = keras.Input((4,)), keras.Input((4,))
    base = keras.Model(inputs, layers.BatchNormalization()(layers.Dense(4)(inputs)), name="base")
    base.trainable = False
    converted = kmp.convert(keras.Model(outer, layers.Dense(2)(base(outer, training=False))))
    assert not converted.get_layer("base").trainable_variables
    statistics = [
        np.array(variable) for variable in converted.get_layer("base").non_trainable_variables
    ]
    converted(np.ones((2, 4), "float32"), training=True)
    assert_equal(converted.get_layer("base").non_trainable_variables, statistics)


def test_layers_after_one_that_is_also_wrapped_in_float32_keep_their_state_in_float32():
    inputs, shared = keras.Input((8,)), layers.Dense(8, name="shared")
    x = kmp.layers.Float32(shared, name="wrapper")(shared(inputs))
    x = layers.BatchNormalization(name="norm")(layers.Dense(4, name="frozen")(x))
    model = keras.Model(inputs, layers.Rescaling(1e3, name="last")(x))
    model.get_layer("frozen").trainable = False
    model.get_layer("norm").moving_mean.assign(np.arange(4.0))
    batch = np.random.default_rng(0).normal(size=(2, 8)).astype("float32")
    in_float32 = kmp.to_float32(model)  # which has one layer fewer
    np.testing.assert_array_equal(in_float32(batch), model(batch))
    assert [in_float32.get_layer(name).trainable for name in ("frozen", "norm")] == [False, True]
    errors = {row.path: row.relative_error for row in kmp.audit(kmp.convert(model), batch).rows}
    assert max(errors[name] for name in ("wrapper", "frozen", "norm", "last")) < 1e-2


def test_sequential_that_has_a_layer_twice_calls_it_twice():
    shared = layers.Dense(4)
    model = keras.Sequential([keras.Input((4,)), shared, layers.ReLU(), shared])
    batch = np.random.default_rng(0).normal(size=(2, 4)).astype("float32")
    np.testing.assert_allclose(kmp.convert(model)(batch), model(batch), rtol=1e-2, atol=1e-2)
    np.testing.assert_array_equal(kmp.to_float32(model)(batch), model(batch))
    assert len(kmp.audit(model, batch).rows) == 3


def test_layer_that_is_wrapped_twice_or_twice_in_a_config_stays_shared_and_two_of_one_name_do_not():
    cell, shared = layers.GRUCell(4, name="cell"), layers.Dense(4, name="shared")
    inputs = keras.Input((3, 4))
    x = layers.TimeDistributed(shared, name="two")(
        layers.TimeDistributed(shared, name="one")(inputs)
    )
    x = layers.RNN(
        [layers.GRUCell(4, name="cell"), layers.GRUCell(4, name="cell")], True, name="two_cells"
    )(x)
    x = layers.RNN(layers.StackedRNNCells([cell, cell]), name="rnn")(x)
    converted = kmp.convert(keras.Model(inputs, layers.Dense(2)(x)))
    assert converted.get_layer("one").layer is converted.get_layer("two").layer
    cells = converted.get_layer("rnn").cell.cells
    assert cells[0] is cells[1]
    cells = converted.get_layer("two_cells").cell.cells
    assert cells[0] is not cells[1]


def test_layer_that_is_attached_to_a_functional_model_but_not_called_is_an_error():
    model, _ = models.autoencoder()
    model.extra = layers.Dense(2)
    model.extra.build((None, 2))
    if all(weight is not model.extra.kernel for weight in model.weights):
        pytest.skip("Keras 3.13 does not track what is attached to a functional model")
    with pytest.raises(ValueError, match="rebuilt from its config has different variables"):
        kmp.convert(model)


class Constraint(keras.constraints.Constraint):
    def __call__(self, weights):
        return weights


class Regularizer(keras.regularizers.Regularizer):
    def __call__(self, weights):
        return 0.1 * ops.sum(weights)

    def get_config(self):
        return {}


def test_unregistered_constraint_regularizer_and_function_of_text_vectorization_are_kept():
    arguments = {"kernel_constraint": Constraint(), "kernel_regularizer": Regularizer()}
    clone = kmp.to_float32(
        keras.Sequential([keras.Input((2,)), layers.Dense(2, **arguments)])
    ).layers[0]
    assert all(getattr(clone, name) is value for name, value in arguments.items())
    vectorization = layers.TextVectorization(vocabulary=["a"], standardize=twice)
    clone = kmp.to_float32(keras.Sequential([keras.Input((), dtype="string"), vectorization]))
    assert clone.layers[0].get_config()["standardize"] is twice


def test_functions_of_operations_and_of_layers_also_inside_a_wrapper_are_kept_with_their_closures():
    factor = np.arange(4.0, dtype="float32")
    hidden = layers.Dense(4, kernel_initializer="identity", activation=lambda x: x * factor)
    inside = layers.Dense(4, kernel_initializer="identity", activation=lambda x: x + factor)
    inputs = keras.Input((3, 4))
    x = ops.map(lambda x: x * factor, inputs)
    x = layers.TimeDistributed(inside, name="wrapper")(
        layers.Lambda(lambda x: x - factor)(hidden(x))
    )
    model = keras.Model(inputs, layers.Dense(2)(x))
    clone = kmp.to_float32(model)
    assert clone.get_layer("wrapper").layer.activation is inside.activation
    np.testing.assert_array_equal(clone(np.ones((2, 3, 4))), model(np.ones((2, 3, 4))))


def test_functional_subclass_keeps_its_class_and_its_other_arguments():
    class Labeled(keras.Model):
        def __init__(self, inputs, outputs, name=None, **kwargs):
            label = kwargs.pop("label", "")
            super().__init__(inputs, outputs, name=name, **kwargs)
            self.label = label

        def get_config(self):
            return super().get_config() | {"label": self.label}

    inputs = keras.Input((4,))
    model = Labeled(
        inputs, layers.Dense(2)(ops.exp(layers.Dense(4)(inputs))), name="named", label="mine"
    )
    if "layers" not in model.get_config():
        pytest.skip("Keras 3.13 does not put the layers of such a model into its config")
    converted = kmp.convert(model)
    assert (type(converted), converted.name, converted.label) == (Labeled, "named", "mine")
    assert [operation.name for operation in converted.operations] == [
        operation.name for operation in model.operations
    ]


def test_states_of_recurrent_layers_are_copied_and_a_batch_does_not_change_them():
    lstm = layers.LSTM(4, stateful=True, return_sequences=True)
    bidirectional = layers.Bidirectional(layers.GRU(4, stateful=True))
    model = keras.Sequential(
        [keras.Input(batch_shape=(2, 3, 4)), lstm, bidirectional, layers.Dense(1)]
    )
    batch = np.random.default_rng(0).normal(size=(2, 3, 4)).astype("float32")
    model(batch)
    before = values(lstm.states)
    assert np.any(before[0] != 0)
    converted = kmp.convert(model, batch=batch)
    for layer in (lstm, converted.layers[0]):
        assert_equal(layer.states, before)
    restored, expected = kmp.to_float32(converted), model(batch)
    np.testing.assert_allclose(converted(batch), expected, atol=1e-2)
    np.testing.assert_array_equal(restored(batch), expected)


class TensorFlowState(layers.Layer):
    """Subtracts a variable of TensorFlow, which is in no list of Keras."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.means = [tf.Variable([0.0], trainable=False)]

    def call(self, x):
        return x - ops.cast(self.means[0], x.dtype)


def test_variables_of_tensorflow_are_copied():
    state = TensorFlowState()
    model = keras.Sequential([keras.Input((4,)), state, layers.Dense(1)])
    state.means[0].assign([3.0])
    converted = kmp.convert(model)
    np.testing.assert_array_equal(converted.layers[0].means[0], [3.0])
    assert converted.layers[0].means[0] is not state.means[0]


def test_variables_of_tensorflow_that_a_config_does_not_lead_to_are_not_copied_with_a_warning():
    state = TensorFlowState()
    state.means.append(tf.Variable(1.0))
    model = keras.Sequential([keras.Input((4,)), state, layers.Dense(1)])
    with pytest.warns(UserWarning, match="The variables of TensorFlow in TensorFlowState"):
        kmp.convert(model)
