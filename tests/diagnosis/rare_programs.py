"""Programs for the causes that no program of `benchmarks/float16_faults` has.

The benchmark has none of them, because no change of a line that kmp proposes cures them, or because
they show only in a training that kmp cannot replay. Each is a function of a random generator and of
callbacks, as there; `RARE` has the cause of each.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import kmp
from kmp.diagnosis.causes.changed_gradients import ChangedGradients
from kmp.diagnosis.causes.growing_activations import GrowingActivations
from kmp.diagnosis.causes.loss_in_float16 import LossInFloat16
from kmp.diagnosis.causes.nonfinite_gradients import NonfiniteGradients
from kmp.diagnosis.causes.nonfinite_weights import NonfiniteWeights
from kmp.diagnosis.causes.rounded_before import RoundedBefore
from kmp.diagnosis.causes.rule_overflows import RuleOverflows
from kmp.diagnosis.causes.unexplained_loss import UnexplainedLoss


def fit(model, rng, callbacks, optimizer="adam", size=1.0):
    """Trains for four epochs of ten batches; the score is of no interest."""
    x = rng.normal(size=(160, 8)).astype("float32")
    y = size * (x.sum(1, keepdims=True) + 1.0)
    model.compile(optimizer, "mse")
    model.fit(x, y, batch_size=16, epochs=4, verbose=0, callbacks=callbacks)
    return 0.0


def sequential(*middle, model_class=keras.Sequential):
    hidden = layers.Dense(16, activation="relu", name="hidden")
    head = layers.Dense(1, name="head")
    return model_class([keras.Input((8,)), hidden, *middle, head])


@tf.custom_gradient
def clipped(x):
    return tf.identity(x), lambda gradient: tf.clip_by_norm(gradient, 0.1)


class ClipsGradients(layers.Layer):
    def call(self, x):
        return clipped(x)


def rare_clipping_layer(rng, callbacks):
    """A layer clips the gradients that pass through it, which the loss scale has multiplied."""
    kmp.enable()
    return fit(sequential(ClipsGradients(name="clips")), rng, callbacks)


def rare_large_initializer(rng, callbacks):
    """Each of 26 layers multiplies by 4, so that the outputs are 1e15 in float32 too."""
    kmp.enable()
    large = keras.initializers.Constant(4.0)
    chain = [layers.Dense(1, kernel_initializer=large, name=f"d{each}") for each in range(26)]
    model = keras.Sequential([keras.Input((8,)), *chain])
    return fit(model, rng, callbacks, keras.optimizers.SGD(0.0))


class LossOfItsOwn(keras.Sequential):
    """Squares errors in the dtype of the outputs, with weights from NumPy, which bars replays."""

    def train_step(self, data):
        x, y = data
        weights = tf.numpy_function(np.ones_like, [y], tf.float32)
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            errors = tf.square(outputs - tf.cast(y, outputs.dtype))
            loss = tf.reduce_mean(errors * tf.cast(tf.reshape(weights, tf.shape(y)), errors.dtype))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


def rare_squares_beside_numpy(rng, callbacks):
    """Squares of errors near 1000 exceed 65504, in a training step that calls NumPy."""
    kmp.enable()
    return fit(sequential(model_class=LossOfItsOwn), rng, callbacks, size=1000.0)


class Length(layers.Layer):
    def call(self, x):
        return ops.sqrt(ops.relu(x))


def rare_root_of_zero(rng, callbacks):
    """The slope of a root at 0 is infinite in every format."""
    kmp.enable()
    return fit(sequential(Length(name="length")), rng, callbacks)


def rare_infinite_weights(rng, callbacks):
    """Weights have Inf before the first step, as those of a float16 file that were too large."""
    kmp.enable()
    model = sequential()
    model.layers[0].kernel.assign(np.full((8, 16), np.inf, "float32"))
    return fit(model, rng, callbacks)


SMALL = tf.constant(1e-9, tf.float16)


class Normalizes(layers.Layer):
    def call(self, x):
        return x / (ops.abs(x) + SMALL)


def rare_constant_of_the_module(rng, callbacks):
    """An epsilon is 0 because the module makes it in float16, before any layer."""
    kmp.enable()
    return fit(sequential(Normalizes(name="normalizes")), rng, callbacks)


def logarithms(values):
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.log(values).astype("float32")


class LossOfNumpy(keras.Sequential):
    """Adds a regularizer that NumPy computes, which has no gradient."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            penalty = tf.numpy_function(logarithms, [y], tf.float32)
            loss = self.compute_loss(x, y, self(x, training=True)) + tf.reduce_mean(penalty)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


def rare_loss_of_numpy(rng, callbacks):
    """A term of the loss is a logarithm of negative numbers in NumPy, which no replay computes."""
    kmp.enable()
    return fit(sequential(model_class=LossOfNumpy), rng, callbacks)


def rare_hysteresis(rng, callbacks):
    """The loss scale backs off after 1000 skipped steps only."""
    kmp.enable(initial_scale=2.0**24, hysteresis=1000)
    return fit(sequential(), rng, callbacks)


RARE = {
    "rare_clipping_layer": ChangedGradients,
    "rare_large_initializer": GrowingActivations,
    "rare_squares_beside_numpy": LossInFloat16,
    "rare_root_of_zero": NonfiniteGradients,
    "rare_infinite_weights": NonfiniteWeights,
    "rare_constant_of_the_module": RoundedBefore,
    "rare_loss_of_numpy": UnexplainedLoss,
    "rare_hysteresis": RuleOverflows,
}
