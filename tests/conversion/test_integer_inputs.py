import logging

import keras
import numpy as np
import pytest
from keras import layers

import kmp

IDS = np.array([[100, 3001, 4999]], "int32")
FLOATS = np.array([[0.5, 1.5, 2.5]], "float32")


@keras.saving.register_keras_serializable("tests")
class Tokens(layers.Layer):
    """An embedding, multiplied by floats if there are any."""

    def __init__(self, rows=6000, **arguments):
        super().__init__(**arguments)
        self.rows = rows
        self.table = layers.Embedding(rows, 4, embeddings_initializer="normal", dtype=self.dtype_policy, name="table")
        self.table.build()

    def call(self, ids, floats=None):
        if isinstance(ids, dict):
            ids, floats = ids["ids"], ids["floats"]
        return self.table(ids) if floats is None else self.table(ids) * floats[..., None]

    def compute_output_shape(self, shape, *others):
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
        return self.tokens(ids)


@keras.saving.register_keras_serializable("tests")
class TwoUses(Tokens):
    def call(self, ids):
        return super().call(ids, ids)


def model_of(layer, shape=(3,), **arguments):
    ids = keras.Input(shape, name="ids", **arguments)
    return keras.Model(ids, layers.Dense(1)(layer(ids)))


def arguments_model():
    ids, floats = keras.Input((3,), name="ids"), keras.Input((3,), name="floats")
    return keras.Model([ids, floats], layers.Dense(1)(Tokens(name="tokens")(ids, floats)))


def dict_model():
    inputs = {"ids": keras.Input((3,), name="ids"), "floats": keras.Input((3,), name="floats")}
    return keras.Model(inputs, layers.Dense(1)(Tokens(name="tokens")(inputs)))


def sequential_model():
    return keras.Sequential([keras.Input((3,), name="ids"), Tokens(), layers.Dense(1)])


MODELS = {
    "layer": (lambda: model_of(Tokens()), IDS),
    "layer in a layer": (lambda: model_of(Outer()), IDS),
    "sequential": (sequential_model, IDS),
    "functional inside": (lambda: model_of(model_of(Tokens())), IDS),
    "sequential inside": (lambda: model_of(keras.Sequential([Tokens()])), IDS),
    "time distributed": (lambda: model_of(layers.TimeDistributed(Tokens()), (2, 3)), np.stack([IDS, IDS], 1)),
    "arguments": (arguments_model, [IDS, FLOATS]),
    "dict": (dict_model, {"ids": IDS, "floats": FLOATS}),
}


def input_dtypes(model):
    return {tensor.name: tensor.dtype for tensor in model.inputs}


@pytest.mark.parametrize("name", MODELS)
def test_convert_declares_an_input_of_indices_as_integers_and_so_does_the_saved_model(name, tmp_path):
    make, batch = MODELS[name]
    model = make()
    converted = kmp.convert(model)
    assert input_dtypes(converted) == input_dtypes(model) | {"ids": "int32"}
    np.testing.assert_allclose(converted(batch), model(batch), atol=1e-3)
    converted.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")  # no layer of kmp is needed
    np.testing.assert_array_equal(loaded(batch), converted(batch))


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_declared_integer_dtype_stays(dtype):
    assert input_dtypes(kmp.convert(model_of(Tokens(), dtype=dtype))) == {"ids": dtype}


@pytest.mark.parametrize(("policy", "rows"), [("mixed_float16", 2049), ("mixed_bfloat16", 257)])
def test_input_stays_float32_if_the_format_has_the_indices_of_all_rows(policy, rows):
    for count, dtype in (rows, "float32"), (rows + 1, "int32"):
        assert input_dtypes(kmp.convert(model_of(Tokens(count)), policy)) == {"ids": dtype}


def test_input_that_is_used_as_a_float_too_stays_float32_and_is_reported(caplog):
    model = model_of(TwoUses(name="tokens"))
    with caplog.at_level(logging.WARNING, "kmp"):
        converted = kmp.convert(model, batch=IDS)
    assert input_dtypes(converted) == {"ids": "float32"}
    rounding, difference = caplog.messages
    assert rounding.startswith("tokens/table (6000 rows) gets its indices from input 'ids' as float16")
    assert difference.startswith("With this batch tokens/table selects other rows than in float32: 2 of 3 indices")
    assert "3000 in place of 3001" in difference
    assert kmp.audit(model).notes == (rounding,)
    assert kmp.audit(model, IDS).notes == (rounding, difference)


class FloatsOnly(layers.Layer):
    """Has an embedding without a name, and raises for integers."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.table = layers.Embedding(6000, 4)
        self.table.build()

    def call(self, ids):
        if keras.backend.is_int_dtype(ids.dtype):
            raise TypeError
        return self.table(ids)


class FloatsOnlyOfKnownShape(FloatsOnly):
    def compute_output_shape(self, shape):
        return (*shape, 4)


@pytest.mark.parametrize("layer_class", [FloatsOnly, FloatsOnlyOfKnownShape])
def test_code_that_does_not_accept_integers_keeps_its_float32_input(layer_class, caplog):
    layer = layer_class(name="layer")
    model = model_of(layer)
    with caplog.at_level(logging.WARNING, "kmp"):
        assert input_dtypes(kmp.convert(model)) == {"ids": "float32"}
    (message,) = caplog.messages
    assert message.startswith(f"layer/{layer.table.name} (6000 rows) gets its indices")
    assert kmp.audit(model).notes == (message,)


def test_convert_logs_the_inputs_that_it_declares_as_integers(caplog):
    with caplog.at_level(logging.INFO, "kmp"):
        kmp.convert(model_of(Tokens(name="tokens")))
    assert caplog.messages == [
        "Input 'ids' holds indices for tokens/table (6000 rows), which float16 would round above 2048: kmp.convert "
        "declares it with dtype='int32'."
    ]


def test_audit_shows_the_inputs_that_convert_declares_as_integers():
    audit = kmp.audit(model_of(Tokens(name="tokens")))
    (note,) = audit.notes
    assert note.startswith("Input 'ids' holds indices for tokens/table (6000 rows)")
    assert {row.path: row.planned_dtype for row in audit.rows}["ids"] == "int32"
    assert audit.to_dict()["notes"] == [note]
    assert "Input 'ids' holds indices" in str(audit)
    assert "Input &#x27;ids&#x27; holds indices" in audit._repr_html_()


def test_audit_of_a_model_without_rounded_indices_has_no_notes():
    assert kmp.audit(model_of(layers.Dense(2))).notes == ()
    assert kmp.audit(kmp.convert(model_of(Tokens())), IDS).notes == ()


def test_audit_of_a_subclassed_model_compares_the_indices_of_a_batch():
    class Subclassed(keras.Model):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            self.tokens = Tokens(name="tokens")

        def call(self, ids):
            return self.tokens(ids)

        def get_config(self):
            return {}

    model = Subclassed()
    model(IDS)
    assert kmp.audit(model, IDS).notes == ()
    (note,) = kmp.audit(model, IDS.astype("float32")).notes
    assert note.startswith("With this batch tokens/table selects other rows than in float32")


def test_to_float32_makes_the_input_that_keras_gives_a_sequential_float32():
    with kmp.enable():
        model = keras.Sequential([layers.Embedding(6000, 4)])
        model(IDS)
    assert [tensor.dtype for tensor in model.inputs] == ["float16"]
    exact = kmp.to_float32(model)
    assert [tensor.dtype for tensor in exact.inputs] == ["float32"]
    np.testing.assert_array_equal(exact(IDS), np.array(model.layers[0].embeddings)[IDS])
    _, rounding, difference = kmp.audit(model, IDS).notes
    assert "Make keras.Input(..., dtype='int32') the first layer" in rounding
    assert "2 of 3 indices differ" in difference


@keras.saving.register_keras_serializable("tests")
class Noisy(Tokens):
    def call(self, ids, training=False):
        if training:
            ids = ids + keras.random.normal(keras.ops.shape(ids), dtype=ids.dtype)
        return super().call(ids)


def test_input_that_only_training_uses_as_a_float_stays_float32():
    converted = kmp.convert(model_of(Noisy()))
    assert input_dtypes(converted) == {"ids": "float32"}
    assert np.isfinite(converted(IDS.astype("float32"), training=True)).all()


def test_input_that_is_an_output_too_keeps_its_dtype():
    ids = keras.Input((3,))
    model = keras.Model(ids, [layers.Dense(1)(Tokens()(ids)), layers.Reshape((3, 1))(ids)])
    assert [output.dtype for output in kmp.convert(model).outputs] == ["float32", "float32"]


def test_audit_does_not_change_the_names_of_later_layers():
    model, before = model_of(Tokens()), layers.Dense(1).name
    kmp.audit(model)
    number = int(before.rpartition("_")[2]) if "_" in before else 0
    assert layers.Dense(1).name == f"dense_{number + 1}"
