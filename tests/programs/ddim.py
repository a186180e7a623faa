"""The method of "Denoising Diffusion Implicit Models".

https://keras.io/examples/generative/ddim/
"""

import math

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from synthetic import tiles

SIZE, BATCH, AVERAGING = 8, 16, 0.99
LEAST_SIGNAL, MOST_SIGNAL = 0.02, 0.95


@keras.saving.register_keras_serializable("programs")
def embed(noise_variance):
    """Returns sines and cosines of a number, of shape (batch, 1, 1, 16)."""
    frequencies = tf.exp(tf.linspace(tf.math.log(1.0), tf.math.log(100.0), 8))
    angles = 2.0 * math.pi * frequencies * noise_variance
    return tf.concat([tf.sin(angles), tf.cos(angles)], axis=3)


def residual(x, width):
    skipped = x if x.shape[-1] == width else layers.Conv2D(width, 1)(x)
    x = layers.BatchNormalization(center=False, scale=False)(x)
    x = layers.Conv2D(width, 3, padding="same", activation="swish")(x)
    return layers.Add()([layers.Conv2D(width, 3, padding="same")(x), skipped])


def unet():
    pictures, variance = keras.Input((SIZE, SIZE, 3)), keras.Input((1, 1, 1))
    embedded = layers.UpSampling2D(SIZE, interpolation="nearest")(layers.Lambda(embed)(variance))
    x = layers.Concatenate()([layers.Conv2D(8, 1)(pictures), embedded])
    skipped = residual(x, 8)
    x = residual(layers.AveragePooling2D(2)(skipped), 16)
    x = layers.UpSampling2D(interpolation="bilinear")(x)
    x = residual(layers.Concatenate()([x, skipped]), 8)
    return keras.Model([pictures, variance], layers.Conv2D(3, 1, kernel_initializer="zeros")(x))


class Diffusion(keras.Model):
    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.network = unet()
        self.average_network = keras.models.clone_model(self.network)
        self.noise_loss = keras.metrics.Mean(name="noise_loss")
        self.picture_loss = keras.metrics.Mean(name="picture_loss")

    @property
    def metrics(self):
        return [self.noise_loss, self.picture_loss]

    def rates(self, times):
        """Returns the shares of noise and signal, whose squares add up to 1."""
        start, end = tf.acos(MOST_SIGNAL), tf.acos(LEAST_SIGNAL)
        angles = start + times * (end - start)
        return tf.sin(angles), tf.cos(angles)

    def train_step(self, pictures):
        pictures = self.normalizer(pictures, training=True)
        noise = tf.random.normal((BATCH, SIZE, SIZE, 3))
        noise_rate, signal_rate = self.rates(tf.random.uniform((BATCH, 1, 1, 1)))
        noisy = signal_rate * pictures + noise_rate * noise
        with tf.GradientTape() as tape:
            predicted = self.network([noisy, noise_rate**2], training=True)
            denoised = (noisy - noise_rate * predicted) / signal_rate
            loss = self.loss(noise, predicted)
            picture_loss = self.loss(pictures, denoised)
            scaled = self.optimizer.scale_loss(loss)
        weights = self.network.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(scaled, weights), weights, strict=True))
        self.noise_loss.update_state(loss)
        self.picture_loss.update_state(picture_loss)
        pairs = zip(self.network.weights, self.average_network.weights, strict=True)
        for weight, average in pairs:
            average.assign(AVERAGING * average + (1 - AVERAGING) * weight)
        return {metric.name: metric.result() for metric in self.metrics}


def train(callbacks=(), seed=0):
    keras.utils.set_random_seed(seed)
    pictures = tiles(np.arange(320) % 10, SIZE, noise=0.02)
    data = tf.data.Dataset.from_tensor_slices(pictures).batch(BATCH, drop_remainder=True)
    model = Diffusion()
    model.compile(
        optimizer=keras.optimizers.AdamW(3e-3, weight_decay=1e-4),
        loss=keras.losses.mean_absolute_error,
    )
    model.normalizer.adapt(data)
    return model.fit(data, epochs=8, verbose=0, shuffle=False, callbacks=callbacks).history
