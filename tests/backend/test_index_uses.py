import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from kmp.backend import index_uses


class Body(layers.Layer):
    """Calls a function with itself, which holds a table of 6000 rows in several forms, and its input."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.embedding = layers.Embedding(6000, 2, mask_zero=True)
        self.small = layers.Embedding(2049, 2)
        self.lookup = layers.IntegerLookup(vocabulary=[1, 5000])
        self.encoding = layers.CategoryEncoding(6000)
        self.table = self.add_weight((6000, 2), name="table")

    def build(self, shape):
        self.embedding.build()
        self.small.build()

    def call(self, ids):
        return self.body(self, ids)


def integers(ids):
    return ops.cast(ids, "int32")


def model_of(body, dtype=None, policy="mixed_float16"):
    keras.config.set_dtype_policy(policy)
    ids = keras.Input((4,), dtype=dtype)
    return keras.Model(ids, Body(body)(ids))


def uses_in(model):
    (uses,) = index_uses.traced_uses(model, model.input)
    return uses


INDEX_USES = {
    "embedding": lambda layer, ids: layer.embedding(ids),
    "take": lambda layer, ids: ops.take(layer.table, integers(ids), axis=0),
    "take_along_axis": lambda layer, ids: ops.take_along_axis(layer.table, integers(ids[:, :2]), axis=0),
    "gather": lambda layer, ids: tf.gather(layer.table, tf.cast(ids, tf.int64)),
    "gather_nd": lambda layer, ids: tf.gather_nd(layer.table, integers(ids)[..., None]),
    "one_hot": lambda layer, ids: ops.one_hot(ids, 6000),
    "multi_hot": lambda layer, ids: layer.encoding(ids),
    "lookup": lambda layer, ids: layer.lookup(ids),
    "buckets": lambda layer, ids: layer.small(integers(ids) % 2000),
    "moved": lambda layer, ids: layer.embedding(ops.transpose(ops.expand_dims(ids[:, :2], 1))),
    "compared": lambda layer, ids: layer.embedding(ops.where(ids < 0, 0, ids)),
    "clipped": lambda layer, ids: layer.embedding(ops.clip(ids, 0, 5999)),
}


@pytest.mark.parametrize("name", INDEX_USES)
def test_rounded_index_is_found(name):
    uses = uses_in(model_of(INDEX_USES[name]))
    assert [use.rounded_to.name for use in uses.rounded] == ["float16"]
    assert uses.float_operations == ()


@pytest.mark.parametrize(("dtype", "policy"), [("int32", "mixed_float16"), (None, "float32")])
def test_index_that_is_not_cast_is_not_rounded(dtype, policy):
    uses = uses_in(model_of(INDEX_USES["embedding"], dtype, policy))
    assert [use.rows for use in uses.indices] == [6000]
    assert uses.rounded == ()


@pytest.mark.parametrize(("policy", "is_rounded"), [("mixed_float16", False), ("mixed_bfloat16", True)])
def test_index_is_rounded_only_if_the_format_does_not_have_all_rows(policy, is_rounded):
    uses = uses_in(model_of(lambda layer, ids: layer.small(ids), policy=policy))
    assert bool(uses.rounded) == is_rounded


OTHER_USES = {
    "product": lambda layer, ids: layer.embedding(ids) * ids[..., None],
    "control flow": lambda layer, ids: ops.cond(ops.sum(layer.table) > 0, *[lambda: layer.embedding(ids)] * 2),
    "called function": lambda layer, ids: tf.function(layer.embedding)(ids),
}


@pytest.mark.parametrize("name", OTHER_USES)
def test_other_uses_count_as_float(name):
    assert uses_in(model_of(OTHER_USES[name])).float_operations


def test_use_of_the_shape_and_of_integers_made_of_the_input_is_no_float_use():
    def body(layer, ids):
        positions = layer.small(ops.arange(ops.shape(ids)[1]))
        return layer.embedding(ids) * ops.cast(integers(ids), "float16")[..., None] + positions

    uses = uses_in(model_of(body))
    assert [use.rows for use in uses.rounded] == [6000]
    assert uses.float_operations == ()


def test_path_of_the_layer_that_uses_an_index():
    model = model_of(INDEX_USES["embedding"])
    (use,) = uses_in(model).rounded
    body = model.layers[1]
    assert index_uses.layer_path(model, use.operation) == f"{body.name}/{body.embedding.name}"
    model = model_of(INDEX_USES["take"])
    (use,) = uses_in(model).rounded
    assert index_uses.layer_path(model, use.operation) == model.layers[1].name


def test_values_of_the_indices_of_a_batch():
    ids = np.array([[1, 3001, 4999, 2]], "int32")
    for policy, expected in ("float32", [1, 3001, 4999, 2]), ("mixed_float16", [1, 3000, 5000, 2]):
        model = model_of(INDEX_USES["embedding"], policy=policy)
        ((_, values),) = index_uses.index_values(model, ids)
        assert values.tolist() == [expected]


def test_tracing_changes_no_state_and_adds_no_loss():
    def body(layer, ids):
        layer.add_loss(ops.sum(layer.table))
        layer.table.assign_add(ops.ones((6000, 2)))
        return layer.embedding(ids)

    model = model_of(body)
    before = np.array(model.layers[1].table)
    assert uses_in(model).rounded
    np.testing.assert_array_equal(model.layers[1].table, before)
    assert model.losses == []


def test_model_that_cannot_be_traced_has_no_known_uses():
    def body(layer, ids):
        if not isinstance(ids, keras.KerasTensor) and not tf.executing_eagerly() and layer.built:
            raise RuntimeError
        return ids

    layer = Body(body)
    layer(np.ones((1, 4)))
    assert index_uses.traced_uses(layer, np.ones((1, 4))) is None
    assert index_uses.index_values(layer, np.ones((1, 4))) == []


def test_rows_are_unknown_where_shapes_are_unknown():
    @tf.function(input_signature=[tf.TensorSpec(None, "int32"), tf.TensorSpec((6000, 2), "float32")])
    def gather(indices, table):
        return tf.gather_nd(table, indices), tf.one_hot(indices, tf.size(indices))

    (indices, _) = gather.get_concrete_function().inputs
    assert [use.rows for use in index_uses.uses_of(indices).indices] == [0, 0]
