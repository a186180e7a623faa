import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MODES
from keras import layers

import kmp


class Tokens(layers.Layer):
    def __init__(self, rows=6000):
        super().__init__()
        self.table = layers.Embedding(rows, 2)

    def call(self, ids):
        return self.table(ids)


class Subclassed(keras.Model):
    def __init__(self, tokens=None):
        super().__init__()
        self.tokens = tokens or Tokens()
        self.outputs_layer = layers.Dense(1, dtype="float32")

    def call(self, ids):
        return self.outputs_layer(self.tokens(ids))


def functional(tokens=None, **arguments):
    ids = keras.Input((3,), name="ids", **arguments)
    return keras.Model(ids, layers.Dense(1, dtype="float32")((tokens or Tokens())(ids)))


IDS = np.array([[100, 3001, 4999]] * 2, "int32")


def messages_of_training(model, recwarn, ids=IDS, **arguments):
    model.compile("sgd", "mse", **arguments)
    for _ in range(2):
        model.fit(ids, np.zeros((len(ids), 3, 1)), verbose=0)
    warnings = [warning for warning in recwarn if warning.category is UserWarning]
    assert all(warning.filename == __file__ for warning in warnings)
    return [str(warning.message) for warning in warnings]


@pytest.mark.parametrize("mode", ["graph", "eager", "steps_per_execution"])
def test_warning_names_layer_input_and_the_line_to_change_once(enabled, recwarn, mode):
    model = functional()
    (message,) = messages_of_training(model, recwarn, **MODES[mode])
    path = f"{model.layers[1].name}/{model.layers[1].table.name}"
    assert f"{path} (6000 rows) gets its indices from input 'ids' as float16" in message
    assert "every integer only up to 2048" in message
    assert "keras.Input(..., name='ids', dtype='int32')" in message


@pytest.mark.parametrize(
    "make",
    [lambda: functional(dtype="int32"), lambda: functional(layers.Embedding(6000, 2)), Subclassed],
    ids=["integer input", "no custom layer", "subclassed"],
)
def test_exact_integers_do_not_warn(enabled, recwarn, make):
    assert messages_of_training(make(), recwarn) == []


@pytest.mark.parametrize(
    ("policy", "rows", "warns"),
    [
        ("mixed_float16", 2049, False),
        ("mixed_float16", 2050, True),
        ("mixed_bfloat16", 257, False),
        ("mixed_bfloat16", 258, True),
        ("float32", 6000, False),
    ],
)
def test_warns_only_if_the_format_does_not_have_the_indices_of_all_rows(recwarn, policy, rows, warns):
    with kmp.enable(policy):
        messages = messages_of_training(functional(Tokens(rows)), recwarn, IDS % 250)
    assert bool(messages) == warns


def test_subclassed_model_built_in_its_first_step_warns_of_float_data(enabled, recwarn):
    (message,) = messages_of_training(Subclassed(), recwarn, IDS.astype("float32"))
    assert "Pass it as integers, such as x.astype('int32')" in message


def test_sequential_without_input_warns_because_keras_makes_its_input_float16(enabled, recwarn):
    model = keras.Sequential([layers.Embedding(6000, 2), layers.Dense(1, dtype="float32")])
    (message,) = messages_of_training(model, recwarn)
    assert "Make keras.Input(..., dtype='int32') the first layer" in message


def test_float_input_inside_a_subclassed_model_warns(enabled, recwarn):
    (message,) = messages_of_training(Subclassed(functional()), recwarn)
    assert "Declare each keras.Input that it passes through with dtype='int32'" in message


def test_input_that_is_used_as_a_float_too_is_advised_to_be_split(enabled, recwarn):
    class Weighted(Tokens):
        def call(self, ids):
            return self.table(ids) * ids[..., None]

    (message,) = messages_of_training(functional(Weighted()), recwarn)
    assert "pass the indices as a separate input" in message


def test_custom_train_step_with_four_inputs_is_checked(enabled, recwarn):
    class Model(Subclassed):
        def train_step(self, data):
            ids, _, _, targets = data
            return super().train_step((ids, targets))

    model = Model()
    model.compile("sgd", "mse")
    ids = IDS.astype("float32")
    model.fit(tf.data.Dataset.from_tensors((ids, ids, ids, np.zeros((2, 3, 1)))), verbose=0)
    assert [warning for warning in recwarn if "rounds indices" in str(warning.message)]


class DynamicDepth(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x):
        return self.dense(keras.ops.sum(tf.one_hot(x, tf.shape(x)[-1]), -1, keepdims=True))


class OwnInputs(Subclassed):
    def __init__(self, inputs):
        super().__init__()
        self.inputs = inputs


@pytest.mark.parametrize("make", [DynamicDepth, lambda: OwnInputs(["a"]), lambda: OwnInputs(layers.InputLayer((3,)))])
def test_code_that_the_check_cannot_analyze_trains(enabled, recwarn, make):
    assert not [message for message in messages_of_training(make(), recwarn) if "rounds indices" in message]


def test_warning_of_a_dict_names_the_input_by_its_key(enabled, recwarn):
    ids, feature = keras.Input((3,), name="z_ids"), keras.Input((3,), name="a_feature")
    parts = [layers.Flatten()(Tokens()(ids)), feature]
    model = keras.Model([ids, feature], layers.Dense(1)(layers.Concatenate()(parts)))
    (message,) = messages_of_training(model, recwarn, {"z_ids": IDS.astype("float32"), "a_feature": np.ones((2, 3))})
    assert "keras.Input(..., name='z_ids', dtype='int32')" in message
