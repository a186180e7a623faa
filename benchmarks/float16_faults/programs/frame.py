"""What several programs share: data, losses, scores, and a loop."""

import keras
import numpy as np
import tensorflow as tf


def clusters(rng, classes, rows, shape, noise, spread=1.0):
    """Returns points around the center of their class, and the classes.

    A point is the same at each step of a sequence.
    """
    centers = rng.normal(scale=spread, size=(classes, shape[-1]))
    y = rng.integers(0, classes, rows)
    around = centers[y].reshape(rows, *[1] * (len(shape) - 1), shape[-1])
    return (around + rng.normal(scale=noise, size=(rows, *shape))).astype("float32"), y


def quadrants(rng, contrast, noise=0.4):
    """Returns images of which one quadrant is bright, and which one."""
    quadrant = rng.integers(0, 4, 1024)
    images = rng.normal(scale=noise, size=(1024, 8, 8, 1))
    for number, (row, column) in enumerate([(0, 0), (0, 4), (4, 0), (4, 4)]):
        images[quadrant == number, row : row + 4, column : column + 4] += contrast
    return images.astype("float32"), quadrant


def lines(rng):
    """Returns images of a line, and whether it is vertical."""
    is_vertical = rng.integers(0, 2, 1024)
    images = rng.normal(scale=0.6, size=(1024, 8, 8, 1))
    position = rng.integers(0, 8, 1024)
    for image, vertical, line in zip(images, is_vertical, position, strict=True):
        image[:, line] += 1.5 * vertical
        image[line, :] += 1.5 * (1 - vertical)
    return images.astype("float32"), is_vertical


def census(rng, mean, deviation):
    """Returns populations, incomes and the like, and whether a place grows."""
    z = rng.normal(size=(1280, 6))
    table = np.array([2e5, 4e4, 8e5, 30.0, 2.5, 1e3]) * (mean + deviation * z)
    return (
        table.astype("float32"),
        (z[:, 0] - z[:, 1] + 0.5 * z[:, 3] > 0.5 * z[:, 2]).astype("float32")[:, None],
    )


def events(rng):
    """Returns sequences with one event, and its kind."""
    y = rng.integers(0, 3, 1024)
    sequence = rng.normal(size=(1024, 10, 6))
    sequence[np.arange(1024), rng.integers(0, 10, 1024), y] += 4.0
    return sequence.astype("float32"), y


def walks(rng):
    """Returns sequences of steps, and where they end."""
    x = rng.choice([-1.0, 1.0], size=(1024, 12, 2)).astype("float32")
    return x, x[:, :, 0].sum(axis=1, keepdims=True) / 4


def texts(rng):
    """Returns texts with a mask, and whether they are positive."""
    length = rng.integers(4, 11, 1024)
    is_word = (np.arange(10) < length[:, None]).astype("float32")
    tokens = rng.integers(1, 40, size=(1024, 10)).astype("int32")
    weight = rng.normal(size=40)
    return {"tokens": tokens, "is_word": is_word}, (
        (weight[tokens] * is_word).sum(axis=1) > 0
    ).astype("int32")


def classifier_after(layer, shape, units):
    """Returns a classifier for two classes, with a hidden layer on what a layer returns."""
    inputs, hidden = keras.Input(shape), keras.layers.Dense(units, activation="relu", name="hidden")
    return keras.Model(inputs, keras.layers.Dense(2, name="logits")(hidden(layer(inputs))))


def line_classifier(norm):
    """Returns a convolution for `lines`, with a normalization layer."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1), name="image"),
            keras.layers.Conv2D(8, kernel_size=5, padding="same", name="conv"),
            norm,
            keras.layers.ReLU(name="relu"),
            keras.layers.GlobalMaxPooling2D(name="pool"),
            keras.layers.Dense(2, name="logits"),
        ]
    )


def walk_model():
    recurrent, hidden = (
        keras.layers.LSTM(16, name="lstm"),
        keras.layers.Dense(8, activation="relu", name="hidden"),
    )
    return keras.Sequential(
        [
            keras.Input((12, 2), name="sequence"),
            recurrent,
            hidden,
            keras.layers.Dense(1, name="total"),
        ]
    )


def event_classifier():
    inputs = keras.Input((10, 6), name="sequence")
    projected = keras.layers.Dense(16, name="project")(inputs)
    attended = keras.layers.MultiHeadAttention(num_heads=2, key_dim=8, name="attention")(
        projected, projected
    )
    hidden = keras.layers.Add(name="add")([projected, attended])
    hidden = keras.layers.Dense(16, activation="relu", name="feed_forward")(hidden)
    hidden = keras.layers.GlobalMaxPooling1D(name="pool")(hidden)
    return keras.Model(inputs, keras.layers.Dense(3, name="logits")(hidden))


def text_classifier(attention):
    """Returns a model in which a layer attends to the embedded words, given those and the mask."""
    inputs = {
        "tokens": keras.Input((10,), dtype="int32", name="tokens"),
        "is_word": keras.Input((10,), name="is_word"),
    }
    embedded = keras.layers.Embedding(40, 16, name="embedding")(inputs["tokens"])
    pooled = keras.layers.GlobalAveragePooling1D(name="average")(
        attention(embedded, inputs["is_word"])
    )
    return keras.Model(inputs, keras.layers.Dense(2, name="logits")(pooled))


class MaskedAttention(keras.layers.Layer):
    """Attention whose scores are masked by the method `mask` of a subclass."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.query = keras.layers.Dense(units, use_bias=False, name="query")
        self.key = keras.layers.Dense(units, use_bias=False, name="key")
        self.value = keras.layers.Dense(units, use_bias=False, name="value")

    def call(self, inputs, is_word):
        scores = keras.ops.matmul(
            self.query(inputs), keras.ops.transpose(self.key(inputs), (0, 2, 1))
        )
        scores = self.mask(scores / self.units**0.5, is_word[:, None, :])
        return keras.ops.matmul(keras.ops.softmax(scores, axis=-1), self.value(inputs))


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def accuracy(model, x, y):
    return float(np.mean(model.predict(x, verbose=0).argmax(axis=-1) == y))


def sign_accuracy(model, x, y):
    return float(np.mean((model.predict(x, verbose=0) > 0) == (y > 0)))


def explained_variance(model, x, y):
    """Returns 1 minus the share of the variance of `y` that the model leaves."""
    prediction = model.predict(x, verbose=0).astype("float32").reshape(y.shape)
    return float(1 - np.mean((prediction - y) ** 2) / np.var(y))


def train_in_loop(model, step, arrays, epochs, callbacks, batch_size=32):
    """Calls a training step with batches, and the callbacks as a custom loop does."""
    callbacks = keras.callbacks.CallbackList(callbacks, model=model)
    callbacks.on_train_begin()
    for epoch in range(epochs):
        callbacks.on_epoch_begin(epoch)
        for index, start in enumerate(range(0, len(arrays[0]), batch_size)):
            callbacks.on_train_batch_begin(index)
            step(*(tf.constant(array[start : start + batch_size]) for array in arrays))
            callbacks.on_train_batch_end(index)
        callbacks.on_epoch_end(epoch)
    callbacks.on_train_end()
