"""The method of "Vector-Quantized Variational Autoencoders".

https://keras.io/examples/generative/vq_vae/
"""

import keras
import tensorflow as tf
from keras import layers
from synthetic import blobs

CODES, UNITS = 32, 8


class Quantizer(layers.Layer):
    """Replaces each vector by the nearest one of a codebook, and adds both distances as a loss."""

    def __init__(self, beta=0.25):
        super().__init__()
        self.beta = beta
        self.codebook = self.add_weight((UNITS, CODES), "random_uniform")

    def call(self, x):
        vectors = tf.reshape(x, (-1, UNITS))
        products = tf.matmul(vectors, self.codebook)
        lengths = tf.reduce_sum(vectors**2, axis=1, keepdims=True)
        code_lengths = tf.reduce_sum(self.codebook**2, axis=0)
        nearest = tf.argmin(lengths + code_lengths - 2 * products, axis=1)
        codes = tf.matmul(tf.one_hot(nearest, CODES), self.codebook, transpose_b=True)
        codes = tf.reshape(codes, tf.shape(x))
        commitment = tf.reduce_mean((tf.stop_gradient(codes) - x) ** 2)
        movement = tf.reduce_mean((codes - tf.stop_gradient(x)) ** 2)
        self.add_loss(self.beta * commitment + movement)
        return x + tf.stop_gradient(codes - x)  # the gradient of the decoder reaches the encoder


def autoencoder():
    same = {"strides": 2, "padding": "same", "activation": "relu"}
    return keras.Sequential(
        [
            keras.Input((16, 16, 1)),
            layers.Conv2D(8, 3, **same),
            layers.Conv2D(16, 3, **same),
            layers.Conv2D(UNITS, 1),
            Quantizer(),
            layers.Conv2DTranspose(16, 3, **same),
            layers.Conv2DTranspose(8, 3, **same),
            layers.Conv2D(1, 3, padding="same"),
        ]
    )


class Trainer(keras.Model):
    def __init__(self, variance):
        super().__init__()
        self.variance = variance
        self.autoencoder = autoencoder()
        names = ("loss", "reconstruction_loss", "codebook_loss")
        self.means = [keras.metrics.Mean(name=name) for name in names]

    @property
    def metrics(self):
        return self.means

    def train_step(self, x):
        with tf.GradientTape() as tape:
            reconstruction = tf.reduce_mean((x - self.autoencoder(x)) ** 2) / self.variance
            loss = reconstruction + sum(self.autoencoder.losses)
            scaled = self.optimizer.scale_loss(loss)
        weights = self.autoencoder.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(scaled, weights), weights, strict=True))
        values = (loss, reconstruction, sum(self.autoencoder.losses))
        for mean, value in zip(self.means, values, strict=True):
            mean.update_state(value)
        return {mean.name: mean.result() for mean in self.means}


def train(callbacks=(), seed=0):
    keras.utils.set_random_seed(seed)
    pictures = blobs(512) - 0.5
    model = Trainer(pictures.var())
    model.compile(keras.optimizers.Adam(2e-3))
    return model.fit(pictures, epochs=10, verbose=0, callbacks=callbacks).history
