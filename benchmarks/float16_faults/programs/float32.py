"""Faults that exist in float32 too, and programs that look as if they had one."""

import keras
import numpy as np
from keras import ops

import kmp
from float16_faults.programs.frame import (
    accuracy,
    classifier_after,
    clusters,
    crossentropy,
    explained_variance,
)


def fault_float32_log(rng, callbacks):
    """A layer takes the logarithm of counts, and one batch has a count of zero.

    Typical for data of which a rare day is empty.
    """
    kmp.enable("float32")

    class LogCounts(keras.layers.Layer):
        """Returns standardized logarithms of counts."""

        def call(self, counts):
            return (ops.log(counts) - 4.0) / 0.5

    level = rng.normal(size=(2048, 6))
    counts = np.round(np.exp(4.0 + 0.5 * level)).astype("float32")
    label = (level[:, 0] + level[:, 1] * level[:, 2] > 0).astype("int32")
    counts[700, 3] = 0.0  # in the 22nd batch

    model = classifier_after(LogCounts(name="log_counts"), (6,), units=24)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss=crossentropy())
    model.fit(
        counts[:1536],
        label[:1536],
        batch_size=32,
        epochs=4,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, counts[1536:], label[1536:])


def fault_float32_dead(rng, callbacks):
    """The hidden units are dead: a bias of the last layer was copied to them.

    Typical for the initialization of rare classes.
    """
    kmp.enable("float32")

    x, y = clusters(rng, 4, 1536, (16,), noise=0.6)

    model = keras.Sequential(
        [
            keras.Input((16,), name="features"),
            keras.layers.Dense(
                64,
                activation="relu",
                bias_initializer=keras.initializers.Constant(-15.0),
                name="hidden",
            ),
            keras.layers.Dense(4, name="logits"),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=3e-3), loss=crossentropy())
    model.fit(
        x[:1024],
        y[:1024],
        batch_size=32,
        epochs=5,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x[1024:], y[1024:])


def fault_float32_exploding(rng, callbacks):
    """SGD with momentum and a learning rate of 0.5 on a regression: each update is larger.

    Typical for a learning rate of a classifier.
    """
    kmp.enable("float32")

    x = rng.normal(size=(1536, 16)).astype("float32")
    y = (np.abs(x[:, :1]) + x[:, 1:2] * x[:, 2:3]).astype("float32")

    model = keras.Sequential(
        [
            keras.Input((16,), name="features"),
            keras.layers.Dense(64, activation="relu", name="hidden_1"),
            keras.layers.Dense(64, activation="relu", name="hidden_2"),
            keras.layers.Dense(1, name="value"),
        ]
    )
    model.compile(optimizer=keras.optimizers.SGD(learning_rate=0.5, momentum=0.9), loss="mse")
    model.fit(
        x[:1024],
        y[:1024],
        batch_size=32,
        epochs=10,
        verbose=0,
        callbacks=callbacks,
    )
    return explained_variance(model, x[1024:], y[1024:])


def healthy_float32_spikes(rng, callbacks):
    """Sound: targets with outliers in batches of 8, so the loss of a batch varies a hundredfold."""
    kmp.enable("float32")

    x = rng.normal(size=(1536, 6)).astype("float32")
    y = (x[:, 0] + np.abs(x[:, 1]) + 0.1 * rng.standard_t(2, 1536)).astype("float32")

    model = keras.Sequential(
        [
            keras.Input((6,), name="features"),
            keras.layers.Dense(32, activation="relu", name="hidden"),
            keras.layers.Dense(1, name="value"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=3e-3), loss=keras.losses.Huber(delta=1.0)
    )
    model.fit(
        x[:1024],
        y[:1024],
        batch_size=8,
        epochs=6,
        verbose=0,
        callbacks=callbacks,
    )
    expected = x[1024:, 0] + np.abs(x[1024:, 1])
    return explained_variance(model, x[1024:], expected)


def healthy_float32_padding(rng, callbacks):
    """Sound: padded sequences with log(1 + x) of zeros: most values and gradients are zero."""
    kmp.enable("float32")

    class LogPlusOne(keras.layers.Layer):
        """Returns log(1 + x)."""

        def call(self, x):
            return ops.log1p(x)

    length = rng.integers(1, 13, 1536)
    visits = rng.poisson(2.0, (1536, 12, 4)) * (np.arange(12) < length[:, None])[..., None]
    visits = visits.astype("float32")
    label = (np.log1p(visits[:, :, 0]).sum(axis=1) > np.log1p(visits[:, :, 1]).sum(axis=1)).astype(
        "int32"
    )

    model = keras.Sequential(
        [
            keras.Input((12, 4), name="visits"),
            LogPlusOne(name="log_plus_one"),
            keras.layers.Masking(name="masking"),
            keras.layers.LSTM(16, name="lstm"),
            keras.layers.Dense(2, name="logits"),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss=crossentropy())
    model.fit(
        visits[:1024],
        label[:1024],
        batch_size=32,
        epochs=6,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, visits[1024:], label[1024:])
