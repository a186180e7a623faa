"""A replay believes the program that trains: XLA simplifies and fuses what rounds."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import HAS_GPU, MODES
from keras import layers, ops

import kmp
from kmp.callbacks.batch_replayer import CRITERIA
from kmp.diagnosis.soundness import is_harmful
from kmp.guarding.guarded_step import guarded_step_of
from kmp.replay import Passes, StepContext, replay_batch

pytestmark = pytest.mark.usefixtures("enabled")
X = np.random.default_rng(0).uniform(0, 1, size=(32, 6)).astype("float32")
Y = X[:, :1]


class Head(layers.Layer):
    def __init__(self, function):
        super().__init__(name="head")
        self.function = function

    def call(self, inputs):
        return self.function(inputs)


def offset(x):
    return (x + 4096.0) - 4096.0


class InFunction(keras.Sequential):
    """Computes its loss and gradients in a function."""

    @tf.function
    def train_step(self, data):
        variables = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(data[0], training=True) - data[1]) ** 2)
            scaled = self.optimizer.scale_loss(loss)
        self.optimizer.apply(tape.gradient(scaled, variables), variables)
        return {"loss": loss}


def trained(function, mode, model_class=keras.Sequential):
    hidden = [keras.Input((6,)), Head(function), layers.Dense(1, dtype="float32")]
    model = model_class(hidden, name="net")
    optimizer = kmp.LossScaleOptimizer("sgd", initial_scale=2.0**10)
    model.compile(optimizer, "mse", **MODES[mode])
    model.fit(X, Y, batch_size=32, verbose=0)
    return model


def replayed(model, examples=32, loss_scale=2.0**10, **context):
    kind = "keras" if type(model) is keras.Sequential else "user"
    variables = {each.path: each for each in model.trainable_variables}
    graph = guarded_step_of(model).graphs[None][0]
    passes = Passes(model, (X[:examples], Y[:examples]), graph, variables, kind=kind)
    return replay_batch(passes, StepContext(1, loss_scale, batch_size=32, **context), CRITERIA)[0]


@pytest.mark.parametrize(("mode", "is_lost"), [("graph", True), ("xla", False)])
def test_harm_counts_if_the_program_that_trains_has_it(mode, is_lost):
    found = replayed(trained(offset, mode))
    assert is_harmful(found) == is_lost
    assert found.float32_layers == (["net/head"] if is_lost else [])
    assert (found.comparison.output_error < 0.01) == (not is_lost)
    assert found.comparison.states == []


@pytest.mark.skipif(HAS_GPU, reason="XLA computes this sigmoid in another way on a GPU.")
def test_failure_that_only_the_program_that_trains_has_is_found():
    def function(x):
        return -ops.log(ops.sigmoid(-14.0 * x)) / 14.0

    assert replayed(trained(function, "graph"), failed="loss").is_finite
    found = replayed(trained(function, "xla"), failed="loss")
    assert not found.is_finite
    assert found.is_finite_in_float32
    assert found.float32_layers == ["net/head"]
    assert found.overflow.outputs[0] == "net/head"


def test_pass_that_is_infinite_operation_by_operation_only_is_that_of_the_training():
    model = trained(lambda x: ops.log(ops.exp(14.0 * x)) / 14.0, "xla")
    for failed in (None, "gradients"):
        found = replayed(model, failed=failed)
        assert found.is_finite
        assert found.search is None
        assert not is_harmful(found)


def test_overflow_of_gradients_asks_for_a_lower_scale_where_xla_computes_finite_outputs():
    class Quotient(layers.Dense):
        def call(self, inputs):
            return super().call(inputs) * 60000.0 / 50000.0

    head = Quotient(6, kernel_initializer=keras.initializers.Identity(4.0))
    found = replayed(trained(head, "xla"), loss_scale=2.0**24)
    assert not found.is_finite
    assert found.search.is_found
    assert found.search.layers == []
    assert found.operations == []


def test_step_in_a_function_is_replayed():
    found = replayed(trained(offset, "graph", InFunction))
    assert is_harmful(found)
    assert found.float32_layers == ["net/head"]


class TwoOptimizers(keras.Sequential):
    """Two optimizers train the same variables, for losses of opposite signs."""

    def compile(self, first, second, **options):
        super().compile(first, **options)
        self.second = second

    def train_step(self, data):
        variables = self.trainable_variables
        for sign, optimizer in ((1.0, self.optimizer), (-3.0, self.second)):
            with tf.GradientTape() as tape:
                loss = sign * tf.reduce_mean(self(data[0], training=True))
                scaled = optimizer.scale_loss(loss)
            optimizer.apply(tape.gradient(scaled, variables), variables)
        return {"loss": loss}


def test_gradients_are_those_of_the_watched_optimizer():
    hidden = [keras.Input((6,)), layers.Dense(4), layers.Dense(1, dtype="float32")]
    model = TwoOptimizers(hidden)
    optimizers = [kmp.LossScaleOptimizer("sgd", initial_scale=2.0**10) for _ in range(2)]
    model.compile(*optimizers, **MODES["graph"])
    model.fit(X, Y, batch_size=32, verbose=0)
    variables = {each.path: each for each in model.trainable_variables}
    graph = guarded_step_of(model).graphs[None][0]
    bias = model.layers[-1].bias
    for optimizer, sign in zip(optimizers, (1.0, -3.0), strict=True):
        passes = Passes(model, (X, Y), graph, variables, watched=optimizer, kind="user")
        found = passes.in_float32()
        np.testing.assert_allclose(found.gradients[bias.path], [sign], rtol=1e-5)


def test_failure_of_the_whole_batch_is_explained_by_its_operations():
    class Penalty(layers.Layer):
        def call(self, inputs):
            self.add_loss(1e-9 * ops.sum(inputs * 800.0))
            return inputs

    found = replayed(trained(Penalty(), "graph"), examples=8, failed="loss")
    assert not found.is_finite
    assert [each.operation for each in found.operations][:1] == ["Sum"]
