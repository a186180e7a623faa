"""Losses that exceed float16."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import kmp
from float16_faults.programs.frame import accuracy, crossentropy, explained_variance, train_in_loop


def fault_loss_overflow_activity(rng, callbacks):
    """An activity penalty sums squares in float16 beyond its range.

    Typical in a sparsity layer by hand.
    """

    class ActivityPenalty(keras.layers.Layer):
        def __init__(self, rate, **kwargs):
            super().__init__(**kwargs)
            self.rate = rate

        def call(self, inputs):
            self.add_loss(self.rate * ops.sum(ops.square(inputs)))
            return inputs

    kmp.enable()

    weights = rng.normal(size=(12, 4))
    x = rng.normal(scale=3.0, size=(1280, 12)).astype("float32")
    y = (x @ weights).argmax(axis=1)
    x_train, y_train, x_test, y_test = x[:1024], y[:1024], x[1024:], y[1024:]

    inputs = keras.Input((12,), name="features")
    hidden = keras.layers.Dense(
        512, activation="relu", kernel_initializer="he_normal", name="hidden"
    )(inputs)
    hidden = ActivityPenalty(rate=1e-7, name="activity_penalty")(hidden)
    logits = keras.layers.Dense(4, name="logits")(hidden)
    model = keras.Model(inputs, logits)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-3), loss=crossentropy())
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=8,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x_test, y_test)


def fault_loss_overflow_compute_loss(rng, callbacks):
    """A compute_loss adds squares over time and sensors in the model's float16.

    Typical for a model that computes its own loss.
    """

    class Forecaster(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            error = ops.cast(y, y_pred.dtype) - y_pred
            return ops.sum(ops.square(error)) / 1000

    kmp.enable()

    phase, level = rng.uniform(0, 6, (1024, 1, 8)), rng.normal(scale=5.0, size=(1024, 1, 8))
    series = 5 * np.sin(0.4 * np.arange(36)[:, None] + phase) + level
    series = (series + rng.normal(scale=0.2, size=series.shape)).astype("float32")
    past, future = series[:, :12], series[:, 12:]

    inputs = keras.Input((12, 8), name="past")
    hidden = keras.layers.Flatten(name="flatten")(inputs)
    hidden = keras.layers.Dense(96, activation="relu", name="hidden")(hidden)
    hidden = keras.layers.Dense(24 * 8, name="forecast")(hidden)
    outputs = keras.layers.Reshape((24, 8), name="future")(hidden)
    model = Forecaster(inputs, outputs)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=5e-3))
    model.fit(past, future, batch_size=32, epochs=7, verbose=0, callbacks=callbacks)
    return explained_variance(model, past, future)


def fault_loss_overflow_autoencoder(rng, callbacks):
    """A layer adds up squared pixel errors of 0 to 255 in float16.

    Typical for a layer that holds the loss.
    """

    class ReconstructionLoss(keras.layers.Layer):
        def call(self, image, decoded):
            squares = ops.square(image - decoded)
            self.add_loss(ops.mean(ops.sum(squares, axis=-1)) * 1e-4)
            return decoded

    kmp.enable()

    codes = rng.normal(size=(1024, 4))
    images = (255 / (1 + np.exp(-codes @ rng.normal(size=(4, 64))))).astype("float32")

    inputs = keras.Input((64,), name="image")
    hidden = keras.layers.Rescaling(scale=1 / 255, name="rescaling")(inputs)
    hidden = keras.layers.Dense(48, activation="relu", name="encoder")(hidden)
    code = keras.layers.Dense(6, name="code")(hidden)
    hidden = keras.layers.Dense(48, activation="relu", name="decoder")(code)
    hidden = keras.layers.Dense(64, activation="sigmoid", name="pixels")(hidden)
    decoded = keras.layers.Rescaling(scale=255.0, name="decoded")(hidden)
    outputs = ReconstructionLoss(name="reconstruction_loss")(inputs, decoded)
    model = keras.Model(inputs, outputs)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=8e-3))
    model.fit(images, batch_size=32, epochs=6, verbose=0, callbacks=callbacks)
    return explained_variance(model, images, images)


def fault_loss_overflow_prices(rng, callbacks):
    """A custom loop squares errors of raw prices in the dtype of the prediction.

    Typical for a loop that was written for float32.
    """
    kmp.enable()

    x = rng.normal(size=(768, 8)).astype("float32")
    factors = 0.6 * x[:, 0] + 0.5 * np.tanh(2 * x[:, 1]) + 0.4 * np.abs(x[:, 2])
    price = (30000 + 6000 * factors[:, None] + rng.normal(scale=200, size=(768, 1))).astype(
        "float32"
    )

    model = keras.Sequential(
        [
            keras.Input((8,), name="house"),
            keras.layers.Dense(32, activation="relu", name="hidden_1"),
            keras.layers.Dense(32, activation="relu", name="hidden_2"),
            keras.layers.Dense(1, name="relative_price"),
            keras.layers.Lambda(lambda relative: 6000.0 * relative + 30000.0, name="price"),
        ]
    )
    optimizer = kmp.wrap(keras.optimizers.Adam(learning_rate=8e-3))
    model.compile(optimizer=optimizer)

    @tf.function
    def train_step(house, target):
        with kmp.guard(optimizer, model):
            with tf.GradientTape() as tape:
                prediction = model(house, training=True)
                error = tf.cast(target, prediction.dtype) - prediction
                loss = tf.reduce_mean(tf.square(error))
                scaled_loss = optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled_loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)

    train_in_loop(model, train_step, [x, price], epochs=10, callbacks=callbacks)
    return explained_variance(model, x, price)


def fault_loss_overflow_sparsity(rng, callbacks):
    """An L1 penalty is summed over the batch in float16 before it is scaled down.

    Typical for sparse autoencoders.
    """
    rng = np.random.default_rng(3)
    WIDTH, ATOMS = 48, 96
    dictionary = rng.normal(size=(ATOMS, WIDTH)) / np.sqrt(WIDTH)

    def activations(n):
        codes = rng.gamma(2.0, 1.5, (n, ATOMS)) * (rng.random((n, ATOMS)) < 0.06)
        return (codes @ dictionary + 0.02 * rng.normal(size=(n, WIDTH))).astype("float32")

    x = activations(4096)
    y = x
    x_test = activations(512)

    kmp.enable()

    class L1Penalty(keras.layers.Layer):
        def __init__(self, coefficient, **kwargs):
            super().__init__(**kwargs)
            self.coefficient = coefficient

        def call(self, codes):
            self.add_loss(self.coefficient * keras.ops.sum(keras.ops.abs(codes)))
            return codes

    model = keras.Sequential(
        [
            keras.Input((WIDTH,), name="activations"),
            keras.layers.Dense(1024, activation="relu", name="encoder"),
            L1Penalty(1e-8, name="sparsity"),
            keras.layers.Dense(WIDTH, name="decoder"),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=3e-3), loss="mse")
    model.fit(x, y, epochs=13, batch_size=512, verbose=0, callbacks=callbacks)
    return explained_variance(model, x_test, x_test)
