import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MODES, sequential

import kmp
from kmp.guarding.guarded_step import guard_train_step, guarded_step_of
from kmp.replay import BatchCapture, batch_variables

pytestmark = pytest.mark.usefixtures("enabled")


def with_capture(model):
    guard_train_step(model)
    capture = BatchCapture(model, model.optimizer)
    guarded_step_of(model).add_capture(capture)
    return model, capture


def captured_model(mode, optimizer="sgd"):
    return with_capture(
        sequential(keras.layers.Dense(1), shape=(3,), optimizer=optimizer, **MODES[mode])
    )


def fit(model, x, **options):
    model.fit(x, np.zeros((len(x), 1)), verbose=0, shuffle=False, **{"batch_size": 8} | options)


# Other tests use the mode graph.
@pytest.mark.parametrize("mode", ["eager", "xla", "steps_per_execution"])
def test_requested_batch_and_skipped_batches_are_captured(mode):
    model, capture = captured_model(mode)
    x = np.linspace(-1, 1, 60, dtype="float32").reshape(20, 3)
    assert capture.read() is None
    capture.request()
    fit(model, x)
    first = capture.read()
    np.testing.assert_array_equal(first.data[0], x[:8])
    assert (first.batch_size, first.step, len(first.data)) == (8, 1, 2)
    x[18, 1] = np.nan
    fit(model, x)
    skipped = capture.read()
    assert (skipped.batch_size, skipped.step) == (4, 6)
    # The suspicious example comes first.
    np.testing.assert_array_equal(skipped.data[0], x[[18, 16, 17, 19]])
    capture.forget()
    assert capture.read() is None


def test_suspicious_examples_are_captured_first_and_others_in_the_next_skipped_step():
    model, capture = captured_model("eager", optimizer=kmp.wrap("sgd", loss_scale=2.0**127))
    x = np.arange(768, dtype="float32").reshape(256, 3) / 768
    for rows in (range(128), [*range(158, 256), *range(30)]):  # 0.618 of the batch later
        fit(model, x, batch_size=256)
        np.testing.assert_array_equal(capture.read().data[0], x[list(rows)])
    x[50] = np.inf
    fit(model, x, batch_size=256)
    batch = capture.read()
    assert (batch.data[0].shape, batch.batch_size) == ((128, 3), 256)
    assert np.isinf(batch.data[0][0]).all()


@pytest.mark.parametrize("is_shape_known", [True, False])
def test_fewer_of_large_examples_are_captured(is_shape_known, monkeypatch):
    monkeypatch.setattr(batch_variables, "_MOST_BYTES", 48)  # an example has 3 floats and a target
    model, capture = captured_model("eager" if is_shape_known else "graph")
    x = np.arange(24, dtype="float32").reshape(8, 3)
    capture.request()
    if is_shape_known:
        fit(model, x)
    else:
        unknown = functools.partial(tf.compat.v1.placeholder_with_default, shape=(None, None))
        data = tf.data.Dataset.from_tensors((x, x[:, :1])).map(
            lambda x, y: (unknown(x), unknown(y))
        )
        model.fit(data, shuffle=False, verbose=0)
    captured = capture.read()
    assert captured.batch_size == 8
    np.testing.assert_array_equal(captured.data[0], x[:3])


def test_batch_of_several_arrays_is_captured_with_their_dtypes():
    ids, mask = (
        keras.Input((), dtype="int32", name="ids"),
        keras.Input((2,), dtype="bool", name="mask"),
    )
    embedded = keras.layers.Embedding(5, 2)(ids)
    outputs = [
        keras.layers.Dense(1, dtype="float32")(embedded * keras.ops.cast(mask, "float16")),
        embedded,
    ]
    model = keras.Model({"ids": ids, "mask": mask}, outputs)
    model.compile("sgd", ["mse", "mse"], jit_compile=True)  # XLA reads no int32 variables on a GPU
    model, capture = with_capture(model)
    capture.request()
    x = {"ids": np.arange(8, dtype="int32") % 5, "mask": np.arange(16).reshape(8, 2) % 3 == 0}
    y = [np.ones((8, 1)), np.zeros((8, 2))]
    model.fit(x, y, sample_weight=np.ones(8), batch_size=8, shuffle=False, verbose=0)
    captured, targets, _ = capture.read().data
    assert {name: tensor.dtype.name for name, tensor in captured.items()} == {
        "ids": "int32",
        "mask": "bool",
    }
    for name, array in x.items():
        np.testing.assert_array_equal(captured[name], array)
    assert [tuple(target.shape) for target in targets] == [(8, 1), (8, 2)]


class Graph(keras.Model):
    """Counts edges by node, in thousands: float16 has every integer up to 2048 only."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, dtype="float32")

    def call(self, inputs):
        edges = tf.math.unsorted_segment_sum(inputs["edges"], inputs["node"], 4) / 1000.0
        outputs = self.dense(edges)
        return tf.gather(outputs, tf.range(4))


def with_unknown_rows(batch, count):
    spec = tf.nest.map_structure(
        lambda array: tf.TensorSpec((None, *array.shape[1:]), array.dtype), batch
    )
    data = tf.data.Dataset.from_generator(lambda: iter([batch] * count), output_signature=spec)
    return data.apply(tf.data.experimental.assert_cardinality(count))


def test_rows_of_which_some_are_known_are_captured_as_a_ragged_batch():
    """A graph has labels of a known number, and nodes and edges of an unknown one."""
    model = Graph()
    model.compile("sgd", "mse", jit_compile=False)
    model, capture = with_capture(model)

    def batches():
        for rows in (9, 7):
            edges = np.ones((rows, 1), "float32"), np.zeros(rows, "int32")
            yield dict(zip(("edges", "node"), edges, strict=True)), np.ones((4, 1), "float32")

    edges = {"edges": tf.TensorSpec((None, 1)), "node": tf.TensorSpec((None,), tf.int32)}
    signature = edges, tf.TensorSpec((4, 1))
    data = tf.data.Dataset.from_generator(batches, output_signature=signature)
    capture.request()
    model.fit(data, steps_per_epoch=2, shuffle=False, verbose=0)
    assert [len(tensor) for tensor in keras.tree.flatten(capture.read().data)] == [9, 9, 4]


def test_ragged_batch_is_replayed_as_a_whole():
    sizes = np.array([6000, 4000, 3000, 200])
    node = np.repeat(np.arange(4), sizes).astype("int32")
    batch = {"edges": np.ones((len(node), 1), "float32"), "node": node}, np.ones((4, 1), "float32")
    model = Graph()
    model.compile("sgd", "mse", jit_compile=False)
    callbacks = kmp.callbacks.defaults(repair=False)
    model.fit(with_unknown_rows(batch, 2), shuffle=False, verbose=0, callbacks=callbacks)
    replay = callbacks[0].run.replays[-1][1]
    assert replay.examples == len(node)
    assert replay.output_error > 0.25


@pytest.mark.parametrize(
    ("most_bytes", "mode", "are_rows_known", "rows"),
    [
        (100, "eager", True, [9, 9, 4]),
        (50, "eager", True, None),  # it is too large
        (100, "xla", True, None),
        (100, "xla", False, None),
    ],
)
def test_ragged_batch_is_captured_unless_it_is_too_large_or_of_xla(
    most_bytes, mode, are_rows_known, rows, monkeypatch
):
    monkeypatch.setattr(batch_variables, "_MOST_BYTES", most_bytes)
    batch = (
        {"edges": np.ones((9, 1), "float32"), "node": np.zeros(9, "int32")},
        np.ones((4, 1), "float32"),
    )
    data = tf.data.Dataset.from_tensors(batch) if are_rows_known else with_unknown_rows(batch, 1)
    model = Graph()
    model.compile("sgd", "mse", **MODES[mode])
    model, capture = with_capture(model)
    capture.request()
    model.fit(data, shuffle=False, verbose=0)
    captured = capture.read()
    assert model.optimizer.snapshot().step == 1
    assert (captured and [len(tensor) for tensor in keras.tree.flatten(captured.data)]) == rows
