"""Outputs and gradients that exceed float16."""

import keras
import numpy as np
from keras import ops

import kmp
from float16_faults.programs.frame import (
    accuracy,
    clusters,
    crossentropy,
    explained_variance,
    quadrants,
)


def fault_backward_overflow_height(rng, callbacks):
    """Heights in meters push the loss scale down until the label's gradients vanish.

    Typical for raw units.
    """
    kmp.enable()

    image, label = quadrants(rng, 0.7, noise=0.5)
    height = (2000 + 1500 * image.mean(axis=(1, 3))).astype("float32")

    inputs = keras.Input((8, 8, 1), name="image")
    trunk = keras.layers.Conv2D(8, kernel_size=3, strides=2, name="conv")(inputs)
    trunk = kmp.layers.BatchNormalization(momentum=0.9, name="norm")(trunk)
    trunk = keras.layers.Flatten(name="flatten")(keras.layers.ReLU(name="relu")(trunk))
    first = keras.layers.Dense(8, name="relative_height")(trunk)
    second = keras.layers.Dense(24, activation="relu", name="label_hidden")(trunk)
    outputs = {
        "height": keras.layers.Lambda(lambda relative: 1500.0 * relative + 2000.0, name="height")(
            first
        ),
        "label": keras.layers.Dense(4, name="label")(second),
    }
    model = keras.Model(inputs, outputs)
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=5e-3, epsilon=1e-12),
        loss={"height": keras.losses.MeanSquaredError(reduction="sum"), "label": crossentropy()},
        loss_weights={"height": 1.0, "label": 1e-4},
    )
    targets = {"height": height[:768], "label": label[:768]}
    model.fit(
        image[:768],
        targets,
        batch_size=32,
        epochs=7,
        verbose=0,
        callbacks=callbacks,
    )
    return float(
        np.mean(model.predict(image[768:], verbose=0)["label"].argmax(axis=1) == label[768:])
    )


def fault_forward_overflow_cube(rng, callbacks):
    """Cubes of features near 60 exceed float16.

    Typical for polynomial features that are built inside the model.
    """

    class Polynomial(keras.layers.Layer):
        def call(self, inputs):
            return ops.concatenate([inputs, inputs**2, inputs**3], axis=-1)

    kmp.enable()

    speed = rng.uniform(5, 60, size=(1280, 4)).astype("float32")
    power = (speed**3 / 2e5).sum(axis=1, keepdims=True)
    power = (power + rng.normal(scale=0.02, size=power.shape)).astype("float32")
    x_train, y_train, x_test, y_test = speed[:1024], power[:1024], speed[1024:], power[1024:]

    model = keras.Sequential(
        [
            keras.Input((4,), name="speed"),
            Polynomial(name="polynomial"),
            keras.layers.BatchNormalization(momentum=0.9, dtype="float32", name="norm"),
            keras.layers.Dense(16, activation="relu", name="hidden"),
            keras.layers.Dense(1, dtype="float32", name="power"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss=keras.losses.MeanSquaredError()
    )
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=6,
        verbose=0,
        callbacks=callbacks,
    )
    return explained_variance(model, x_test, y_test)


def fault_forward_overflow_depth(rng, callbacks):
    """Three layers with a large initialization multiply activations beyond float16.

    Typical for a copied initializer.
    """
    kmp.enable()

    x, y = clusters(rng, 5, 1280, (24,), noise=0.7)
    x_train, y_train, x_test, y_test = x[:1024], y[:1024], x[1024:], y[1024:]

    model = keras.Sequential(
        [
            keras.Input((24,), name="features"),
            keras.layers.Dense(
                48, activation="relu", kernel_initializer="he_normal", name="hidden"
            ),
            keras.layers.Dense(
                48, kernel_initializer=keras.initializers.RandomNormal(stddev=8.0), name="project_1"
            ),
            keras.layers.Dense(
                48, kernel_initializer=keras.initializers.RandomNormal(stddev=8.0), name="project_2"
            ),
            keras.layers.Dense(
                48, kernel_initializer=keras.initializers.RandomNormal(stddev=8.0), name="project_3"
            ),
            keras.layers.LayerNormalization(dtype="float32", name="norm"),
            keras.layers.Dense(5, name="logits"),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=5e-3), loss=crossentropy())
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=4,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x_test, y_test)


def fault_forward_overflow_attention(rng, callbacks):
    """Attention scores without a division by sqrt(d) exceed float16 for large inputs.

    Typical for attention by hand.
    """

    class DotAttention(keras.layers.Layer):
        def __init__(self, units, **kwargs):
            super().__init__(**kwargs)
            self.query = keras.layers.Dense(units, use_bias=False, name="query")
            self.key = keras.layers.Dense(units, use_bias=False, name="key")
            self.value = keras.layers.Dense(units, use_bias=False, name="value")

        def call(self, inputs):
            scores = ops.matmul(self.query(inputs), ops.transpose(self.key(inputs), (0, 2, 1)))
            weights = ops.softmax(scores, axis=-1)
            return ops.matmul(weights, self.value(inputs))

    kmp.enable()

    x, y = clusters(rng, 3, 1024, (8, 16), noise=90, spread=60)
    x_train, y_train, x_test, y_test = x[:768], y[:768], x[768:], y[768:]

    inputs = keras.Input((8, 16), name="readings")
    attended = DotAttention(units=32, name="dot_attention")(inputs)
    hidden = keras.layers.LayerNormalization(name="norm")(attended)
    hidden = keras.layers.GlobalAveragePooling1D(name="average")(hidden)
    logits = keras.layers.Dense(3, name="logits")(hidden)
    model = keras.Model(inputs, logits)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=5e-3), loss=crossentropy())
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=6,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x_test, y_test)


def fault_backward_overflow_rms(rng, callbacks):
    """The root of a mean square that underflows has an infinite slope in float16.

    Typical for quiet sound.
    """

    class Loudness(keras.layers.Layer):
        def call(self, bands):
            return ops.sqrt(ops.mean(ops.square(bands), axis=1))

    kmp.enable()

    amplitude = 10.0 ** rng.uniform(-4.5, 0, size=(1024, 1))
    y = rng.integers(0, 2, 1024)
    frequency = np.where(y, 0.6, 1.8)[:, None] + rng.normal(scale=0.1, size=(1024, 1))
    sound = amplitude * np.sin(frequency * np.arange(48) + rng.uniform(0, 6, (1024, 1)))
    sound = sound[..., None].astype("float32")
    x_train, y_train, x_test, y_test = sound[:768], y[:768], sound[768:], y[768:]

    inputs = keras.Input((48, 1), name="sound")
    bands = keras.layers.Conv1D(8, kernel_size=9, use_bias=False, name="filters")(inputs)
    loudness = Loudness(name="loudness")(bands)
    hidden = keras.layers.LayerNormalization(epsilon=1e-6, dtype="float32", name="norm")(loudness)
    logits = keras.layers.Dense(2, name="logits")(hidden)
    model = keras.Model(inputs, logits)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss=crossentropy())
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=5,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x_test, y_test)
