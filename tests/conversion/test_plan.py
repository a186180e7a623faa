import os

import keras
import models
import pytest
from keras import layers

import kmp
from kmp.conversion import Plan


def float32_in(model, policy="mixed_float16"):
    return kmp.audit(model, policy=policy).plan.float32


def test_each_float32_layer_has_a_reason():
    hidden = [layers.Dense(4), layers.Softmax(name="inner")]
    assert float32_in(
        keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(2, name="end")])
    ) == {
        "inner": "exp, sum and division: float16 flushes small probabilities to zero",
        "end": "model output: float16 would round it to 11 significant bits",
    }


def test_layer_between_float32_layers_is_float32_unless_an_input_is_float16():
    inputs = keras.Input((4,))
    start = layers.Flatten(name="start")(inputs)
    half = layers.Dense(4, name="half")(start)
    single = layers.Dropout(0.1, name="between")(layers.Softmax(name="softmax")(half))
    joined = layers.Add(name="joined")([single, half])
    model = keras.Model(inputs, layers.Dense(2, name="end")(joined))
    assert set(float32_in(model)) == {"start", "softmax", "between", "end"}


class Tied(layers.Layer):
    """Has a layer that is also the output layer of a model, as in language models."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(4, name="dense")

    def call(self, inputs):
        return self.dense(inputs)


def tied():
    inputs, layer = keras.Input((4,)), Tied(name="tied")
    return keras.Model(inputs, layer.dense(layers.Dense(4, name="hidden")(layer(inputs)))), None


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (tied, ["tied", "tied"]),
        (models.autoencoder, ["decoder"]),  # not the output of the nested encoder
        (models.text, ["time_distributed"] * 2),  # the wrapper of a float32 layer too
    ],
)
def test_output_layer_of_the_model_and_its_wrapper_are_float32(make, expected):
    assert [path.split("/")[0].rstrip("_0123456789") for path in float32_in(make()[0])] == expected


def test_policies_without_float32_weights_keep_batch_normalization_float32():
    model, _ = models.classifier()
    name = next(
        layer.name for layer in model.layers if isinstance(layer, layers.BatchNormalization)
    )
    assert name in float32_in(model, "float16")
    assert name not in float32_in(model)


def test_path_of_the_wrong_type_raises():
    for call in (kmp.Plan("float16").save, Plan.load):
        with pytest.raises(
            TypeError, match="`path` must be the path of a local .*file. Received: path=3"
        ):
            call(3)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("[]", "it must have exactly the keys 'policy' and 'float32'"),
        ('{"policy": "mixed_float16"}', "it must have exactly the keys"),
        ('{"policy": "float64", "float32": {}}', "`policy` must be one of"),
        ('{"policy": "mixed_float16", "float32": {"a": 1}}', "`float32` must map paths to reasons"),
        (
            '{"policy": "float16", "float32": {"a": "why"}, "float32": {}}',
            "the key 'float32' is repeated",
        ),
        (
            '{"policy": "float16", "float32": ' + "[" * 100_000 + "]" * 100_000 + "}",
            "(maximum recursion depth exceeded|Stack overflow)",  # the latter on Python 3.14
        ),
        (None, "it is not a regular file"),
    ],
    ids=["empty", "list", "keys", "policy", "reason", "repeated key", "nested", "pipe"],
)
def test_plan_file_that_would_lose_entries_recurse_or_block_is_an_error_of_one_line(
    tmp_path, text, reason
):
    path = tmp_path / "plan.json"
    if text is None:
        os.mkfifo(path)
    else:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"plan.json is not a valid plan: {reason}") as caught:
        Plan.load(path)
    assert "\n" not in str(caught.value)


def test_sublayers_that_keras_layers_create_are_not_in_the_plan():
    inputs = keras.Input((3, 8))
    attended = layers.MultiHeadAttention(2, 8, name="attention")(inputs, inputs)
    assert set(float32_in(keras.Model(inputs, layers.Dense(2, name="end")(attended)))) == {"end"}
