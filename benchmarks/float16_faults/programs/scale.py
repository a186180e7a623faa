"""Loss scales that are too small or too large."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import kmp
from float16_faults.programs.frame import (
    accuracy,
    crossentropy,
    explained_variance,
    line_classifier,
    lines,
    sign_accuracy,
)


def fault_scale_too_small_autoencoder(rng, callbacks):
    """A loss scale of 1, which is none, flushes the gradients of signals below a millivolt.

    Typical for recordings that are left in volts.
    """
    kmp.enable(loss_scale=1.0)

    phase, speed = rng.uniform(0, 6, (1024, 1)), rng.uniform(0.1, 0.3, (1024, 1))
    volts = (5e-4 * np.sin(speed * np.arange(64) + phase)).astype("float32")

    model = keras.Sequential(
        [
            keras.Input((64,), name="volts"),
            keras.layers.Dense(48, activation="relu", use_bias=False, name="encoder"),
            keras.layers.Dense(8, use_bias=False, name="code"),
            keras.layers.Dense(48, activation="relu", use_bias=False, name="decoder"),
            keras.layers.Dense(64, use_bias=False, name="reconstruction"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=6e-3, epsilon=1e-12),
        loss=keras.losses.MeanSquaredError(),
    )
    model.fit(volts, volts, batch_size=32, epochs=6, verbose=0, callbacks=callbacks)
    return explained_variance(model, volts, volts)


def fault_scale_too_small_lstm(rng, callbacks):
    """A loss scale of 2^-10 flushes gradients whose sample weights add up to one.

    Typical for the scale of a model whose loss was a sum.
    """
    kmp.enable(loss_scale=2.0**-10)

    steps = rng.choice([-1.0, 1.0], size=(1024, 12, 1), p=[0.5, 0.5])
    x = np.concatenate([steps, rng.normal(size=(1024, 12, 1))], axis=-1).astype("float32")
    y = (steps.sum(axis=(1, 2)) > 0).astype("float32")[:, None]
    weight = rng.uniform(0.5, 1.5, 1024)
    weight = (weight / weight.sum()).astype("float32")

    model = keras.Sequential(
        [
            keras.Input((12, 2), name="walk"),
            keras.layers.LSTM(16, name="lstm"),
            keras.layers.Dense(16, activation="relu", name="hidden"),
            keras.layers.Dense(1, name="is_up"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=5e-3, epsilon=1e-12),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    model.fit(
        x,
        y,
        sample_weight=weight,
        batch_size=32,
        epochs=5,
        verbose=0,
        callbacks=callbacks,
    )
    return sign_accuracy(model, x, y)


def fault_scale_too_small_dose_map(rng, callbacks):
    """A loss scale that starts and ends at 2^-14 flushes a mean over many pixels.

    Typical for settings that were found by trial.
    """
    kmp.enable(initial_scale=2.0**-14, max_scale=2.0**-14)

    def smooth(a):
        return (
            a + np.roll(a, 1, 1) + np.roll(a, -1, 1) + np.roll(a, 1, 2) + np.roll(a, -1, 2)
        ) / 5**0.5

    tissue = smooth(rng.normal(size=(320, 16, 16)))
    beam = smooth(rng.normal(size=(320, 16, 16)))
    images = np.stack([tissue, beam], axis=-1).astype("float32")
    dose = (np.maximum(beam, 0) + 0.7 * np.abs(tissue) - 0.5 * np.roll(tissue, 1, 1))[
        ..., None
    ].astype("float32")
    dose = (dose - dose.mean()) / dose.std()
    x, y = images[:256], dose[:256]
    x_test, y_test = images[256:], dose[256:]

    scan = keras.Input((16, 16, 2), name="scan")
    h = keras.layers.Conv2D(8, 3, padding="same", activation="relu", name="encode")(scan)
    h = keras.layers.Conv2D(8, 3, padding="same", activation="relu", name="mix")(h)
    skip = keras.layers.Concatenate(name="skip")([h, scan])
    out = keras.layers.Conv2D(1, 1, name="dose")(skip)
    model = keras.Model(scan, out)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=6e-3), loss="mae")
    model.fit(x, y, batch_size=16, epochs=8, verbose=0, callbacks=callbacks)
    return explained_variance(model, x_test, y_test)


def fault_scale_growth_of_wrap(rng, callbacks):
    """The loss scale of a custom loop grows by 2^12 after each step.

    Typical when the largest scale is sought.
    """
    keras.utils.set_random_seed(29)
    kmp.enable()

    peaks = np.random.uniform(5, 91, (6, 3))

    def spectra(n):
        mineral = np.random.randint(0, 6, n)
        shift = np.arange(96)[None, None]
        line = np.exp(
            -(
                ((shift - peaks[mineral][..., None] - np.random.normal(0, 1.5, (n, 1, 1))) / 2.5)
                ** 2
            )
        ).sum(1)
        return (line + 0.6 * np.random.normal(size=line.shape))[..., None].astype(
            "float32"
        ), mineral.astype("int32")

    model = keras.Sequential(
        [
            keras.Input((96, 1), name="raman_shift"),
            layers.Conv1D(16, 9, strides=2, activation="relu", name="lines"),
            layers.Conv1D(16, 9, strides=2, activation="relu", name="bands"),
            layers.Flatten(name="fingerprint"),
            layers.Dense(6, dtype="float32", name="mineral"),
        ]
    )
    optimizer = kmp.wrap(keras.optimizers.RMSprop(3e-4), growth_interval=1, growth_factor=2.0**12)
    model.compile(optimizer=optimizer)
    entropy = crossentropy()

    @tf.function
    def step(x, y):
        with kmp.guard(optimizer, model):
            with tf.GradientTape() as tape:
                scaled = optimizer.scale_loss(entropy(y, model(x, training=True)))
            optimizer.apply(
                tape.gradient(scaled, model.trainable_variables), model.trainable_variables
            )

    x, mineral = spectra(3200)
    x_test, mineral_test = spectra(600)
    callbacks = keras.callbacks.CallbackList(callbacks, model=model)
    callbacks.on_train_begin()
    for epoch in range(8):
        callbacks.on_epoch_begin(epoch)
        order = np.random.permutation(len(x)).reshape(-1, 64)
        for index, rows in enumerate(order):
            callbacks.on_train_batch_begin(index)
            step(tf.constant(x[rows]), tf.constant(mineral[rows]))
            callbacks.on_train_batch_end(index)
        callbacks.on_epoch_end(epoch)
    callbacks.on_train_end()
    return accuracy(model, x_test, mineral_test)


def fault_scale_too_large_conv(rng, callbacks):
    """A fixed loss scale of 2^24 overflows in every step.

    Typical for the belief that larger is safer.
    """
    kmp.enable(loss_scale=2.0**24)

    images, is_vertical = lines(rng)

    model = line_classifier(kmp.layers.BatchNormalization(momentum=0.9, name="norm"))
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss=crossentropy())
    model.fit(
        images[:768],
        is_vertical[:768],
        batch_size=32,
        epochs=5,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, images[768:], is_vertical[768:])


def fault_scale_too_large_regression(rng, callbacks):
    """A fixed loss scale of 2^17 skips most steps of a regression.

    Typical for a scale that suited a classifier.
    """
    kmp.enable(loss_scale=131072.0)

    x = rng.normal(size=(1280, 10)).astype("float32")
    y = 4 * np.sin(x[:, 0]) + 3 * x[:, 1] * x[:, 2] + 2 * x[:, 3]
    y = (y + rng.normal(scale=0.1, size=1280))[:, None].astype("float32")
    x_train, y_train, x_test, y_test = x[:1024], y[:1024], x[1024:], y[1024:]

    model = keras.Sequential(
        [
            keras.Input((10,), name="features"),
            keras.layers.Dense(64, activation="tanh", name="hidden_1"),
            keras.layers.Dense(64, activation="tanh", name="hidden_2"),
            keras.layers.Dense(1, dtype="float32", name="response"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss=keras.losses.MeanSquaredError()
    )
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=10,
        verbose=0,
        callbacks=callbacks,
    )
    return explained_variance(model, x_test, y_test)


def fault_scale_minimum(rng, callbacks):
    """A minimum loss scale of 2^12 is too large for a loss in raw prices.

    Typical for a bound of a classifier.
    """
    kmp.enable(min_scale=4096.0)

    x = rng.normal(size=(1280, 10)).astype("float32")
    price = 500 + 300 * x[:, 0] + 150 * x[:, 1] * x[:, 2]
    y = (price + rng.normal(scale=10.0, size=1280))[:, None].astype("float32")

    model = keras.Sequential(
        [
            keras.Input((10,), name="features"),
            keras.layers.Dense(64, activation="tanh", name="hidden_1"),
            keras.layers.Dense(64, activation="relu", name="hidden_2"),
            keras.layers.Dense(1, dtype="float32", name="price"),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.02), loss="mse")
    model.fit(
        x[:1024],
        y[:1024],
        batch_size=32,
        epochs=30,
        verbose=0,
        callbacks=callbacks,
    )
    return explained_variance(model, x[1024:], y[1024:])
