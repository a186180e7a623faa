"""Look-up layers select exact rows. A warning that a test does not expect is an error."""

import copy
import itertools
import pickle
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import kmp

IDS = np.array([[100, 3001, 4999]] * 2, "int32")
FLOATS = IDS.astype("float32")
ROWS = 6000


@keras.saving.register_keras_serializable("exact indices")
class Tokens(layers.Layer):
    def __init__(self, table=None, **arguments):
        super().__init__(**arguments)
        self.table = table or layers.Embedding(ROWS, 2)

    def build(self, shape):
        self.table.build(shape)

    def call(self, ids):
        assert ids.dtype in (
            self.compute_dtype,
            "int32",
        )  # no code sees another dtype than without kmp
        return self.table(ids)


class Outer(layers.Layer):
    def __init__(self):
        super().__init__()
        self.tokens = Tokens()

    def build(self, shape):
        self.tokens.build(shape)

    def call(self, batch):
        return self.tokens(ids=batch["ids"])


class Subclassed(keras.Model):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, ids):
        return self.inner(ids)


def functional(layer, **arguments):
    ids = keras.Input((3,), **arguments)
    return keras.Model(ids, layer({"ids": ids} if isinstance(layer, Outer) else ids))


EXACT = {
    "layer": lambda: functional(Tokens()),
    "layer in a layer": lambda: functional(Outer()),
    "Sequential with an Input": lambda: keras.Sequential([keras.Input((3,)), Tokens()]),
    "Sequential without an Input": lambda: keras.Sequential([layers.Embedding(ROWS, 2)]),
    "subclassed model": lambda: Subclassed(Tokens()),
    "functional model in a subclassed one": lambda: Subclassed(functional(Tokens())),
    "Sequential in a subclassed model": lambda: Subclassed(keras.Sequential([Tokens()])),
}


def table_of(model):
    (table,) = [layer for layer in model._flatten_layers() if isinstance(layer, layers.Embedding)]
    return table.embeddings.numpy()


def messages(recwarn):
    assert all(
        warning.filename == __file__ for warning in recwarn if warning.category is UserWarning
    )
    return [str(warning.message) for warning in recwarn if "indices" in str(warning.message)]


# Both policies cast in the same way.
@pytest.mark.parametrize(
    ("name", "policy"), list(zip(EXACT, itertools.cycle(["mixed_float16", "mixed_bfloat16"])))
)
def test_look_ups_select_the_rows_of_float_and_integer_indices_also_after_the_block(name, policy):
    with kmp.enable(policy):
        model = EXACT[name]()
        outputs = [model(IDS), model(FLOATS), tf.function(model)(tf.constant(FLOATS))]
    outputs += [model(FLOATS), model.predict(IDS, verbose=0)]
    for output in outputs:
        np.testing.assert_allclose(np.asarray(output, "float32"), table_of(model)[IDS], atol=5e-4)


def test_training_updates_the_rows_of_the_indices(enabled):
    model = functional(Tokens())
    model.compile("sgd", "mse", jit_compile=False)
    before = table_of(model)
    model.fit(IDS, np.ones((2, 3, 2)), verbose=0)
    assert np.unique(np.nonzero(table_of(model) != before)[0]).tolist() == [100, 3001, 4999]


def test_model_that_is_not_of_kmp_has_the_same_attributes_while_one_of_kmp_lives():
    before = vars(functional(Tokens())).keys()
    with kmp.enable():
        model = functional(Tokens())
    assert vars(functional(Tokens())).keys() == before
    np.testing.assert_allclose(model(FLOATS), table_of(model)[IDS], atol=5e-4)


class NextTokens(Tokens):
    def call(self, ids):
        return self.table(ids + 1)


def test_indices_computed_in_16_bits_warn_once_until_disable_and_in_integers_are_exact(recwarn):
    for _ in range(2):
        with kmp.enable():
            model = functional(NextTokens())
            for _ in range(2):
                model(FLOATS)
            exact = functional(NextTokens(), dtype="int32")
            np.testing.assert_allclose(exact(IDS), table_of(exact)[IDS + 1], atol=5e-4)
    first, second = messages(recwarn)
    assert first.startswith(f"Embedding '{model.layers[1].table.name[:9]}")
    assert (
        "gets its indices for 6000 rows as float16, which has every integer only up to 2048"
        in second
    )
    assert "keras.Input(..., dtype='int32')" in second
    assert "x.astype('int32')" in second


@pytest.mark.parametrize(
    ("make", "dtype", "warns"),
    [
        (lambda: layers.Embedding(2049, 2), "float16", False),
        (lambda: layers.Embedding(2050, 2), "float16", True),
        (lambda: layers.Embedding(257, 2), "bfloat16", False),
        (lambda: layers.Embedding(258, 2), "bfloat16", True),
        (lambda: layers.Embedding(6000, 2), "float32", False),
        (lambda: layers.CategoryEncoding(2049), "float16", False),
        (lambda: layers.CategoryEncoding(2050), "float16", True),
        (lambda: layers.Hashing(3), "float16", True),
        (lambda: layers.IntegerLookup(vocabulary=[1, 2]), "float16", True),
        (lambda: layers.IntegerLookup(vocabulary=[1, 2]), "int32", False),
    ],
)
def test_look_up_warns_only_if_the_dtype_of_its_indices_rounds_some_of_them(
    enabled, recwarn, make, dtype, warns
):
    make()(tf.constant([1, 2], dtype))
    assert bool(messages(recwarn)) == warns


LOOK_UPS = {
    "CategoryEncoding": lambda: layers.CategoryEncoding(ROWS),
    "Hashing": lambda: layers.Hashing(10_000),
    "IntegerLookup": lambda: layers.IntegerLookup(vocabulary=[3000, 3001, 5000, 4999]),
}


@pytest.mark.parametrize("name", LOOK_UPS)
def test_preprocessing_look_ups_are_exact(enabled, name):
    layer = LOOK_UPS[name]()
    expected = ops.convert_to_numpy(layer(IDS))
    tokens = Tokens(layer)
    tokens.build = lambda shape: None
    # In a graph, Keras casts even integers that CategoryEncoding gets to float16.
    for function, ids in (tokens, FLOATS), (tf.function(tokens), FLOATS), (tf.function(layer), IDS):
        np.testing.assert_array_equal(function(tf.constant(ids)), expected)


@pytest.mark.parametrize("values", [["a", "b"], [b"a", b"b"]], ids=["strings", "bytes"])
def test_hashing_of_texts_is_that_of_keras(values):
    texts = np.array(values)[:, None]
    expected = layers.Hashing(7)(texts).numpy()
    with kmp.enable():
        layer = layers.Hashing(7)
    for each in texts, texts.astype(object), tf.constant(texts):
        np.testing.assert_array_equal(layer(each), expected)


class Scaled(layers.Embedding):
    def call(self, ids):
        return super().call(ids) * 2


def test_subclass_of_a_look_up_layer_is_exact(enabled):
    model = functional(Tokens(Scaled(ROWS, 2)))
    np.testing.assert_allclose(model(FLOATS), 2 * table_of(model)[IDS], atol=1e-3)


def test_hidden_states_that_an_embedding_multiplies_are_no_indices(enabled, recwarn):
    layer = layers.ReversibleEmbedding(ROWS, 2)
    layer.build((None, 3))
    logits = layer(tf.constant([[1.0, 2.0]], "float16"), reverse=True)
    assert (logits.dtype.name, messages(recwarn)) == ("float16", [])


def test_model_that_is_loaded_without_enable_trains_the_rows_of_the_indices(tmp_path):
    with kmp.enable():
        model = functional(Tokens())
        model.compile("sgd", "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    before = table_of(loaded)
    loaded.fit(FLOATS, np.ones((2, 3, 2)), verbose=0)
    assert np.unique(np.nonzero(table_of(loaded) != before)[0]).tolist() == [100, 3001, 4999]


@pytest.mark.parametrize(
    "clone", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copy_of_a_look_up_layer_is_independent_and_exact(enabled, clone):
    layer = layers.Embedding(ROWS, 2)
    layer.build()
    copied = clone(layer)
    copied.embeddings.assign(np.ones((ROWS, 2)))
    np.testing.assert_array_equal(copied(IDS), np.ones((2, 3, 2)))
    assert not np.array_equal(layer(IDS), np.ones((2, 3, 2)))


def test_float32_layer_inside_a_layer_gets_what_was_cast_and_its_gradient_is_that_of_float32(
    enabled,
):
    class Around(layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = layers.Rescaling(3.0, dtype="float32")

        def call(self, x):
            return self.inner(x)

    x = tf.constant([2049.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = Around()(x)
    assert (y.numpy().item(), tape.gradient(y, x).numpy().item()) == (6147.0, 3.0)


class Capture(layers.Layer):
    def __init__(self, seen):
        super().__init__()
        self.see = seen.append

    def call(self, x):
        self.see(x)
        return x * 2


def test_float32_tensor_lives_only_as_long_as_the_one_cast_from_it(enabled):
    seen, x = [], tf.random.normal((4, 4))
    original = weakref.ref(x)
    output = Capture(seen)(x)
    cast = weakref.ref(seen[0])
    del x
    assert cast().dtype == output.dtype == "float16"
    seen.clear()
    assert (cast(), original()) == (None, None)


def test_tensors_that_were_cast_can_be_copied_pickled_and_passed_to_functions(enabled):
    Capture(seen := [])(tf.constant(FLOATS))
    for clone in copy.copy(seen[0]), copy.deepcopy(seen[0]), pickle.loads(pickle.dumps(seen[0])):
        np.testing.assert_array_equal(clone, seen[0])
    np.testing.assert_array_equal(tf.function(lambda x: x + 1)(seen[0]), seen[0] + 1)
