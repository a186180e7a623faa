"""Results that bfloat16 rounds too much, and float32 does not: it keeps 8 bits of a number."""

import keras
import numpy as np
from keras import ops

import kmp
from programs.frame import accuracy, classifier_after, crossentropy, explained_variance


def fault_bfloat16_average(rng):
    """A moving average that is computed in bfloat16 stops far from its value.

    Its variable is in float32, but Keras casts it in `call`. Typical for a normalization by hand.
    """
    kmp.enable("mixed_bfloat16")

    class Centering(keras.layers.Layer):
        """Subtracts the mean of the batch, and its moving average after the training."""

        def build(self, input_shape):
            self.mean = self.add_weight(
                shape=(input_shape[-1],),
                initializer="zeros",
                trainable=False,
                name="mean",
            )

        def call(self, x, training=False):
            if training:
                mean = ops.mean(x, axis=0)
                self.mean.assign(0.99 * self.mean + 0.01 * mean)
                return x - mean
            return x - self.mean

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
        callbacks=kmp.callbacks.defaults("run"),
    )
    return accuracy(model, x[1536:], label[1536:])


def fault_bfloat16_variance(rng):
    """A variance as a difference of E[x^2] and E[x]^2, which are equal in bfloat16.

    Typical for a layer that computes both sums in one pass.
    """
    kmp.enable("mixed_bfloat16")

    class Contrast(keras.layers.Layer):
        """Returns the standard deviation of each channel of a signal."""

        def call(self, signal):
            mean = ops.mean(signal, axis=1)
            variance = ops.mean(ops.square(signal), axis=1) - ops.square(mean)
            return ops.sqrt(ops.maximum(variance, 1e-4))

    deviation = rng.uniform(0.2, 1.0, (1536, 1, 4))
    signal = (20.0 + deviation * rng.normal(size=(1536, 128, 4))).astype("float32")
    label = (deviation[:, 0, 0] * deviation[:, 0, 1] > deviation[:, 0, 2] ** 2).astype("int32")

    model = classifier_after(Contrast(name="contrast"), (128, 4), units=32)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=2e-2), loss=crossentropy())
    model.fit(
        signal[:1024],
        label[:1024],
        batch_size=32,
        epochs=12,
        verbose=0,
        callbacks=kmp.callbacks.defaults("run"),
    )
    return accuracy(model, signal[1024:], label[1024:])


def fault_bfloat16_weekday(rng):
    """The day of the week, computed from a number of days.

    bfloat16 has every integer only up to 256. Typical for a column of dates in a table of floats.
    """
    kmp.enable("mixed_bfloat16")

    class Weekday(keras.layers.Layer):
        """Returns the day of the week as a one-hot vector."""

        def call(self, days):
            return ops.one_hot(ops.cast(ops.mod(days[:, 0], 7), "int32"), 7)

    days = rng.integers(0, 3000, (2048, 1)).astype("float32")
    sales = np.array([3.0, 1.0, 1.2, 1.5, 2.0, 4.0, 5.0])[days[:, 0].astype("int32") % 7]
    sales = (sales + 0.3 * rng.normal(size=2048)).astype("float32")

    inputs = keras.Input((1,))
    weekday = Weekday(name="weekday")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1, name="sales")(weekday))
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=3e-2), loss="mse")
    model.fit(
        days[:1536],
        sales[:1536],
        batch_size=32,
        epochs=10,
        verbose=0,
        callbacks=kmp.callbacks.defaults("run"),
    )
    return explained_variance(model, days[1536:], sales[1536:])


def fault_bfloat16_trip(rng):
    """The distance of a taxi trip from degrees of longitude and latitude.

    bfloat16 rounds them to 25 km. Typical for raw coordinates.
    """
    kmp.enable("mixed_bfloat16")

    class TripLength(keras.layers.Layer):
        """Returns kilometres east, north and in a straight line, in units of 10 km."""

        def call(self, trip):
            north = (trip[:, 2:3] - trip[:, 0:1]) * 11.1
            east = (trip[:, 3:4] - trip[:, 1:2]) * 11.1 * 0.76
            length = ops.sqrt(ops.square(north) + ops.square(east) + 1e-4)
            return ops.concatenate([east, north, length], axis=-1)

    start = np.array([40.75, -73.98]) + 0.03 * rng.normal(size=(2048, 2))
    end = np.array([40.75, -73.98]) + 0.05 * rng.normal(size=(2048, 2))
    north, east = ((end - start) * [111.0, 84.4]).T
    fare = 3.0 + 1.6 * np.hypot(north, east) + 0.3 * rng.normal(size=2048)
    trip = np.concatenate([start, end], axis=1).astype("float32")
    fare = fare.astype("float32")

    inputs = keras.Input((4,))
    hidden = TripLength(name="trip_length")(inputs)
    hidden = keras.layers.Dense(16, activation="relu", name="hidden")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(1, name="fare")(hidden))
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=2e-2), loss="mse")
    model.fit(
        trip[:1536],
        fare[:1536],
        batch_size=32,
        epochs=10,
        verbose=0,
        callbacks=kmp.callbacks.defaults("run"),
    )
    return explained_variance(model, trip[1536:], fare[1536:])
