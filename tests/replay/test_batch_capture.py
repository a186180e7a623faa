import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MODES, sequential

import kmp
from kmp.guarding.guarded_step import guard_train_step, guarded_step_of
from kmp.replay import batch_capture, kept_batches

pytestmark = pytest.mark.usefixtures("enabled")


def with_capture(model):
    guard_train_step(model)
    capture = guarded_step_of(model).add_capture(model.optimizer)
    return model, capture


def captured_model(mode, optimizer="sgd"):
    return with_capture(
        sequential(keras.layers.Dense(1), shape=(3,), optimizer=optimizer, **MODES[mode])
    )


def fit(model, x, **options):
    model.fit(x, np.zeros((len(x), 1)), verbose=0, shuffle=False, **{"batch_size": 8} | options)


# Here and below, each mode is in some of the tests.
@pytest.mark.parametrize("mode", ["eager", "steps_per_execution"])
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
    fit(model, x)  # without a callback
    assert guarded_step_of(model).kept.slots == 1
    capture.request()
    fit(model, x[:8])
    np.testing.assert_array_equal(capture.read().data[0], x[:8])


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
    monkeypatch.setattr(batch_capture, "MOST_BYTES", 48)  # an example has 3 floats and a target
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


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_skipped_step_is_found_among_later_ones_with_its_loss_scale(mode):
    model, capture = captured_model(mode)
    x = np.linspace(-1, 1, 288, dtype="float32").reshape(96, 3)
    x[17] = np.nan
    capture.request()
    fit(model, x)
    captured = capture.read()
    assert (captured.step, captured.was_skipped, captured.loss_scale) == (3, True, 2.0**15)
    np.testing.assert_array_equal(captured.whole[0], x[16:24])
    np.testing.assert_array_equal(capture.batch_of(3)[0], x[16:24])
    capture.request()
    fit(model, x[32:])
    assert (capture.read().step, capture.read().was_skipped) == (13, False)


def test_skipped_step_is_found_where_a_train_step_takes_several():
    class Twice(keras.Sequential):
        def train_step(self, data):
            super().train_step(data)
            return super().train_step(data)

    model = Twice([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    model, capture = with_capture(model)
    x = np.linspace(-1, 1, 120, dtype="float32").reshape(40, 3)
    x[9] = np.nan
    capture.request()
    fit(model, x)
    captured = capture.read()
    assert (captured.step, captured.was_skipped) == (4, True)
    np.testing.assert_array_equal(captured.whole[0], x[8:16])


def test_memory_bounds_how_many_batches_are_kept(monkeypatch):
    monkeypatch.setattr(kept_batches, "_MOST_BYTES", 3 * 8 * 16)  # an example has 16 bytes
    model, capture = captured_model("graph")
    x = np.linspace(-1, 1, 240, dtype="float32").reshape(80, 3)
    x[9] = np.nan
    capture.request()
    fit(model, x)
    assert capture.most_steps == 3
    assert not capture.read().was_skipped  # the batch of step 2 of 10 has been replaced
    x[9], x[65] = 0, np.nan
    fit(model, x)
    assert capture.read().step == 19


def test_batches_of_another_structure_are_kept_and_none_is_consumed_twice():
    model, capture = captured_model("graph")
    taken = []

    def batches(*parts):
        for _ in range(3):
            taken.append(len(parts))
            yield parts

    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    for parts in [(x, y), (x, y, np.ones(8, "float32"))]:
        capture.request()
        spec = tuple(tf.TensorSpec((None, *each.shape[1:])) for each in parts)
        data = tf.data.Dataset.from_generator(
            functools.partial(batches, *parts), output_signature=spec
        )
        data = data.apply(tf.data.experimental.assert_cardinality(3))
        model.fit(data, shuffle=False, verbose=0)
        assert len(capture.read().data) == len(parts)
    assert taken == [2, 2, 2, 3, 3, 3]


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("mode", ["graph", "steps_per_execution"])
def test_skipped_step_is_found_where_the_iterator_has_ended_before(mode):
    model, capture = captured_model(mode)
    x = np.linspace(-1, 1, 60, dtype="float32").reshape(20, 3)
    x[9] = np.nan
    data = tf.data.Dataset.from_tensor_slices((x, np.zeros((20, 1)))).batch(8)
    data = data.filter(lambda *_: True)  # of unknown length
    capture.request()
    model.fit(data, epochs=3, shuffle=False, verbose=0)
    captured = capture.read()
    assert (captured.step, captured.was_skipped) == (8, True)
    np.testing.assert_array_equal(captured.whole[0], x[8:16])


def test_batches_of_train_on_batch_are_kept():
    model, capture = captured_model("graph")
    capture.request()
    x = np.linspace(-1, 1, 24, dtype="float32").reshape(8, 3)
    model.train_on_batch(x, np.zeros((8, 1)))
    np.testing.assert_array_equal(capture.read().data[0], x)


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_kept_batches_change_no_bit_of_a_training(mode):
    x = np.random.default_rng(0).normal(size=(56, 3)).astype("float32")
    x[20] = np.inf

    def weights(is_captured):
        keras.utils.set_random_seed(0)
        model = sequential(keras.layers.Dense(1), shape=(3,), optimizer="sgd", **MODES[mode])
        if is_captured:
            with_capture(model)
        fit(model, x, epochs=2)
        return model.get_weights()

    np.testing.assert_equal(weights(True), weights(False))


def loop_of(model, **options):
    """Returns the step of a training loop."""
    optimizer = model.optimizer
    loss = keras.losses.MeanSquaredError()

    @functools.partial(tf.function, **options)
    def step(x, y):
        with kmp.guard(optimizer, model):
            with tf.GradientTape() as tape:
                scaled = optimizer.scale_loss(loss(y, model(x, training=True)))
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(scaled, variables), variables)

    return step


def test_skipped_step_of_a_loop_is_kept_through_later_ones_without_a_branch():
    model, capture = captured_model("graph")
    model.optimizer.build(model.trainable_variables)
    step = loop_of(model, jit_compile=True)
    x = np.linspace(-1, 1, 120, dtype="float32").reshape(40, 3)
    x[17] = np.nan
    for start in (0, 8, 16, 24, 32):
        step(x[start : start + 8], np.zeros((8, 1), "float32"))
    captured = capture.read()
    assert (captured.step, captured.was_skipped, captured.batch_size) == (3, True, 8)
    np.testing.assert_array_equal(captured.whole[0], x[16:24])
    capture.request()
    step(x[32:37], np.zeros((5, 1), "float32"))  # of another size
    np.testing.assert_array_equal(capture.read().data[0], x[32:37])


def test_last_batch_of_a_loop_with_unknown_rows_is_kept_as_a_whole():
    model = Graph()
    model.compile("sgd", "mse", jit_compile=False)
    model, capture = with_capture(model)
    batch = {"edges": np.ones((9, 1), "float32"), "node": np.zeros(9, "int32")}
    model(batch)
    model.optimizer.build(model.trainable_variables)
    rows = {"edges": tf.TensorSpec((None, 1)), "node": tf.TensorSpec((None,), tf.int32)}
    step = loop_of(model, input_signature=[rows, tf.TensorSpec((4, 1))])
    step({name: tf.constant(values) for name, values in batch.items()}, tf.ones((4, 1)))
    captured = capture.read()
    assert (captured.step, captured.batch_size) == (1, 9)


def test_batch_of_a_train_step_that_a_loop_calls_is_kept():
    model, capture = captured_model("graph")
    model.optimizer.build(model.trainable_variables)
    step = tf.function(lambda x, y: model.train_step((x, y)), autograph=False)
    x = np.linspace(-1, 1, 24, dtype="float32").reshape(8, 3)
    capture.request()
    step(x, np.zeros((8, 1), "float32"))
    np.testing.assert_array_equal(capture.read().data[0], x)


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
        pytest.param(100, "xla", True, None, marks=pytest.mark.exhaustive),
        (100, "xla", False, None),
    ],
)
def test_ragged_batch_is_captured_unless_it_is_too_large_or_of_xla(
    most_bytes, mode, are_rows_known, rows, monkeypatch
):
    monkeypatch.setattr(batch_capture, "MOST_BYTES", most_bytes)
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
