"""The method of "Density estimation using Real NVP".

https://keras.io/examples/generative/real_nvp/
"""

import math

import keras
import numpy as np
import tensorflow as tf
from keras import layers


def moons(count):
    """Returns points on two interleaved half circles, normalized."""
    random = np.random.default_rng(0)
    angles, upper = random.uniform(0, math.pi, count), random.integers(0, 2, count)
    x = np.where(upper, np.cos(angles), 1 - np.cos(angles))
    y = np.where(upper, np.sin(angles), 0.5 - np.sin(angles))
    points = np.stack([x, y], axis=-1) + random.normal(scale=0.05, size=(count, 2))
    return ((points - points.mean(0)) / points.std(0)).astype("float32")


def log_normal_density(x, mean=(0.0, 0.0), deviation=(1.0, 1.0)):
    """The log density, with the conversions of TensorFlow Probability's distributions."""
    mean, deviation = tf.constant(mean), tf.constant(deviation)
    x = tf.convert_to_tensor(x, dtype=mean.dtype)
    squares = tf.math.squared_difference(x / deviation, mean / deviation)
    constant = tf.reduce_sum(tf.math.log(deviation)) + math.log(2 * math.pi)
    return -0.5 * tf.reduce_sum(squares, axis=-1) - constant


def coupling(units=32):
    """A model of the log scale and the shift of one coordinate, from the other one."""
    point = keras.Input((2,))
    outputs = []
    for activation in ("tanh", "linear"):
        hidden = point
        for _ in range(3):
            hidden = layers.Dense(units, "relu", kernel_regularizer="l2")(hidden)
        outputs.append(layers.Dense(2, activation, kernel_regularizer="l2")(hidden))
    return keras.Model(point, outputs)


class RealNVP(keras.Model):
    def __init__(self, couplings=2):
        super().__init__()
        self.masks = np.tile(np.eye(2, dtype="float32")[::-1], (couplings // 2, 1))
        self.couplings = [coupling() for _ in range(couplings)]
        self.mean_loss = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.mean_loss]

    def call(self, x):
        """Maps points to the latent space, with the log of the determinant."""
        log_determinant = 0
        for mask, model in zip(self.masks[::-1], self.couplings[::-1], strict=True):
            kept = x * mask
            changed = 1 - mask
            log_scale, shift = model(kept)
            log_scale *= changed
            shift *= changed
            x = changed * (x - shift) * tf.exp(-log_scale) + kept
            log_determinant -= tf.reduce_sum(log_scale, axis=1)
        return x, log_determinant

    def negative_log_likelihood(self, x):
        latent, log_determinant = self(x)
        return -tf.reduce_mean(log_normal_density(latent) + log_determinant)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.negative_log_likelihood(data)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.mean_loss.update_state(loss)
        return {"loss": self.mean_loss.result()}

    def test_step(self, data):
        self.mean_loss.update_state(self.negative_log_likelihood(data))
        return {"loss": self.mean_loss.result()}


def train(callbacks=(), seed=0):
    keras.utils.set_random_seed(seed)
    model = RealNVP()
    model.compile(keras.optimizers.Adam(1e-3))
    points = moons(1024)
    return model.fit(
        points, batch_size=64, epochs=8, validation_split=0.25, verbose=0, callbacks=callbacks
    ).history
