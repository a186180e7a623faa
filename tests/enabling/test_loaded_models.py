"""A model that is loaded without `enable` computes what it did when it was saved."""

import copy
import json
import pickle
import subprocess
import sys
import zipfile

import keras
import numpy as np
import pytest
from keras import layers

import kmp

# Indices that both 16-bit formats round.
IDS = np.random.default_rng(0).integers(2101, 4999, (64, 6)).astype("float32")


@keras.saving.register_keras_serializable("loaded models")
class Block(layers.Layer):
    """Gives its policy to its sublayers, as layers of Keras and keras-hub do."""

    def __init__(self, **options):
        super().__init__(**options)
        self.table = layers.Embedding(5000, 8, "normal", dtype=self.dtype_policy)
        self.norm = layers.LayerNormalization(dtype=self.dtype_policy)

    def build(self, shape):
        self.table.build(shape)
        self.norm.build((*shape, 8))

    def call(self, ids):
        return self.norm(self.table(ids))


def model_of(*hidden):
    ids = keras.Input((6,))
    x = Block()(ids)
    for layer in hidden:
        x = layer(x)
    return keras.Model(ids, layers.Dense(4, dtype="float32")(layers.Flatten()(x)))


def saved_by_kmp(path, policy="mixed_float16"):
    """Saves a model of kmp; returns its predictions."""
    with kmp.enable(policy):
        model = model_of(layers.Dense(8), layers.GroupNormalization(2), layers.RMSNormalization())
    model.save(path)
    return model.predict(IDS, verbose=0)


def policies_in(path):
    """Returns the class of each policy in a file, as Keras stores it."""
    config = json.loads(zipfile.ZipFile(path).read("config.json"))
    found = (layer["config"].get("dtype") for layer in config["config"]["layers"])
    return {policy["registered_name"] for policy in found if isinstance(policy, dict)}


@pytest.mark.filterwarnings("ignore:.*HDF5")
@pytest.mark.parametrize(
    ("file", "policy"), [("model.keras", "mixed_float16"), ("model.h5", "mixed_bfloat16")]
)
def test_loaded_model_predicts_what_the_saved_one_did(tmp_path, file, policy):
    expected = saved_by_kmp(tmp_path / file, policy)
    loaded = keras.models.load_model(tmp_path / file, compile=False)
    np.testing.assert_array_equal(loaded.predict(IDS, verbose=0), expected)
    assert {type(layer.dtype_policy.name) for layer in loaded.layers} == {str}
    loaded.save(tmp_path / "again.keras")
    again = keras.models.load_model(tmp_path / "again.keras", compile=False)
    np.testing.assert_array_equal(again.predict(IDS, verbose=0), expected)
    clone = keras.models.clone_model(loaded)
    clone.set_weights(loaded.get_weights())
    np.testing.assert_array_equal(clone.predict(IDS, verbose=0), expected)
    np.testing.assert_array_equal(copy.deepcopy(loaded).predict(IDS, verbose=0), expected)


def test_converted_model_is_saved_with_what_it_computes_and_its_float32_model_without(tmp_path):
    def built(dtype):
        keras.utils.set_random_seed(0)
        norm = layers.LayerNormalization(gamma_initializer="random_normal", dtype=dtype)
        return keras.Sequential([keras.Input((8,)), norm, layers.Dense(8)])

    x = np.random.default_rng(0).normal(3.0, 2.0, (512, 8)).astype("float32")
    model = kmp.convert(built("float32"))
    model.save(tmp_path / "mixed.keras")
    loaded = keras.models.load_model(tmp_path / "mixed.keras")
    # On a CPU, both compute as that of Keras.
    own_calls = ["call" in vars(each.layers[0]) for each in (model, loaded, built("float16"))]
    assert own_calls == [True, True, False]
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    kmp.to_float32(loaded).save(tmp_path / "float32.keras")
    assert policies_in(tmp_path / "float32.keras") == {None}


def test_file_of_a_float32_run_has_the_policies_of_keras(tmp_path):
    saved_by_kmp(tmp_path / "model.keras", "float32")
    assert policies_in(tmp_path / "model.keras") == {None}


NEW_PROCESS = """
import gc, sys, keras, kmp, numpy as np
from kmp.backend.patching import patches
assert patches.applied() == []
model = keras.models.load_model(sys.argv[1])
np.testing.assert_array_equal(model.predict(np.load(sys.argv[2]), verbose=0), np.load(sys.argv[3]))
plain = keras.layers.LayerNormalization(dtype="mixed_float16")
assert "call" not in vars(plain) and type(plain.dtype_policy) is keras.DTypePolicy
del model
keras.backend.clear_session()
gc.collect()
kmp.disable()
assert patches.applied() == []
"""


@pytest.mark.slow
def test_new_process_loads_the_model_and_is_free_of_patches_after_it(tmp_path):
    with kmp.enable():
        table = keras.Sequential([layers.Embedding(5000, 8, "normal")])
        hidden = [layers.LayerNormalization(), layers.Dense(4, dtype="float32")]
        model = keras.Sequential([keras.Input((6,)), table, *hidden])
    model.save(tmp_path / "model.keras")
    np.save(tmp_path / "x.npy", IDS)
    np.save(tmp_path / "y.npy", model.predict(IDS, verbose=0))
    paths = [str(tmp_path / name) for name in ("model.keras", "x.npy", "y.npy")]
    subprocess.run([sys.executable, "-c", NEW_PROCESS, *paths], check=True)


def test_keras_without_kmp_loads_the_file_with_its_own_policies(tmp_path, monkeypatch):
    saved_by_kmp(tmp_path / "model.keras")
    assert policies_in(tmp_path / "model.keras") == {"kmp>DTypePolicy"}
    monkeypatch.delitem(keras.saving.get_custom_objects(), "kmp>DTypePolicy")
    loaded = keras.models.load_model(tmp_path / "model.keras", compile=False)
    assert {type(layer.dtype_policy) for layer in loaded.layers} == {keras.DTypePolicy}
    assert loaded.layers[1].norm.compute_dtype == "float16"
    integers = np.zeros((1, 6), "int32")
    assert np.isfinite(loaded.predict(integers, verbose=0)).all()


def test_policy_of_a_layer_stands_for_that_of_keras(tmp_path):
    of_keras = keras.DTypePolicy("mixed_float16")
    with kmp.enable():
        assert type(keras.config.dtype_policy()) is keras.DTypePolicy
        layer = layers.LayerNormalization()
        dense = layers.Dense(8, dtype="mixed_bfloat16")
    policy = layer.dtype_policy
    assert (policy, of_keras) == (of_keras, policy)
    assert policy != keras.DTypePolicy("mixed_bfloat16")
    assert (type(policy.name), repr(policy)) == (str, repr(of_keras))
    assert keras.dtype_policies.get(policy) is policy
    for twin in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert (type(twin), twin) == (type(policy), policy)
    by_path = keras.dtype_policies.DTypePolicyMap("float32", {"norm": policy})
    read = keras.dtype_policies.get(keras.dtype_policies.serialize(by_path))
    assert (read["norm"], read["other"]) == (of_keras, keras.DTypePolicy("float32"))
    layer.dtype_policy = "float32"
    assert layer.get_config()["dtype"]["registered_name"] is None
    dense.build((None, 8))
    dense.quantize("int8")
    assert dense.dtype_policy.name == "int8_from_mixed_bfloat16"
    assert layers.Dense.from_config(dense.get_config()).quantization_mode == "int8"
