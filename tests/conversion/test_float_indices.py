"""Layers that look up more rows than 16 bits have integers, by floats, stay float32."""

import keras
import numpy as np
import pytest
from keras import layers

import kmp

IDS = np.array([[100, 3001, 4999]], "int32")
FLOATS = np.array([[0.5, 1.5, 2.5]], "float32")


@keras.saving.register_keras_serializable("tests")
class Tokens(layers.Layer):
    """An embedding of ids, or of those in a dictionary that also has factors."""

    def __init__(self, rows=6000, **arguments):
        super().__init__(**arguments)
        self.rows = rows
        self.table = layers.Embedding(
            rows, 4, embeddings_initializer="normal", dtype=self.dtype_policy, name="table"
        )
        self.table.build()

    def call(self, inputs):
        if isinstance(inputs, dict):
            return self.table(inputs["ids"]) * inputs["floats"][..., None]
        return self.table(inputs)

    def compute_output_shape(self, shape):
        return (*(shape["ids"] if isinstance(shape, dict) else shape), 4)

    def get_config(self):
        return super().get_config() | {"rows": self.rows}


@keras.saving.register_keras_serializable("tests")
class Outer(layers.Layer):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.tokens = Tokens(dtype=self.dtype_policy, name="inner")

    def build(self, shape):
        self.tokens.build(shape)

    def call(self, ids):
        return self.tokens(ids + 0.0)


def model_of(layer, shape=(3,), **arguments):
    ids = keras.Input(shape, name="ids", **arguments)
    return keras.Model(ids, layers.Dense(1)(layer(ids)))


def dict_model():
    inputs = {"ids": keras.Input((3,), name="ids"), "floats": keras.Input((3,), name="floats")}
    return keras.Model(inputs, layers.Dense(1)(Tokens()(inputs)))


MODELS = {
    "layer": (lambda: model_of(Tokens()), IDS),
    "layer in a layer": (lambda: model_of(Outer()), IDS),
    "functional inside": (lambda: model_of(model_of(Tokens())), IDS),
    "time distributed": (
        lambda: model_of(layers.TimeDistributed(Tokens()), (2, 3)),
        np.stack([IDS, IDS], 1),
    ),
    "dict": (dict_model, {"ids": IDS, "floats": FLOATS}),
}


def dtype_of_table(model):
    (table,) = [layer for layer in model._flatten_layers() if isinstance(layer, layers.Embedding)]
    return table.compute_dtype


@pytest.mark.parametrize("name", MODELS)
def test_convert_keeps_the_rows_and_so_does_the_saved_model(name, tmp_path):
    make, batch = MODELS[name]
    model = make()
    converted = kmp.convert(model)
    assert [tensor.dtype for tensor in converted.inputs] == [
        tensor.dtype for tensor in model.inputs
    ]
    np.testing.assert_allclose(converted(batch), model(batch), atol=1e-3)
    converted.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")  # no layer of kmp is needed
    np.testing.assert_array_equal(loaded(batch), converted(batch))


@pytest.mark.parametrize(("policy", "rows"), [("mixed_float16", 2049), ("mixed_bfloat16", 257)])
def test_layer_is_converted_if_its_indices_are_exact(policy, rows):
    dtype = policy.removeprefix("mixed_")
    assert dtype_of_table(kmp.convert(model_of(Tokens(rows)), policy)) == dtype
    assert dtype_of_table(kmp.convert(model_of(Tokens(rows + 1)), policy)) == "float32"
    assert dtype_of_table(kmp.convert(model_of(Tokens(rows + 1), dtype="int32"), policy)) == dtype
    assert dtype_of_table(kmp.convert(model_of(layers.Embedding(rows + 1, 4)), policy)) == dtype


def test_plan_and_audit_name_rows_input_and_the_line_to_change():
    audit = kmp.audit(model_of(Tokens(name="tokens")))
    reason = audit.plan.float32["tokens"]
    assert reason.startswith("it looks up 6000 rows and gets input 'ids' as floats")
    assert "keras.Input(..., name='ids', dtype='int32')" in reason
    assert {row.path: row.reason for row in audit.rows}["tokens"] == reason


def test_layer_that_looks_up_any_integer_stays_float32():
    class Hashed(layers.Layer):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            self.hashing = layers.Hashing(3)

        def call(self, ids):
            return keras.ops.cast(self.hashing(ids), self.compute_dtype)

    reasons = kmp.audit(model_of(Hashed(name="hashed"))).plan.float32
    assert reasons["hashed"].startswith("it looks up any integer")


def test_to_float32_makes_the_input_that_keras_gives_a_sequential_float32():
    with kmp.enable():
        model = keras.Sequential([layers.Embedding(6000, 4)])
        model(IDS)
    assert [tensor.dtype for tensor in model.inputs] == ["float16"]
    exact = kmp.to_float32(model)
    assert [tensor.dtype for tensor in exact.inputs] == ["float32"]
    np.testing.assert_array_equal(exact(IDS), model.layers[0].embeddings.numpy()[IDS])
