"""A model with several optimizers under `fit`: each is wrapped, watched and compared."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import HAS_GPU
from keras import layers

import kmp
from kmp.callbacks import LossScaleLogger, Monitor

DATA = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")


class Gan(keras.Model):
    """A small GAN, with optimizers as Keras' examples have them."""

    def __init__(self, forgets=(), hidden=()):
        super().__init__()
        self.generator = keras.Sequential(
            [keras.Input((3,)), layers.Dense(8, "relu"), *hidden, layers.Dense(4, dtype="float32")]
        )
        self.critic = keras.Sequential(
            [keras.Input((4,)), layers.Dense(8, "relu"), layers.Dense(1, dtype="float32")]
        )
        self.forgets, self.g_factor = forgets, 1.0

    def compile(self, d_optimizer, g_optimizer, **arguments):
        super().compile(**arguments)
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def update(self, name, weights, loss_of):
        optimizer = getattr(self, name)
        with tf.GradientTape() as tape:
            loss = loss_of()
            scaled = loss if name in self.forgets else optimizer.scale_loss(loss)
        optimizer.apply_gradients(zip(tape.gradient(scaled, weights), weights, strict=True))
        return loss

    def train_step(self, real):
        noise = tf.random.normal((tf.shape(real)[0], 3))

        def critic_loss():
            fake = self.generator(noise, training=True)
            return tf.reduce_mean(tf.nn.softplus(self.critic(fake) - self.critic(real)))

        def generator_loss():
            scores = self.critic(self.generator(noise))
            return self.g_factor * tf.reduce_mean(tf.nn.softplus(-scores))

        d_loss = self.update("d_optimizer", self.critic.trainable_variables, critic_loss)
        g_loss = self.update("g_optimizer", self.generator.trainable_variables, generator_loss)
        return {"d_loss": d_loss, "g_loss": g_loss}


def compiled_gan(hidden=(), forgets=(), **arguments):
    gan = Gan(forgets, hidden)
    arguments = {"jit_compile": False} | arguments
    gan.compile(keras.optimizers.Adam(1e-3), keras.optimizers.SGD(1e-2), **arguments)
    return gan


def train(gan, callbacks=(), epochs=2):
    return gan.fit(DATA, batch_size=8, epochs=epochs, verbose=0, callbacks=callbacks).history


@pytest.mark.parametrize("forgotten", ["d_optimizer", "g_optimizer"])
def test_error_names_the_optimizer_whose_loss_was_not_scaled(enabled, forgotten):
    with pytest.raises(
        ValueError, match=rf"`self\.{forgotten}` got gradients .*did not go through"
    ):
        train(compiled_gan(forgets=[forgotten]))


@pytest.mark.parametrize("arguments", [{}, {"jit_compile": True}, {"steps_per_execution": 4}])
def test_each_optimizer_is_watched_and_compared(enabled, arguments, tmp_path):
    gan = compiled_gan(**arguments)
    monitor = Monitor(tmp_path, every_n_steps=4)
    history = train(gan, [monitor])
    assert list(monitor.runs) == ["d_optimizer", "g_optimizer"]
    assert monitor.run is monitor.runs["d_optimizer"]
    for name, run in monitor.runs.items():
        assert run.last("step") == 16
        assert f"loss_scale/{name}" in history
        assert history[f"overflow_count/{name}"][-1] == run.last("overflow_count")
        assert np.isfinite(history[f"grad_norm/{name}"][-1])
        replays = [replay for _, replay in run.replays]
        assert replays, run.last("replay_error")
        assert all(replay.is_finite and replay.comparison for replay in replays)
        assert "none was captured" not in str(kmp.advise(run))
        assert kmp.load_run(tmp_path / name).last("step") == 16
    paths = {name: set(run.samples[0].names) for name, run in monitor.runs.items()}
    weights = gan.critic.trainable_variables
    assert len(paths["d_optimizer"]) == len(weights)
    assert paths["d_optimizer"].isdisjoint(paths["g_optimizer"])


def test_usable_loss_scale_of_one_optimizer_does_not_depend_on_the_loss_of_another(enabled):
    scales = []
    for factor in (1.0, 1e4):
        keras.utils.set_random_seed(1)
        gan, monitor = compiled_gan(), Monitor(every_n_steps=8)
        gan.g_factor = factor
        train(gan, [monitor], epochs=1)
        first = {name: run.replays[0][1] for name, run in monitor.runs.items()}
        scales.append({name: each.gradients.usable_scale for name, each in first.items()})
    assert scales[0]["d_optimizer"] == scales[1]["d_optimizer"]
    assert scales[0]["g_optimizer"] > 1000 * scales[1]["g_optimizer"]


def test_an_overflow_of_one_optimizer_is_counted_for_it_alone():
    with kmp.enable():
        gan = compiled_gan(run_eagerly=True)
    gan.g_optimizer.build(gan.generator.trainable_variables)
    gan.g_optimizer.dynamic_scale.assign(2.0**60)
    monitor = Monitor(replay=False)
    train(gan, [monitor], epochs=1)
    counts = {name: run.last("overflow_count") for name, run in monitor.runs.items()}
    assert counts["g_optimizer"] == 8
    assert counts["d_optimizer"] < 3


def test_layer_that_overflows_is_repaired(enabled):
    class Squared(layers.Layer):
        def call(self, x):
            return tf.square(x * 1000) * 1e-6

    gan = compiled_gan([Squared(name="squared")])
    with pytest.warns(UserWarning, match="set the layer '.*squared' to float32"):
        train(gan, [Monitor(every_n_steps=4)], epochs=4)
    assert gan.generator.get_layer("squared").compute_dtype == "float32"


def test_optimizer_that_compile_made_is_not_watched_if_the_step_has_others(enabled):
    gan = compiled_gan()
    logger = LossScaleLogger()
    history = train(gan, [logger])
    assert "loss_scale" not in history
    assert list(logger.runs) == ["d_optimizer", "g_optimizer"]
    assert not gan.optimizer.built


def test_one_optimizer_in_an_attribute_has_the_usual_keys(enabled):
    class Actor(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1, dtype="mixed_float16")
            self.opt = keras.optimizers.Adam(1e-3)

        def compile(self, **arguments):
            super().compile(optimizer=None, **arguments)

        def train_step(self, x):
            with tf.GradientTape() as tape:
                loss = self.opt.scale_loss(tf.reduce_mean(tf.cast(self.dense(x), "float32") ** 2))
            weights = self.trainable_variables
            self.opt.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"loss": loss}

    actor = Actor()
    actor.compile(jit_compile=False)
    monitor = Monitor()
    history = train(actor, [monitor])
    assert isinstance(actor.opt, kmp.LossScaleOptimizer)
    assert actor.opt.rule.scales_loss
    assert {"loss_scale", "overflow_count", "grad_norm"} <= history.keys()
    assert monitor.run.last("step") == 16


def test_optimizer_that_a_model_sets_itself_is_wrapped(enabled):
    class Own(keras.Sequential):
        def compile(self, optimizer, loss):
            super().compile(loss=loss, jit_compile=False)
            self.optimizer = optimizer

    adam = keras.optimizers.Adam()
    model = Own([keras.Input((4,)), layers.Dense(1)])
    model.compile(adam, "mse")
    assert model.optimizer.inner_optimizer is adam
    model.fit(DATA, DATA[:, :1], verbose=0, callbacks=[Monitor()])
    assert int(adam.iterations) > 0


def test_structures_of_optimizers_are_wrapped(enabled):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.own = {"a": keras.optimizers.SGD(), "b": [keras.optimizers.Adam()], "rate": 0.1}
    assert isinstance(model.own["a"], kmp.LossScaleOptimizer)
    assert isinstance(model.own["b"][0], kmp.LossScaleOptimizer)
    assert model.own["rate"] == 0.1


@pytest.mark.parametrize("is_first", [True, False])
def test_optimizer_in_an_attribute_and_in_compile_has_one_wrapper(enabled, is_first):
    model, sgd = keras.Sequential([keras.Input((4,)), layers.Dense(1)]), keras.optimizers.SGD()
    if is_first:
        model.own = sgd
    model.compile(sgd, "mse")
    model.own = sgd
    assert model.own is model.optimizer


def test_optimizers_of_a_float32_run_have_a_scale_of_1():
    with kmp.enable("float32"):
        gan = compiled_gan()
    assert not gan.d_optimizer.rule.scales_loss
    kmp.disable()
    gan.optimizer = plain = keras.optimizers.SGD()
    assert gan.optimizer is plain


@pytest.mark.skipif(HAS_GPU, reason="compares bits of a CPU")
def test_watching_changes_no_bit_of_the_training(enabled):
    weights = []
    for callbacks in ([], [Monitor(every_n_steps=4)]):
        keras.utils.set_random_seed(3)
        gan = compiled_gan()
        train(gan, callbacks)
        weights.append(gan.get_weights())
    for plain, watched in zip(*weights, strict=True):
        np.testing.assert_array_equal(plain, watched)


def test_average_of_the_weights_is_not_named_as_untrained(enabled):
    class Averaged(keras.Model):
        def __init__(self):
            super().__init__()
            hidden, last = layers.Dense(8), layers.Dense(1, dtype="float32")
            self.net = keras.Sequential([keras.Input((4,)), hidden, last])
            self.average = keras.models.clone_model(self.net)

        def train_step(self, x):
            weights = self.net.trainable_weights
            with tf.GradientTape() as tape:
                loss = self.optimizer.scale_loss(tf.reduce_mean(self.net(x) ** 2))
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            for average, weight in zip(self.average.weights, self.net.weights, strict=True):
                average.assign(0.9 * average + 0.1 * weight)
            return {"loss": loss}

    model = Averaged()
    model.compile("sgd", jit_compile=False)
    (monitor,) = callbacks = kmp.callbacks.defaults(replay=False)
    train(model, callbacks)
    assert monitor.run.settings.untrained_variables == []
