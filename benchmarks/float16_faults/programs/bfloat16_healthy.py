"""Programs without a fault that look as if bfloat16 would hurt them."""

import keras
import numpy as np
from keras import ops

import kmp
from float16_faults.programs.frame import (
    MaskedAttention,
    accuracy,
    classifier_after,
    clusters,
    crossentropy,
    event_classifier,
    events,
    explained_variance,
    line_classifier,
    lines,
    text_classifier,
    texts,
)


def healthy_bfloat16_cubes(rng, callbacks):
    """Sound: cubes of features up to a million, which overflow float16 but not bfloat16."""
    kmp.enable("mixed_bfloat16")

    class Cubes(keras.layers.Layer):
        """Returns the features, in other units, and their cubes."""

        def call(self, x):
            return ops.concatenate([x / 100, ops.power(x, 3) / 1e6], axis=-1)

    x = rng.uniform(-120, 120, (1536, 6)).astype("float32")
    label = ((x / 100) ** 3 @ np.array([1.0, -1.0, 0.5, 0, 0, 0]) > 0).astype("int32")

    model = classifier_after(Cubes(name="cubes"), (6,), units=24)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss=crossentropy())
    model.fit(
        x[:1024],
        label[:1024],
        batch_size=32,
        epochs=6,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x[1024:], label[1024:])


def healthy_bfloat16_noisy(rng, callbacks):
    """Sound: few examples, a fifth of them with a wrong label, in batches of 8."""
    kmp.enable("mixed_bfloat16")

    x, y = clusters(rng, 3, 1280, (8,), noise=0.8)
    noisy = np.where(rng.random(256) < 0.2, rng.integers(0, 3, 256), y[:256])

    model = keras.Sequential(
        [
            keras.Input((8,), name="features"),
            keras.layers.Dense(32, activation="relu", name="hidden"),
            keras.layers.Dense(3, name="logits"),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-3), loss=crossentropy())
    model.fit(x[:256], noisy, batch_size=8, epochs=8, verbose=0, callbacks=callbacks)
    return accuracy(model, x[256:], y[256:])


def healthy_bfloat16_mask(rng, callbacks):
    """Sound: an attention that masks with -1e9, which bfloat16 represents."""

    class Attention(MaskedAttention):
        def mask(self, scores, is_word):
            return scores + (1.0 - is_word) * -1e9

    kmp.enable("mixed_bfloat16")

    data, y = texts(rng)

    model = text_classifier(Attention(units=16, name="masked_attention"))
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss=crossentropy())
    model.fit(data, y, batch_size=32, epochs=5, verbose=0, callbacks=callbacks)
    return accuracy(model, data, y)


def healthy_bfloat16_tiny_gradients(rng, callbacks):
    """Sound: gradients near 1e-12, which bfloat16 represents, with an epsilon to match."""
    kmp.enable("mixed_bfloat16")

    sequence, y = events(rng)

    model = event_classifier()
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=3e-3, epsilon=1e-18),
        loss=crossentropy(),
        loss_weights=[1e-10],
    )
    model.fit(
        sequence[:768],
        y[:768],
        batch_size=32,
        epochs=4,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, sequence[768:], y[768:])


def healthy_bfloat16_batch_norm(rng, callbacks):
    """Sound: a convolution with batch normalization, whose statistics stay in float32."""
    kmp.enable("mixed_bfloat16")

    images, is_vertical = lines(rng)

    model = line_classifier(kmp.layers.BatchNormalization(momentum=0.9, name="norm"))
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss=crossentropy())
    model.fit(
        images[:768],
        is_vertical[:768],
        batch_size=32,
        epochs=8,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, images[768:], is_vertical[768:])


def healthy_bfloat16_dropout(rng, callbacks):
    """Sound: strong dropout around a GRU, so two passes of a batch differ by far."""
    kmp.enable("mixed_bfloat16")

    frequency = rng.choice([0.3, 0.5, 0.8], size=1280)
    phase = rng.uniform(0, 2 * np.pi, size=(1280, 1))
    waves = np.sin(frequency[:, None] * np.arange(16) + phase)
    waves = (waves + 0.1 * rng.normal(size=(1280, 16))).astype("float32")[..., None]
    y = np.digitize(frequency, [0.4, 0.6])

    model = keras.Sequential(
        [
            keras.Input((16, 1), name="waves"),
            keras.layers.GRU(24, name="gru"),
            keras.layers.Dropout(0.5, name="dropout_1"),
            keras.layers.Dense(48, activation="relu", name="hidden"),
            keras.layers.Dropout(0.5, name="dropout_2"),
            keras.layers.Dense(3, name="logits"),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss=crossentropy())
    model.fit(
        waves[:1024],
        y[:1024],
        batch_size=32,
        epochs=5,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, waves[1024:], y[1024:])


def healthy_bfloat16_embedding(rng, callbacks):
    """Sound: indices up to 20000 as integers, of which a text uses few."""
    kmp.enable("mixed_bfloat16")

    used = rng.integers(0, 20_000, 300)
    meaning = rng.normal(size=300)
    word = rng.integers(0, 300, (2048, 12))
    y = (meaning[word].sum(axis=1) > 0).astype("int32")
    tokens = used[word].astype("int32")

    model = keras.Sequential(
        [
            keras.Input((12,), dtype="int32", name="tokens"),
            keras.layers.Embedding(20_000, 8, name="embedding"),
            keras.layers.GlobalAveragePooling1D(name="average"),
            keras.layers.Dense(2, name="logits"),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss=crossentropy())
    model.fit(
        tokens[:1536],
        y[:1536],
        batch_size=32,
        epochs=6,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, tokens[1536:], y[1536:])


def healthy_bfloat16_unit_norm(rng, callbacks):
    """Sound: a norm by hand over 4096 elements, whose sum TensorFlow accumulates in float32."""
    kmp.enable("mixed_bfloat16")

    class UnitNorm(keras.layers.Layer):
        """Divides a signal by its norm."""

        def call(self, signal):
            norm = ops.sqrt(ops.sum(ops.square(signal), axis=-1, keepdims=True))
            return 64 * signal / (norm + 1e-6)

    tone = rng.integers(0, 2, 768)
    waves = np.stack([np.sin(0.05 * np.arange(4096)), np.sin(0.052 * np.arange(4096))])
    signal = 0.2 * waves[tone] + rng.normal(size=(768, 4096))
    signal = (signal * rng.uniform(0.1, 10, (768, 1))).astype("float32")

    model = classifier_after(UnitNorm(name="unit_norm"), (4096,), units=8)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-3), loss=crossentropy())
    model.fit(
        signal[:512],
        tone[:512],
        batch_size=32,
        epochs=5,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, signal[512:], tone[512:])


def healthy_bfloat16_average(rng, callbacks):
    """Sound: a moving average by hand that is computed in float32, though the layer is not."""
    kmp.enable("mixed_bfloat16")

    class Centering(keras.layers.Layer):
        """Subtracts the mean of the batch, and its moving average after the training."""

        def build(self, input_shape):
            self.mean = self.add_weight(
                shape=(input_shape[-1],),
                initializer="zeros",
                trainable=False,
                dtype="float32",
                autocast=False,
                name="mean",
            )

        def call(self, x, training=False):
            x = ops.cast(x, "float32")
            centered = x - self.mean
            if training:
                mean = ops.mean(x, axis=0)
                self.mean.assign(0.99 * self.mean + 0.01 * mean)
                centered = x - mean
            return ops.cast(centered, self.compute_dtype)

    x = rng.normal(size=(2048, 8)).astype("float32")
    label = (x[:, 0] + x[:, 1] * x[:, 2] > 0).astype("int32")
    x += rng.uniform(6.0, 9.0, 8).astype("float32")

    model = classifier_after(Centering(name="center"), (8,), units=32)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss=crossentropy())
    model.fit(
        x[:1536],
        label[:1536],
        batch_size=16,
        epochs=8,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x[1536:], label[1536:])


def healthy_bfloat16_prices(rng, callbacks):
    """Sound: prices near 400, which bfloat16 rounds to multiples of 2: far below their noise."""
    kmp.enable("mixed_bfloat16")

    houses = rng.normal(size=(2560, 10)).astype("float32")
    price = 420 + 110 * houses[:, 0] + 60 * houses[:, 1] * houses[:, 2]
    price = (price + 15 * rng.normal(size=2560)).astype("float32")

    model = keras.Sequential(
        [
            keras.Input((10,), name="house"),
            keras.layers.Dense(64, activation="relu", name="wide"),
            keras.layers.Dense(64, activation="relu", name="deep"),
            keras.layers.Dense(1, name="price"),
        ]
    )
    model.compile(optimizer=keras.optimizers.RMSprop(learning_rate=3e-3), loss="mse")
    model.fit(
        houses[:2048],
        price[:2048],
        batch_size=32,
        epochs=8,
        verbose=0,
        callbacks=callbacks,
    )
    return explained_variance(model, houses[2048:], price[2048:])


def healthy_bfloat16_vocabulary(rng, callbacks):
    """Sound: a softmax over 5000 words in bfloat16, whose sum TensorFlow accumulates in float32."""
    kmp.enable("mixed_bfloat16")

    x, topic = clusters(rng, 100, 2048, (24,), noise=0.5)
    word = rng.integers(0, 5000, 100)[topic]

    model = keras.Sequential(
        [
            keras.Input((24,), name="context"),
            keras.layers.Dense(32, activation="relu", name="hidden"),
            keras.layers.Dense(5000, activation="softmax", name="word"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=1e-2),
        loss=keras.losses.SparseCategoricalCrossentropy(),
    )
    model.fit(
        x[:1536],
        word[:1536],
        batch_size=64,
        epochs=6,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x[1536:], word[1536:])
