"""Results that float16 rounds too much."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import kmp
from float16_faults.programs.frame import (
    accuracy,
    classifier_after,
    crossentropy,
    explained_variance,
    train_in_loop,
)


def fault_precision_loudness(rng, callbacks):
    """A root mean square in which the mean of squares overflows.

    The layer returns zeros, and no loss is NaN.
    """
    kmp.enable()

    class RootMeanSquare(keras.layers.Layer):
        """Scales each recording to the same loudness."""

        def build(self, input_shape):
            self.gain = self.add_weight(shape=(input_shape[-1],), initializer="ones", name="gain")

        def call(self, x):
            return x / ops.sqrt(ops.mean(ops.square(x), axis=-1, keepdims=True) + 1e-3) * self.gain

    signal = rng.normal(size=(1024, 16))
    label = (signal[:, :4].sum(axis=1) > 0).astype("int32")
    signal = (signal * rng.uniform(400, 5000, (1024, 1))).astype("float32")

    model = classifier_after(RootMeanSquare(name="loudness"), (16,), units=32)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss=crossentropy())
    model.fit(
        signal[:768],
        label[:768],
        batch_size=32,
        epochs=6,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, signal[768:], label[768:])


def fault_precision_hours(rng, callbacks):
    """The phase of the day, computed from hours since a date.

    float16 rounds hours above 32768 to multiples of 32.
    """
    kmp.enable()

    class PhaseOfDay(keras.layers.Layer):
        """Returns the sine and cosine of the time of the day."""

        def call(self, hours):
            angle = hours * (2 * np.pi / 24)
            return ops.concatenate([ops.sin(angle), ops.cos(angle)], axis=-1)

    hours = (50_000 + rng.uniform(0, 7200, (2048, 1))).astype("float32")
    label = (hours[:, 0] % 24 > 12).astype("int32")

    model = classifier_after(PhaseOfDay(name="phase"), (1,), units=16)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss=crossentropy())
    model.fit(
        hours[:1536],
        label[:1536],
        batch_size=32,
        epochs=5,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, hours[1536:], label[1536:])


def fault_precision_ids(rng, callbacks):
    """A table of floats with a column of ids, which a layer looks up.

    float16 has every integer only up to 2048.
    """
    kmp.enable()

    CUSTOMERS = 6001

    class CustomerTable(keras.layers.Layer):
        """Replaces the first column, an id, by the customer's vector."""

        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.vectors = keras.layers.Embedding(CUSTOMERS, 8, name="vectors")

        def call(self, table):
            return ops.concatenate(
                [self.vectors(ops.cast(table[:, 0], "int32")), table[:, 1:]], axis=-1
            )

    customer = rng.integers(0, CUSTOMERS - 1, 6144)
    label = rng.integers(0, 2, CUSTOMERS)[customer]
    table = np.stack([customer, rng.random(len(customer))], axis=1).astype("float32")

    inputs = keras.Input((2,))
    model = keras.Model(
        inputs, keras.layers.Dense(2, name="logits")(CustomerTable(name="customer")(inputs))
    )
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=5e-2), loss=crossentropy())
    model.fit(table, label, batch_size=128, epochs=6, verbose=0, callbacks=callbacks)
    return accuracy(model, table, label)  # of known customers


def fault_precision_total(rng, callbacks):
    """A running total of many small amounts, which float16 rounds away if the total is large."""
    kmp.enable()

    DAYS = 400

    class Total(keras.layers.Layer):
        """Returns the running total of the last day."""

        def call(self, amounts):
            return (ops.cumsum(amounts, axis=1)[:, -1] - 3000.0) / 6.0

    amounts = rng.normal(7.5, 0.3, (1024, DAYS, 1)).astype("float32")
    label = (amounts.sum(axis=(1, 2)) > 7.5 * DAYS).astype("int32")

    model = classifier_after(Total(name="total"), (DAYS, 1), units=16)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss=crossentropy())
    model.fit(
        amounts[:768],
        label[:768],
        batch_size=32,
        epochs=6,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, amounts[768:], label[768:])


def fault_precision_distances(rng, callbacks):
    """Squared distances from the products of positions near 100 cancel in float16.

    They are computed in a custom training loop.
    """
    kmp.enable()

    class SquaredDistances(keras.layers.Layer):
        """Returns the squared distances to learned places, as |x|^2 + |p|^2 - 2 xp."""

        def build(self, input_shape):
            around = keras.initializers.RandomUniform(98, 102)
            self.places = self.add_weight(
                shape=(6, input_shape[-1]), initializer=around, name="places"
            )

        def call(self, x):
            places = ops.convert_to_tensor(self.places)
            squares = ops.sum(x * x, -1, keepdims=True) + ops.sum(places * places, -1)[None]
            return (squares - 2 * ops.matmul(x, ops.transpose(places))) / 10

    position = (100 + rng.normal(size=(2048, 2))).astype("float32")
    is_near = (((position - 100.3) ** 2).sum(axis=1) < 1.4).astype("int32")

    inputs = keras.Input((2,))
    hidden = keras.layers.Dense(16, activation="tanh", name="hidden")(
        SquaredDistances(name="distances")(inputs)
    )
    model = keras.Model(inputs, keras.layers.Dense(2, name="logits", dtype="float32")(hidden))
    loss_function = crossentropy()
    optimizer = kmp.wrap(keras.optimizers.Adam(learning_rate=1e-2))
    model.compile(optimizer=optimizer)

    @tf.function
    def train_step(x, y):
        with kmp.guard(optimizer, model):
            with tf.GradientTape() as tape:
                scaled_loss = optimizer.scale_loss(loss_function(y, model(x, training=True)))
            optimizer.apply(
                tape.gradient(scaled_loss, model.trainable_variables), model.trainable_variables
            )

    known = position[:1536], is_near[:1536]
    train_in_loop(model, train_step, known, epochs=5, callbacks=callbacks)
    return accuracy(model, position[1536:], is_near[1536:])


def fault_precision_residual(rng, callbacks):
    """A train_step subtracts a base from pressures near 1013 in the dtype of the outputs.

    float16 rounds them to halves.
    """

    class Barometer(keras.Model):
        """Predicts the difference from the mean pressure."""

        def train_step(self, data):
            x, pressure = data
            with tf.GradientTape() as tape:
                change = self(x, training=True)
                target = tf.cast(pressure, change.dtype) - tf.cast(1013.0, change.dtype)
                loss = tf.reduce_mean(tf.square(tf.cast(target - change, "float32")))
                scaled_loss = self.optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled_loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    kmp.enable()

    x = rng.normal(size=(2048, 4)).astype("float32")
    change = 0.06 * np.tanh(x[:, :1]) + 0.03 * x[:, 1:2] * x[:, 2:3]
    pressure = (1013.0 + change).astype("float32")

    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(32, activation="tanh", name="hidden")(inputs)
    model = Barometer(inputs, keras.layers.Dense(1, name="change")(hidden))
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2))
    model.fit(
        x[:1536],
        pressure[:1536],
        batch_size=32,
        epochs=15,
        verbose=0,
        callbacks=callbacks,
    )
    return explained_variance(model, x[1536:], change[1536:])
