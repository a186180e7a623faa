"""Under a strategy, XLA compiles the forward and backward pass of each replica, if it can."""

import contextlib
import functools
import logging
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import OverflowsBackward, fit_data, small_data
from keras import ops
from models import Gan
from tensorflow.python.eager import context

import kmp
from kmp.backend import xla
from kmp.backend.jit_support import request


class AddsLoss(keras.layers.Layer):
    """Adds a loss, and keeps the sum of all that it got in a variable."""

    def build(self, shape):
        self.total = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        mean = ops.mean(ops.abs(ops.cast(x, "float32")))
        self.total.assign_add(mean)
        self.add_loss(0.1 * mean)
        return x


def make_model(
    strategy, *layers, model_class=keras.Sequential, inner="sgd", metrics=(), **arguments
):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        every = [keras.layers.Dense(8), *(make() for make in layers), keras.layers.Dense(2)]
        model = model_class([keras.Input((4,)), *every, kmp.layers.Softmax()])
        optimizer = inner() if callable(inner) else inner
        model.compile(
            optimizer, "sparse_categorical_crossentropy", metrics=list(metrics), **arguments
        )
    return model


@contextlib.contextmanager
def traced_types():
    """Yields two sets, which get the types of the operations that are traced in the context.

    The first one gets those of functions that XLA compiles, the second one those of the others.
    """
    inside, outside = set(), set()
    before = set(context.context().list_function_names())
    yield inside, outside
    for name in set(context.context().list_function_names()) - before:
        function = context.context().get_function_def(name)
        types = {node.op for node in function.node_def}
        (inside if function.attr["_XlaMustCompile"].b else outside).update(types)


def trained(model, data, is_compiled):
    """Trains a model; checks that XLA compiles its passes, or does not; returns the history."""
    with traced_types() as (inside, outside):
        history = fit_data(model, data)
    assert ("MatMul" in inside, "MatMul" in outside) == (is_compiled, not is_compiled)
    return history


def assert_close(compiled, plain):
    """Checks that the history and weights of a training, compiled and as a graph, are close."""
    (history, weights), (compiled_history, compiled_weights) = plain, compiled
    assert history.keys() == compiled_history.keys()
    for key, values in history.items():
        np.testing.assert_allclose(compiled_history[key], values, rtol=2e-3)
    for one, other in zip(weights, compiled_weights, strict=True):
        np.testing.assert_allclose(other, one, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize(
    ("policy", "strategy"),
    [
        ("mixed_float16", "two_replicas"),
        ("float32", "one_replica"),
        # which scales no loss either
        pytest.param("mixed_bfloat16", "two_replicas", marks=pytest.mark.exhaustive),
    ],
)
def test_compiled_passes_train_as_those_of_a_graph(request, policy, strategy):
    strategy = request.getfixturevalue(strategy)
    x, y = small_data(4)
    if policy == "mixed_float16":
        x, y = x[:-3], y[:-3]  # one replica gets 4 rows of the last batch, the other one 1
    results = []
    with kmp.enable(policy):
        for jit_compile in (True, False):
            layers = keras.layers.BatchNormalization, AddsLoss
            model = make_model(strategy, *layers, metrics=["accuracy"], jit_compile=jit_compile)
            results.append((trained(model, (x, y), jit_compile), model.get_weights()))
    assert_close(*results)


def test_compiled_dropout_draws_other_numbers_in_each_step(two_replicas):
    dropout = functools.partial(keras.layers.Dropout, 0.5)
    with kmp.enable("float32"):
        inner = functools.partial(keras.optimizers.SGD, 0.0)
        model = make_model(two_replicas, dropout, inner=inner, jit_compile=True)
        losses = trained(model, small_data(1), is_compiled=True)["loss"]
        losses += fit_data(model, small_data(1))["loss"]
    assert losses[0] != losses[1]


def test_auto_compiles_the_passes_on_a_gpu_and_false_does_not():
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")

    def compiles(on_gpu, **arguments):
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", **arguments)
        model.optimizer.build(model.trainable_variables)
        step = tf.function(lambda x, y: strategy.run(model.train_step, args=((x, y),)))
        traced = xla.traced_for_gpu() if on_gpu else contextlib.nullcontext()
        with traced, traced_types() as (inside, outside):
            function = step.get_concrete_function(tf.ones((8, 4)), tf.ones((8, 1)))
        del function  # which keeps what is traced
        assert ("MatMul" in inside) != ("MatMul" in outside)
        return "MatMul" in inside

    with kmp.enable():
        assert compiles(True, jit_compile="auto")
        assert not compiles(True, jit_compile=False)
        assert not compiles(False)


class UnsupportedLayer(keras.layers.Layer):
    def call(self, x):
        zeros = tf.numpy_function(np.zeros_like, [x], x.dtype)
        return x + tf.stop_gradient(tf.reshape(zeros, tf.shape(x)))


class ChangesShape(keras.layers.Layer):
    """Has a loop whose value grows, which XLA finds out only when it compiles."""

    def call(self, x):
        count, rows = tf.constant(0), x
        shapes = [count.shape, tf.TensorShape([None, *x.shape[1:]])]
        _, rows = tf.while_loop(
            lambda count, rows: count < 1,
            lambda count, rows: (count + 1, tf.concat([rows, rows], 0)),
            [count, rows],
            shape_invariants=shapes,
        )
        return tf.reshape(tf.reduce_mean(tf.reshape(rows, [2, -1, x.shape[1]]), 0), tf.shape(x))


SynchronizedBatchNormalization = functools.partial(
    keras.layers.BatchNormalization, synchronized=True
)


@pytest.mark.parametrize(
    ("layer", "strategy", "reason"),
    [
        (UnsupportedLayer, "one_replica", r"layer 'unsupported_layer.*PyFunc"),
        (SynchronizedBatchNormalization, "two_replicas", "layer 'batch_normalization.*merge_c"),
        (ChangesShape, "one_replica", "layer 'changes_shape.*XLA"),
    ],
    ids=["operation", "synchronization", "shape"],
)
def test_step_that_xla_cannot_compile_runs_as_a_graph_and_one_line_says_why(
    request, caplog, layer, strategy, reason
):
    strategy = request.getfixturevalue(strategy)
    keras.backend.clear_session()
    histories = []
    with kmp.enable(), caplog.at_level(logging.WARNING, "kmp"):
        for jit_compile in (False, True):
            model = make_model(strategy, layer, jit_compile=jit_compile)
            histories.append(fit_data(model, small_data(4)))
    messages = [each for each in caplog.messages if "XLA does not compile" in each]
    assert len(messages) == 1
    assert re.search(reason, messages[0])
    assert histories[0] == histories[1]


class LogsRate(keras.Sequential):
    def train_step(self, data):
        return {**super().train_step(data), "rate": self.optimizer.learning_rate}


def test_learning_rate_in_the_logs_and_compile_outside_of_the_scope_keep_xla(two_replicas):
    with kmp.enable():
        model = make_model(two_replicas, model_class=LogsRate, jit_compile=True)
        loss = "sparse_categorical_crossentropy"
        model.compile("sgd", loss, metrics=["accuracy"], jit_compile=True)
        history = trained(model, small_data(2), is_compiled=True)
    assert history["rate"] == pytest.approx([0.01])


class AveragesWeights(keras.Sequential):
    """Averages weights after the update, and logs what it has made of them and of the scale."""

    def build(self, shape=None):
        super().build(shape)
        self.average = self.add_weight(shape=(4, 8), initializer="zeros", trainable=False)

    def train_step(self, data):
        logs = super().train_step(data)
        kernel, optimizer = self.layers[0].kernel, self.optimizer
        self.average.assign(0.5 * self.average + 0.5 * kernel)
        norm = tf.norm(kernel)
        return {**logs, "steps": optimizer.iterations, "scale": optimizer.loss_scale, "norm": norm}


class StepsTwice(keras.Sequential):
    """Takes two steps on a batch, the second with what the first one has made of the weights."""

    def train_step(self, data):
        first = super().train_step(data)
        second = super().train_step(data)
        return {"loss": second["loss"], "first": first["loss"]}


@pytest.mark.parametrize("model_class", [AveragesWeights, StepsTwice])
def test_what_follows_an_update_is_compiled_apart_and_sees_its_result(
    two_replicas, caplog, model_class
):
    x, y = small_data(6)
    x[12] = 1e5  # the second step is skipped
    results = []
    with kmp.enable(), caplog.at_level(logging.WARNING, "kmp"):
        for jit_compile in (True, False):
            layers = keras.layers.BatchNormalization, OverflowsBackward
            model = make_model(
                two_replicas, *layers, model_class=model_class, jit_compile=jit_compile
            )
            results.append((trained(model, (x, y), jit_compile), model.get_weights()))
    assert not any("XLA does not compile" in each for each in caplog.messages)
    assert_close(*results)


def test_networks_of_a_gan_are_compiled_and_each_sees_the_update_of_the_other(one_replica, caplog):
    data = [np.random.default_rng(0).normal(size=(32, 6)).astype("float32") for _ in range(2)]
    results = []
    with kmp.enable(), caplog.at_level(logging.WARNING, "kmp"):
        for jit_compile in (True, False):
            keras.utils.set_random_seed(0)
            with one_replica.scope():
                model = Gan()
                model.build((None, 6))
                optimizers = {
                    name: kmp.wrap(keras.optimizers.SGD(0.1), jit_compile=jit_compile)
                    for name in ("discriminator", "generator")
                }
                for name, optimizer in optimizers.items():
                    optimizer.build(getattr(model, name).trainable_variables)
                model.compile(**optimizers)
            request(model, jit_compile)
            history = trained(model, tuple(data), jit_compile)
            results.append((history["loss"], model.get_weights()))
    assert not any("XLA does not compile" in each for each in caplog.messages)
    (compiled_losses, compiled_weights), (losses, weights) = results
    np.testing.assert_allclose(compiled_losses, losses, rtol=5e-3)
    for one, other in zip(weights, compiled_weights, strict=True):
        np.testing.assert_allclose(other, one, rtol=5e-3, atol=5e-3)


class ClipsItself(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        gradients = self.optimizer.unscale(tape.gradient(scaled, self.trainable_weights))
        clipped, norm = tf.clip_by_global_norm(gradients, 0.1)
        self.optimizer.apply(clipped, self.trainable_weights)
        return {"loss": loss, "norm": norm}


@pytest.mark.parametrize(
    ("model_class", "strategy", "options"),
    [
        (ClipsItself, "one_replica", {}),
        (keras.Sequential, "two_replicas", {"global_clipnorm": 0.02}),
        # Keras clips in one method, whichever of these is set.
        *(
            pytest.param(keras.Sequential, "two_replicas", each, marks=pytest.mark.exhaustive)
            for each in ({"clipnorm": 0.02}, {"clipvalue": 0.002})
        ),
    ],
)
def test_clipped_gradients_of_compiled_replicas_are_those_of_keras(
    request, model_class, strategy, options
):
    strategy = request.getfixturevalue(strategy)
    weights = []
    with kmp.enable():
        for jit_compile in (False, True):

            def optimizer(jit_compile=jit_compile):
                inner = keras.optimizers.SGD(0.5, momentum=0.9, **options)
                return kmp.LossScaleOptimizer(inner, jit_compile=jit_compile)

            model = make_model(
                strategy, model_class=model_class, inner=optimizer, jit_compile=jit_compile
            )
            trained(model, small_data(4), jit_compile)
            weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-4)


def test_accumulated_gradients_of_replicas_update_as_one_large_batch(two_replicas):
    """Keras raises an error: it synchronizes replicas in a branch."""
    x, y = small_data(4)
    weights = []
    with kmp.enable("float32"):
        for strategy, steps, rows in (
            (two_replicas, 2, 8),
            (tf.distribute.get_strategy(), None, 16),
        ):
            inner = functools.partial(keras.optimizers.SGD, 0.5, gradient_accumulation_steps=steps)
            model = make_model(strategy, inner=inner, jit_compile=False)
            model.fit(x, y, batch_size=rows, shuffle=False, verbose=0)
            weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_average_of_weights_overwrites_them_on_all_replicas(two_replicas):
    """Keras raises an error here too."""
    weights = []
    with kmp.enable("float32"):
        for strategy in (two_replicas, tf.distribute.get_strategy()):
            options = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
            inner = functools.partial(keras.optimizers.SGD, 0.5, **options)
            model = make_model(strategy, inner=inner, jit_compile=False)
            fit_data(model, small_data(4))
            weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_loop_compiles_its_passes_by_a_decorator_and_guard_restores_what_they_changed(two_replicas):
    with kmp.enable():
        model = make_model(
            two_replicas,
            keras.layers.BatchNormalization,
            functools.partial(keras.layers.SpectralNormalization, keras.layers.Dense(4)),
            OverflowsBackward,
        )
        optimizer = model.optimizer
        with two_replicas.scope():
            optimizer.build(model.trainable_variables)
        loss_function = keras.losses.SparseCategoricalCrossentropy(reduction="sum")

        @tf.function(jit_compile=True)
        def gradients_of(x, y):
            with tf.GradientTape() as tape:
                loss = loss_function(y, model(x, training=True)) / 8
                scaled = optimizer.scale_loss(loss)
            return loss, tape.gradient(scaled, model.trainable_variables)

        def replica_step(x, y):
            with kmp.guard(optimizer, model):
                loss, gradients = gradients_of(x, y)
                optimizer.apply(gradients, model.trainable_variables)
            return loss

        @tf.function
        def step(x, y):
            return two_replicas.reduce(
                "SUM", two_replicas.run(replica_step, args=(x, y)), axis=None
            )

        x, y = small_data(3)
        x[12] = 1e5  # in the second batch
        losses, states = [], []
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
        for batch in two_replicas.experimental_distribute_dataset(data):
            losses.append(float(step(*batch)))
            states.append(model.get_weights())
    assert np.isfinite([losses[0], losses[2]]).all()
    assert (optimizer.snapshot().step, optimizer.snapshot().overflow_count) == (3, 1)
    for before, after in zip(states[0], states[1], strict=True):
        np.testing.assert_array_equal(after, before)


def test_metric_from_outside_the_scope_trains_as_a_graph(two_replicas, caplog):
    """As in TensorFlow: it is on the first device only."""
    with kmp.enable(), caplog.at_level(logging.WARNING, "kmp"):
        model = make_model(two_replicas, jit_compile=True)
        metric = keras.metrics.SparseCategoricalAccuracy(name="outside")
        loss = "sparse_categorical_crossentropy"
        model.compile("sgd", loss, metrics=[metric], jit_compile=True)
        history = fit_data(model, small_data(1))
    assert np.isfinite(history["loss"]).all()
    assert any("variable 'outside/" in message for message in caplog.messages)


def test_unsupported_operation_on_sequences_of_any_length_runs_as_a_graph(one_replica, caplog):
    data = tf.data.Dataset.from_tensor_slices((np.ones((16, 3, 4)), np.zeros(16))).batch(8)
    data = data.map(lambda x, y: (tf.ensure_shape(tf.repeat(x, 2, 1), (None, None, 4)), y))
    any_length = data.map(lambda x, y: (x[:, : tf.random.uniform([], 1, 4, "int32")], y))
    with kmp.enable(), caplog.at_level(logging.WARNING, "kmp"):
        with one_replica.scope():
            pool = keras.layers.GlobalAveragePooling1D()
            model = keras.Sequential([keras.Input((None, 4)), UnsupportedLayer(), pool])
            model.add(keras.layers.Dense(1, dtype="float32"))
            model.compile("sgd", "mse", jit_compile=True)
        losses = model.fit(any_length, shuffle=False, verbose=0).history["loss"]
    assert np.isfinite(losses).all()
    assert any("PyFunc" in message for message in caplog.messages)


def test_what_kept_xla_from_compiling_is_forgotten_once_it_is_gone(one_replica):
    class Fails(keras.Sequential):
        fails = True

        def train_step(self, data):
            if self.fails:
                raise RuntimeError("a mistake")
            return super().train_step(data)

    with kmp.enable():
        model = make_model(one_replica, model_class=Fails, jit_compile=True)
        with pytest.raises(RuntimeError, match="a mistake"):
            fit_data(model, small_data(1))
        model.fails = False
        trained(model, small_data(1), is_compiled=True)
