import keras
import models
import pytest
from keras import layers

import kmp
from kmp.conversion.precision_plan import Plan, planned


def float32_in(model, **options):
    return planned(model, "mixed_float16", **options).float32


def test_each_float32_part_has_its_reason():
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(4), layers.Softmax(name="inner"), layers.Dense(2, name="end")]
    )
    assert float32_in(model, keep_float32="dense*") == {
        model.layers[0].name: "asked for",
        "inner": "exp, sum, quotient: float16 rounds small probabilities to 0",
        "end": "the model's output: float16 rounds it to 11 bits",
    }


def test_what_lies_between_float32_layers_is_float32_and_what_joins_float16_is_not():
    inputs = keras.Input((4,))
    start = layers.Flatten(name="start")(inputs)
    half = layers.Dense(4, name="half")(start)
    wide = layers.Dropout(0.1, name="between")(layers.Softmax(name="wide")(half))
    joined = layers.Add(name="joined")([wide, half])
    model = keras.Model(inputs, layers.Dense(2, name="end")(joined))
    assert set(float32_in(model)) == {"start", "wide", "between", "end"}


def test_output_of_a_nested_model_is_one_only_of_the_model_that_ends_with_it():
    model, _ = models.autoencoder()
    assert [path.split("/")[0] for path in float32_in(model)] == ["decoder"]


def test_wrapper_of_a_float32_layer_is_float32():
    model, _ = models.lstm_text()
    found = float32_in(model)
    assert [path.split("/")[0].rstrip("_0123456789") for path in found] == ["time_distributed"] * 2


def test_layers_that_keras_layers_make_inside_are_not_told():
    inputs = keras.Input((3, 8))
    attended = layers.MultiHeadAttention(2, 8, name="attention")(inputs, inputs)
    model = keras.Model(inputs, layers.Dense(2, name="end")(attended))
    assert set(float32_in(model)) == {"end"}


def test_layer_without_dtype_in_its_config_stays_float32_with_what_is_inside():
    model, _ = models.custom_layers()
    assert float32_in(model)["without"] == "its config has no dtype, so it cannot be told one"


def test_policies_without_float32_weights_keep_batch_normalization():
    model, _ = models.classifier()
    name = next(layer.name for layer in model.layers if isinstance(layer, layers.BatchNormalization))
    assert name in planned(model, "float16").float32
    assert name not in planned(model, "mixed_float16").float32


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"policy": "mixed_float16"}', '{"policy": "mixed_float16", "float32": {"a": 1}}', '{"float32": {}}'],
)
def test_file_without_a_plan_is_an_error(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match="plan.json holds no plan"):
        Plan.load(tmp_path / "plan.json")


def test_what_is_inside_of_a_float32_part_is_float32():
    plan = kmp.Plan("mixed_float16", {"encoder": "why"})
    assert [plan.policy_of(path) for path in ("encoder", "encoder/dense", "encoders")] == [
        *("float32", "float32"),
        "mixed_float16",
    ]


def test_plan_comes_back_from_its_file(tmp_path):
    plan = kmp.Plan("mixed_bfloat16", {"a/b": "why"})
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
