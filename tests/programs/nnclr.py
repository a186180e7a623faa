"""The method of "Self-supervised contrastive learning with NNCLR".

https://keras.io/examples/vision/nnclr/
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from synthetic import tiles

CLASSES, UNITS, QUEUE, TEMPERATURE = 4, 16, 64, 0.1


class RandomCrop(layers.Layer):
    """Cuts out a random part of each picture and scales it to the size of the picture."""

    def call(self, pictures):
        count, height, width = tf.unstack(tf.shape(pictures)[:3])
        sides = tf.sqrt(tf.random.uniform((count,), 0.4, 1.0))
        top = tf.random.uniform((count,)) * (1 - sides)
        left = tf.random.uniform((count,)) * (1 - sides)
        boxes = tf.stack([top, left, top + sides, left + sides], axis=1)
        return tf.image.crop_and_resize(pictures, boxes, tf.range(count), (height, width))


class RandomBrightness(layers.Layer):
    def call(self, pictures):
        factors = tf.random.uniform((tf.shape(pictures)[0], 1, 1, 1), 0.7, 1.3)
        return tf.clip_by_value(factors * pictures + (1.0 - factors) * 0, 0, 1)


def encoder():
    convolutions = [layers.Conv2D(UNITS, 3, strides=2, activation="relu") for _ in range(2)]
    dense = layers.Dense(UNITS, activation="relu")
    return keras.Sequential([keras.Input((16, 16, 3)), *convolutions, layers.Flatten(), dense])


class NNCLR(keras.Model):
    def __init__(self):
        super().__init__()
        augmentations = [layers.RandomFlip("horizontal"), RandomCrop(), RandomBrightness()]
        self.augment = keras.Sequential([keras.Input((16, 16, 3)), *augmentations])
        self.encoder = encoder()
        projection = [layers.Dense(UNITS, activation="relu"), layers.Dense(UNITS)]
        self.projection = keras.Sequential([keras.Input((UNITS,)), *projection])
        self.probe = keras.Sequential([keras.Input((UNITS,)), layers.Dense(CLASSES)])
        self.queue = tf.Variable(
            tf.math.l2_normalize(tf.random.normal((QUEUE, UNITS)), axis=1), trainable=False
        )
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.correlation_accuracy = keras.metrics.SparseCategoricalAccuracy()
        self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy()

    def compile(self, contrastive_optimizer, probe_optimizer, **arguments):
        super().compile(**arguments)
        self.contrastive_optimizer = contrastive_optimizer
        self.probe_optimizer = probe_optimizer

    def nearest(self, projections):
        """Returns the nearest vectors of the queue; the gradient is that of the projections."""
        similarity = tf.matmul(projections, self.queue, transpose_b=True)
        neighbors = tf.gather(self.queue, tf.argmax(similarity, axis=1))
        return projections + tf.stop_gradient(neighbors - projections)

    def contrastive_loss(self, one, other):
        one, other = tf.math.l2_normalize(one, axis=1), tf.math.l2_normalize(other, axis=1)
        similarities = [
            tf.matmul(self.nearest(one), other, transpose_b=True) / TEMPERATURE,
            tf.matmul(self.nearest(other), one, transpose_b=True) / TEMPERATURE,
        ]
        count = tf.shape(one)[0]
        loss = keras.losses.sparse_categorical_crossentropy(
            tf.tile(tf.range(count), [2]), tf.concat(similarities, axis=0), from_logits=True
        )
        self.queue.assign(tf.concat([one, self.queue[:-count]], axis=0))
        return loss

    def update_correlation_accuracy(self, one, other):
        one, other = (
            (features - tf.reduce_mean(features, axis=0))
            / (tf.math.reduce_std(features, axis=0) + 1e-3)
            for features in (one, other)
        )
        count = tf.cast(tf.shape(one)[0], tf.float32)
        correlation = tf.matmul(one, other, transpose_a=True) / count
        self.correlation_accuracy.update_state(tf.range(UNITS), correlation)

    def train_step(self, data):
        (unlabeled, _), (labeled, labels) = data
        pictures = tf.concat((unlabeled, labeled), axis=0)
        with tf.GradientTape() as tape:
            one = self.encoder(self.augment(pictures, training=True))
            other = self.encoder(self.augment(pictures, training=True))
            loss = self.contrastive_loss(self.projection(one), self.projection(other))
            scaled = self.contrastive_optimizer.scale_loss(loss)
        weights = self.encoder.trainable_weights + self.projection.trainable_weights
        gradients = tape.gradient(scaled, weights)
        self.contrastive_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.update_correlation_accuracy(one, other)

        with tf.GradientTape() as tape:
            logits = self.probe(self.encoder(self.augment(labeled, training=True)))
            probe_loss = self.probe_loss(labels, logits)
            scaled = self.probe_optimizer.scale_loss(probe_loss)
        weights = self.probe.trainable_weights
        gradients = tape.gradient(scaled, weights)
        self.probe_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.probe_accuracy.update_state(labels, logits)
        return {
            "contrastive_loss": tf.reduce_mean(loss),
            "correlation_accuracy": self.correlation_accuracy.result(),
            "probe_loss": probe_loss,
            "probe_accuracy": self.probe_accuracy.result(),
        }


def train(callbacks=(), seed=0):
    keras.utils.set_random_seed(seed)
    labels = np.random.default_rng(1).integers(0, CLASSES, 512)
    pictures = tiles(labels)
    halves = [
        tf.data.Dataset.from_tensor_slices((pictures[part], labels[part])).batch(16)
        for part in (slice(256), slice(256, None))
    ]
    model = NNCLR()
    model.compile(
        contrastive_optimizer=keras.optimizers.Adam(2e-3),
        probe_optimizer=keras.optimizers.Adam(5e-3),
    )
    data = tf.data.Dataset.zip(tuple(halves))
    return model.fit(data, epochs=6, verbose=0, shuffle=False, callbacks=callbacks).history
