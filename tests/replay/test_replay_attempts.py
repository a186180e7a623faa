"""What is replayed after a replay that failed, and that none of it ends a training."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MODES, sequential, user_warnings
from keras import layers, ops
from models import Cube

import kmp
from kmp.diagnosis.soundness import is_harmful
from kmp.replay import Passes

pytestmark = pytest.mark.usefixtures("enabled")
NODES = 150


def defaults(**options):
    """Returns the default callbacks without the one that repairs a training."""
    options = {"repair": False, "on_nonfinite": "ignore"} | options
    return kmp.callbacks.defaults(**options)


def errors_of(callbacks):
    return [row.replay_error for row in callbacks[0].run.rows if row.replay_error]


class Neighbors(layers.Layer):
    """Sums over the neighbors of each node, of which there are as many as examples in a batch."""

    def call(self, inputs):
        features, adjacency = inputs
        return ops.matmul(adjacency, features)


def graph_model(*hidden, **options):
    features, adjacency = keras.Input((4,)), keras.Input((NODES,))
    nodes = layers.Dense(4)(features)
    for layer in hidden:
        nodes = layer(nodes)
    outputs = layers.Dense(1, dtype="float32")(Neighbors()([nodes, adjacency]))
    model = keras.Model([features, adjacency], outputs)
    model.compile("sgd", "mse", **options)
    return model


def fit_graph(model, callbacks, scale=1.0, epochs=12):
    random = np.random.default_rng(0)
    x = (scale * random.normal(size=(NODES, 4))).astype("float32")
    adjacency = np.eye(NODES, dtype="float32")
    model.fit(
        [x, adjacency],
        x[:, :1],
        batch_size=NODES,
        shuffle=False,
        epochs=epochs,
        verbose=0,
        callbacks=callbacks,
    )


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_batch_whose_rows_do_not_stand_alone_is_replayed_as_a_whole(mode):
    model = graph_model(**MODES[mode])
    callbacks = defaults(every_n_steps=2)
    fit_graph(model, callbacks, epochs=4)
    replays = [replay for _, replay in callbacks[0].run.replays]
    assert errors_of(callbacks) == []
    assert len(replays) >= 2
    assert {
        (each.examples, (each.comparison is not None), is_harmful(each)) for each in replays
    } == {(NODES, True, False)}


def test_layer_that_overflows_in_a_full_batch_graph_network_is_repaired():
    model = graph_model(Cube(name="cube"), jit_compile=False)
    model.compile(kmp.wrap("adam"), "mse", jit_compile=False)  # SGD would diverge
    callbacks = defaults(repair=True)
    with pytest.warns(UserWarning, match="cube.* to float32, and the training continues"):
        fit_graph(model, callbacks, scale=60.0, epochs=30)
    assert model.get_layer("cube").compute_dtype == "float32"


@pytest.fixture
def failing(monkeypatch):
    """Returns a function that makes passes fail for which a condition of their number holds."""
    run = Passes.in_float32

    def make(error, condition):
        passes = []

        def fails(self, **options):
            passes.append(self)
            if condition(len(passes), self.examples):
                raise error
            return run(self, **options)

        monkeypatch.setattr(Passes, "in_float32", fails)

    return make


def small_fit(model, callbacks, rows=8, epochs=12, batch_size=None):
    x = np.random.default_rng(0).normal(size=(rows, 4)).astype("float32")
    model.fit(
        x, x[:, :1], batch_size=batch_size or rows, epochs=epochs, verbose=0, callbacks=callbacks
    )


def test_another_batch_is_replayed_after_one_that_fails(failing):
    failing(ValueError("no replay"), lambda number, _: number == 1)
    callbacks = defaults(every_n_steps=1)
    small_fit(sequential(layers.Dense(1), jit_compile=False), callbacks)
    assert errors_of(callbacks) == ["ValueError: no replay"]
    assert [step for step, _ in callbacks[0].run.replays] == [2, 6, 12]  # 6 is the middle


def test_fewer_examples_are_replayed_where_the_memory_is_too_small(failing):
    error = tf.errors.ResourceExhaustedError(None, None, "out of memory")
    failing(error, lambda _, examples: examples > 8)
    callbacks = defaults(every_n_steps=1)
    # Batches of 32 and 8 examples: the step is traced for any number.
    small_fit(sequential(layers.Dense(1), jit_compile=False), callbacks, rows=40, batch_size=32)
    assert errors_of(callbacks) == []
    assert {replay.examples for _, replay in callbacks[0].run.replays} == {8}


def test_training_without_a_possible_replay_warns_once_with_the_reason(failing):
    failing(ValueError("no replay"), lambda *_: True)
    model = sequential(layers.Dense(1), jit_compile=False)
    callbacks = defaults(every_n_steps=1)
    reason = "the training continues without replays: ValueError: no replay.$"
    with pytest.warns(UserWarning, match=reason) as warned:
        small_fit(model, callbacks)
    assert len(user_warnings(warned)) == 1
    assert len(errors_of(callbacks)) == 2
    assert model.optimizer.snapshot().step == 12


def test_reason_is_a_sentence_without_control_codes():
    """TensorFlow has no kernel for the pooling on a CPU, where XLA compiles it."""
    pooling = layers.MaxPooling3D(2), layers.Flatten(), layers.Dense(1, dtype="float32")
    model = sequential(*pooling, shape=(2, 2, 2, 1), jit_compile=True)
    callbacks = defaults(every_n_steps=1)
    x = np.ones((8, 2, 2, 2, 1), "float32")
    with pytest.warns(UserWarning, match="TensorFlow has no kernel of MaxPool3D for float16"):
        model.fit(x, np.ones((8, 1)), batch_size=8, epochs=4, verbose=0, callbacks=callbacks)
    assert all(error.isprintable() for error in errors_of(callbacks))


@pytest.mark.parametrize("mode", ["graph", pytest.param("xla", marks=pytest.mark.exhaustive)])
def test_batch_that_cannot_be_captured_does_not_change_the_training(mode, monkeypatch):
    def fit(callbacks):
        keras.utils.set_random_seed(0)
        model = sequential(layers.Dense(1), **MODES[mode])
        small_fit(model, callbacks, epochs=4)
        return model.get_weights()

    def fails(**_):
        raise TypeError("no kernel")

    expected = fit([])
    monkeypatch.setattr(tf.raw_ops, "OptionalFromValue", fails)
    reason = r"a batch cannot be captured \(TypeError: no kernel\)"
    with pytest.warns(UserWarning, match=reason) as warned:
        weights = fit(defaults(every_n_steps=1))
    assert len(user_warnings(warned)) == 1
    np.testing.assert_equal(weights, expected)


def test_error_of_the_training_step_itself_passes_through():
    class Wrong(layers.Layer):
        def call(self, x):
            raise ValueError("of the user")

    model = keras.Sequential([Wrong(), layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="of the user"):
        small_fit(model, defaults(), epochs=1)
