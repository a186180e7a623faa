"""The method of "Metric learning for image similarity search".

https://keras.io/examples/vision/metric_learning/
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from synthetic import tiles

CLASSES = 8


class Pairs(keras.utils.PyDataset):
    """Batches of two pictures of each class, of shape (2, classes, height, width, 3)."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches
        labels = np.arange(CLASSES).repeat(20)
        self.pictures = tiles(labels).reshape(CLASSES, 20, 16, 16, 3)

    def __len__(self):
        return self.batches

    def __getitem__(self, index):
        random = np.random.default_rng(index)
        chosen = [random.choice(20, size=2, replace=False) for _ in range(CLASSES)]
        return self.pictures[np.arange(CLASSES), np.transpose(chosen)]


class Embedding(keras.Model):
    """Learns that two pictures of a class are more similar than two of different classes."""

    def train_step(self, data):
        pairs, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        anchors, positives = pairs[0], pairs[1]
        labels = tf.range(CLASSES)
        with tf.GradientTape() as tape:
            one, other = self(anchors, training=True), self(positives, training=True)
            similarities = tf.einsum("ae,pe->ap", one, other)
            similarities /= 0.2
            loss = self.compute_loss(y=labels, y_pred=similarities)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:  # here, only the loss
            metric.update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics}


class Normalize(layers.Layer):
    def call(self, x):
        return tf.nn.l2_normalize(x, axis=-1)


def train(callbacks=(), seed=0):
    keras.utils.set_random_seed(seed)
    pictures = keras.Input((16, 16, 3))
    x = layers.Conv2D(8, 3, strides=2, activation="relu")(pictures)
    x = layers.Conv2D(16, 3, strides=2, activation="relu")(x)
    x = layers.Dense(8)(layers.GlobalAveragePooling2D()(x))
    model = Embedding(pictures, Normalize()(x))
    model.compile(
        keras.optimizers.Adam(3e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model.fit(Pairs(32), epochs=6, verbose=0, callbacks=callbacks).history
