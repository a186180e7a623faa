import json
import random
import zipfile

import keras
import models
import numpy as np
import pytest
from keras import layers, ops

import kmp
from kmp.conversion.model_cloning import clone_model
from kmp.conversion.model_parts import parts_of


def from_same_config(original, config):
    return type(original).from_config(config)


@pytest.mark.parametrize(
    "make", [make for make in models.ALL if make is not models.siamese], ids=lambda make: make.__name__
)
def test_clone_has_the_same_outputs_and_shares_no_layer(make):
    model, batch = make()
    clone = clone_model(model, from_same_config, "float32")
    for output, expected in zip(*(keras.tree.flatten(variant(batch)) for variant in (clone, model)), strict=True):
        np.testing.assert_array_equal(output, expected)
    assert not {id(part.operation) for part in parts_of(clone)} & {id(part.operation) for part in parts_of(model)}
    assert type(clone) is type(model)
    assert clone.name == model.name


def test_get_config_of_the_original_layers_is_restored():
    model, _ = models.classifier()
    clone_model(model, from_same_config, "float32")
    assert all("get_config" not in vars(layer) for layer in (model, *model.layers))


def test_global_policy_is_restored_after_an_error():
    def fail(original, config):
        raise RuntimeError("no")

    with pytest.raises(ValueError, match="cannot be rebuilt from its config: no\\. It "):
        clone_model(models.classifier()[0], fail, "mixed_float16")
    assert keras.config.dtype_policy().name == "float32"


def test_config_with_missing_arguments_is_an_error():
    class MissingUnits(layers.Layer):
        def __init__(self, units=2, **kwargs):
            super().__init__(**kwargs)
            self.units = units
            self.dense = layers.Dense(units)

        def call(self, inputs):
            return self.dense(inputs)

        def get_config(self):
            return super().get_config()  # without `units`

    inputs = keras.Input((4,))
    with pytest.raises(ValueError, match="has different variables: its `get_config`"):
        clone_model(keras.Model(inputs, MissingUnits(3)(inputs)), from_same_config, "float32")


def test_vocabulary_and_adapted_statistics_are_copied():
    model, batch = models.preprocessing()
    clone = clone_model(model, from_same_config, "float32")
    original_lookup, cloned_lookup = (
        next(layer for layer in variant.layers if isinstance(layer, layers.StringLookup)) for variant in (model, clone)
    )
    assert cloned_lookup.get_vocabulary() == original_lookup.get_vocabulary()
    np.testing.assert_array_equal(clone(batch), model(batch))


def twice(values):
    return 2 * values


FUNCTIONS = pytest.mark.parametrize("function", [lambda values: 2 * values, twice], ids=["lambda", "unregistered"])


@FUNCTIONS
def test_function_among_the_arguments_of_an_operation_is_kept(function):
    inputs = keras.Input((4,))
    model = keras.Model(inputs, ops.map(function, inputs))
    clone = clone_model(model, from_same_config, "float32")
    np.testing.assert_array_equal(clone(np.ones((2, 4))), np.full((2, 4), 2.0))


@FUNCTIONS
def test_function_of_text_vectorization_is_kept(function):
    vectorization = layers.TextVectorization(vocabulary=["a"], standardize=function)
    clone = clone_model(keras.Sequential([keras.Input((), dtype="string"), vectorization]), from_same_config, "float32")
    assert clone.layers[0].get_config()["standardize"] is function


def test_saved_model_layer_is_float32_and_its_file_is_loaded_again(tmp_path):
    exported = keras.Sequential([keras.Input((4,)), layers.Dense(4)])
    exported.export(tmp_path / "exported", verbose=False)
    inside = layers.TFSMLayer(str(tmp_path / "exported"), call_endpoint="serve")
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4), inside, layers.Dense(2)])
    batch = np.ones((2, 4), "float32")
    converted = kmp.convert(model)
    assert [layer.compute_dtype for layer in converted.layers] == ["float16", "float32", "float32"]
    np.testing.assert_allclose(converted(batch), model(batch), rtol=1e-2, atol=1e-2)


def test_cloning_draws_no_seeds():
    model, _ = models.classifier()
    random.seed(0)
    clone_model(model, from_same_config, "float32")
    drawn = random.random()
    random.seed(0)
    assert drawn == random.random()


@keras.saving.register_keras_serializable("tests")
class RenamedArgument(layers.Layer):
    """Accepts the earlier name of its argument, and saves it under the new one."""

    def __init__(self, function=None, callback=None, **kwargs):
        super().__init__(**kwargs)
        self.function = function or callback

    def call(self, inputs):
        return inputs

    def get_config(self):
        return super().get_config() | {"function": self.function}

    @classmethod
    def from_config(cls, config):
        return cls(**config | {"function": keras.saving.deserialize_keras_object(config["function"])})


def save_malicious_model(path):
    """Saves a model with the code of a function that raises `SystemExit`, under the name that is not deserialized."""
    keras.Sequential([keras.Input((4,)), RenamedArgument(lambda: exec("raise SystemExit"), name="renamed")]).save(path)
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    config = json.loads(files["config.json"])
    arguments = config["config"]["layers"][1]["config"]
    arguments["callback"], arguments["function"] = arguments["function"], None
    files["config.json"] = json.dumps(config).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


@pytest.mark.filterwarnings("ignore:The object being serialized includes a `lambda`")
def test_code_in_a_file_that_was_loaded_in_safe_mode_is_not_deserialized(tmp_path):
    save_malicious_model(tmp_path / "model.keras")
    model = keras.models.load_model(tmp_path / "model.keras")
    for function in (kmp.convert, kmp.to_float32):
        with pytest.raises(ValueError, match="'renamed' cannot be rebuilt.* deserialization of a Python lambda"):
            function(model)
    assert "deserialization of a Python lambda" in kmp.audit(model).conversion_error


def test_config_with_the_tag_of_a_clone_is_left_unchanged(tmp_path):
    layer = RenamedArgument(callback={"class_name": "x", "config": {"kmp_rebuild": "kmp_rebuild_99"}, "module": "y"})
    layer.get_config = lambda: RenamedArgument.get_config(layer) | {"function": None, "callback": layer.function}
    clone = clone_model(keras.Sequential([keras.Input((4,)), layer]), from_same_config, "float32")
    assert clone.layers[0].function["class_name"] == "x"
