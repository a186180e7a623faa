"""Results that bfloat16 rounds too much, and float32 does not: it keeps 8 bits of a number."""

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
    sign_accuracy,
)


def fault_bfloat16_average(rng, callbacks):
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
        callbacks=callbacks,
    )
    return accuracy(model, x[1536:], label[1536:])


def fault_bfloat16_variance(rng, callbacks):
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
        callbacks=callbacks,
    )
    return accuracy(model, signal[1024:], label[1024:])


def fault_bfloat16_weekday(rng, callbacks):
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
        callbacks=callbacks,
    )
    return explained_variance(model, days[1536:], sales[1536:])


def fault_bfloat16_trip(rng, callbacks):
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
        callbacks=callbacks,
    )
    return explained_variance(model, trip[1536:], fare[1536:])


def fault_bfloat16_counter(rng, callbacks):
    """A counter of steps in bfloat16 stays at 256, so a temperature stays high.

    Typical for an annealing whose variable has the dtype of the layer.
    """
    kmp.enable("mixed_bfloat16")

    class Codes(keras.layers.Layer):
        """Chooses one of several codes: softly in the training, ever more sharply."""

        def build(self, input_shape):
            self.steps = self.add_weight(
                shape=(),
                initializer="zeros",
                trainable=False,
                dtype=self.compute_dtype,
                name="steps",
            )

        def call(self, scores, training=False):
            if not training:
                return ops.one_hot(ops.argmax(scores, axis=-1), 16, dtype=self.compute_dtype)
            self.steps.assign_add(ops.ones_like(self.steps))
            temperature = ops.maximum(0.2, 6.0 * (1 - self.steps / 700.0))
            return ops.softmax(scores / temperature)

    centers = 2.0 * rng.normal(size=(12, 6))
    x = centers[rng.integers(0, 12, 2048)] + 0.3 * rng.normal(size=(2048, 6))
    x = x.astype("float32")

    model = keras.Sequential(
        [
            keras.Input((6,), name="x"),
            keras.layers.Dense(16, name="scores"),
            Codes(name="codes"),
            keras.layers.Dense(6, name="decoder"),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=2e-2), loss="mse")
    model.fit(x, x, batch_size=32, epochs=12, verbose=0, callbacks=callbacks)
    return explained_variance(model, x, x)


def fault_bfloat16_rotary(rng, callbacks):
    """Rotary positions of a long text, multiplied by frequencies in bfloat16.

    It rounds positions near 3000 to multiples of 16. Typical for attention by hand.
    """
    kmp.enable("mixed_bfloat16")

    class RotaryAttention(keras.layers.Layer):
        """Attention that knows how far apart two words are."""

        def __init__(self, units, **kwargs):
            super().__init__(**kwargs)
            self.query = keras.layers.Dense(units, name="query")
            self.key = keras.layers.Dense(units, name="key")
            self.value = keras.layers.Dense(units, name="value")
            self.frequency = (50.0 ** -np.linspace(0, 1, units // 2)).astype("float32")

        def call(self, x, position):
            angle = position[:, :, None] * ops.cast(self.frequency, self.compute_dtype)
            query, key = self.rotate(self.query(x), angle), self.rotate(self.key(x), angle)
            scores = ops.matmul(query, ops.transpose(key, (0, 2, 1)))
            return ops.matmul(ops.softmax(scores), self.value(x))

        def rotate(self, x, angle):
            a, b = ops.split(x, 2, axis=-1)
            sine, cosine = ops.sin(angle), ops.cos(angle)
            return ops.concatenate([a * cosine - b * sine, a * sine + b * cosine], axis=-1)

    words = rng.integers(0, 6, (1536, 24)).astype("int32")
    position = (rng.integers(2500, 3500, (1536, 1)) + np.arange(24)).astype("float32")
    earlier = np.roll(words, 2, axis=1)
    earlier[:, :2] = words[:, :2]

    inputs = keras.Input((24,), dtype="int32"), keras.Input((24,))
    hidden = keras.layers.Embedding(6, 16, name="embedding")(inputs[0])
    hidden = RotaryAttention(16, name="attention")(hidden, inputs[1])
    model = keras.Model(inputs, keras.layers.Dense(6, name="logits")(hidden))
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss=crossentropy())
    model.fit(
        (words[:1280], position[:1280]),
        earlier[:1280],
        batch_size=32,
        epochs=8,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, (words[1280:], position[1280:]), earlier[1280:])


def fault_bfloat16_likelihood(rng, callbacks):
    """Log-likelihoods of texts, as sums of the log-softmax of a large vocabulary.

    bfloat16 rounds sums near -500 to multiples of 2. Typical for the comparison of language models.
    """
    kmp.enable("mixed_bfloat16")

    class LogLikelihood(keras.layers.Layer):
        """Returns the log-likelihood of a text under a distribution of words for each class."""

        def build(self, input_shape):
            self.scores = self.add_weight(shape=(2, 5000), initializer="zeros", name="scores")

        def call(self, words):
            log_probability = ops.log_softmax(self.scores, axis=-1)
            return ops.transpose(ops.sum(ops.take(log_probability, words, axis=1), axis=-1))

    label = rng.integers(0, 2, 3072)
    words = rng.integers(0, 5000, (3072, 60))
    is_topic = rng.random((3072, 60)) < 0.15
    words = np.where(is_topic, rng.integers(0, 200, (3072, 60)) + 200 * label[:, None], words)
    words = words.astype("int32")

    model = keras.Sequential(
        [keras.Input((60,), dtype="int32", name="words"), LogLikelihood(name="likelihood")]
    )
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=3e-4), loss=crossentropy())
    model.fit(
        words[:2048],
        label[:2048],
        batch_size=32,
        epochs=5,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, words[2048:], label[2048:])


def fault_bfloat16_meter(rng, callbacks):
    """The use of the last week as the difference of two cumulative sums.

    bfloat16 rounds readings near 3000 to multiples of 16. Typical for meters and counters.
    """
    kmp.enable("mixed_bfloat16")

    class LastWeek(keras.layers.Layer):
        """Returns the mean use in the last week, and before it."""

        def call(self, daily):
            reading = ops.cumsum(daily, axis=1)
            week = (reading[:, -1] - reading[:, -8]) / 7
            before = reading[:, -8] / (daily.shape[1] - 7)
            return ops.stack([week, before], axis=-1)

    usual = rng.uniform(6.0, 10.0, (1536, 1))
    daily = usual * (1 + 0.04 * rng.normal(size=(1536, 365)))
    change = 0.12 * rng.normal(size=1536)
    daily[:, -7:] *= 1 + change[:, None]
    label = (change > 0).astype("int32")
    daily = daily.astype("float32")

    model = classifier_after(LastWeek(name="last_week"), (365,), units=16)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss=crossentropy())
    model.fit(
        daily[:1024],
        label[:1024],
        batch_size=32,
        epochs=12,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, daily[1024:], label[1024:])


def fault_bfloat16_physics(rng, callbacks):
    """A slope by finite differences: the outputs at two near places are equal in bfloat16.

    Typical for a network that solves a differential equation.
    """
    kmp.enable("mixed_bfloat16")

    class Residual(keras.layers.Layer):
        """Returns how far 1 + t * network(t) is from a solution of u' = cos(3 t) - u."""

        def __init__(self, network, **kwargs):
            super().__init__(**kwargs)
            self.network = network

        def solution(self, time):
            return 1 + time * self.network(time)

        def call(self, time):
            after, before = self.solution(time + 0.001), self.solution(time - 0.001)
            return (after - before) / 0.002 + self.solution(time) - ops.cos(3 * time)

    time = rng.uniform(0, 3, (2048, 1)).astype("float32")
    expected = 0.9 * np.exp(-time) + 0.1 * np.cos(3 * time) + 0.3 * np.sin(3 * time)

    network = keras.Sequential(
        [
            keras.layers.Dense(32, activation="tanh", name="hidden"),
            keras.layers.Dense(1, name="change"),
        ]
    )
    inputs = keras.Input((1,))
    model = keras.Model(inputs, Residual(network, name="residual")(inputs))
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=2e-2), loss="mse")
    model.fit(
        time,
        np.zeros_like(time),
        batch_size=32,
        epochs=12,
        verbose=0,
        callbacks=callbacks,
    )
    solution = 1 + time * network.predict(time, verbose=0).astype("float32")
    return float(1 - np.mean((solution - expected) ** 2) / np.var(expected))


def fault_bfloat16_noisy_or(rng, callbacks):
    """The clip of a probability to 1 - 1e-7 does nothing, because bfloat16 rounds that to 1.

    The logarithm of 0 follows. Typical for a loss by hand.
    """
    kmp.enable("mixed_bfloat16")

    class NoisyOr(keras.layers.Layer):
        """Returns the probability that any part of a picture has the feature."""

        def call(self, score):
            probability = ops.clip(ops.sigmoid(score), 1e-7, 1 - 1e-7)
            return 1 - ops.exp(ops.sum(ops.log(1 - probability), axis=1))

    parts = rng.normal(size=(1536, 10, 6))
    label = rng.integers(0, 2, 1536)
    rows = np.flatnonzero(label)
    parts[rows, rng.integers(0, 10, len(rows)), :3] += 3.0
    parts, label = parts.astype("float32"), label.astype("float32")[:, None]

    model = keras.Sequential(
        [
            keras.Input((10, 6), name="parts"),
            keras.layers.Dense(24, activation="relu", name="hidden"),
            keras.layers.Dense(1, name="score"),
            NoisyOr(name="any_part"),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=2e-2), loss="binary_crossentropy")
    model.fit(
        parts[:1024],
        label[:1024],
        batch_size=32,
        epochs=8,
        verbose=0,
        callbacks=callbacks,
    )
    probability = model.predict(parts[1024:], verbose=0).astype("float32")
    return float(np.mean((probability > 0.5) == label[1024:]))


def fault_bfloat16_neighbours(rng, callbacks):
    """Squared distances within a cloud of points round below zero before their root.

    Typical for a layer that expands |a - b|^2 for a matrix product.
    """
    kmp.enable("mixed_bfloat16")

    class Crowding(keras.layers.Layer):
        """Returns how many points are near each point of a cloud, on average."""

        def call(self, points):
            squares = ops.sum(ops.square(points), axis=-1)
            products = ops.matmul(points, ops.transpose(points, (0, 2, 1)))
            squared = squares[:, :, None] + squares[:, None, :] - 2 * products
            distance = ops.sqrt(squared + 1e-2)
            return ops.mean(ops.exp(-distance), axis=(1, 2))[:, None]

    radius = rng.uniform(0.5, 2.0, (1280, 1, 1))
    points = rng.uniform(-6, 6, (1280, 1, 3)) + radius * rng.normal(size=(1280, 16, 3))
    points = points.astype("float32")
    label = (radius[:, 0, 0] > 1.2).astype("int32")

    model = classifier_after(Crowding(name="crowding"), (16, 3), units=16)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=2e-2), loss=crossentropy())
    model.fit(
        points[:1024],
        label[:1024],
        batch_size=32,
        epochs=8,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, points[1024:], label[1024:])


def fault_bfloat16_survival(rng, callbacks):
    """One minus a small hazard is 1 in bfloat16, so nobody ever leaves.

    Typical for survival analysis in discrete time.
    """
    kmp.enable("mixed_bfloat16")

    class LeavesWithinYear(keras.layers.Layer):
        """Returns the probability of an event in a year, from the hazard of a day."""

        def call(self, score):
            hazard = 0.004 * ops.sigmoid(score)
            return 1 - ops.power(1 - hazard, 365.0)

    customer = rng.normal(size=(3072, 6)).astype("float32")
    rate = 0.25 * np.exp(0.7 * customer[:, 0] + 0.4 * customer[:, 1] * customer[:, 2])
    expected = 1 - np.exp(-rate)
    label = (rng.random(3072) < expected).astype("float32")[:, None]

    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(24, activation="relu", name="hidden")(inputs)
    score = keras.layers.Dense(1, name="score")(hidden)
    model = keras.Model(inputs, LeavesWithinYear(name="within_year")(score))
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss="binary_crossentropy")
    model.fit(
        customer[:2048],
        label[:2048],
        batch_size=32,
        epochs=8,
        verbose=0,
        callbacks=callbacks,
    )
    return explained_variance(model, customer[2048:], expected[2048:])


def fault_bfloat16_simulation(rng, callbacks):
    """A simulation in small steps, each of which bfloat16 rounds away.

    Typical for the explicit Euler method, and for neural differential equations.
    """
    kmp.enable("mixed_bfloat16")

    class Cooling(keras.layers.Layer):
        """Returns the temperature of a tank after half a day, in steps of 15 minutes."""

        def call(self, state, score):
            inside, outside = state[:, :1], state[:, 1:]
            loss = 0.01 * ops.sigmoid(score)
            for _ in range(48):
                inside = inside + loss * (outside - inside)
            return inside

    state = np.stack([rng.uniform(60, 90, 1536), rng.uniform(-5, 20, 1536)], axis=1)
    tank = rng.normal(size=(1536, 4))
    loss = 0.003 * np.exp(0.5 * tank[:, 0] - 0.4 * np.abs(tank[:, 1]))
    after = state[:, 1] + (state[:, 0] - state[:, 1]) * (1 - loss) ** 48
    after = (after + 0.2 * rng.normal(size=1536)).astype("float32")
    x = [state.astype("float32"), tank.astype("float32")]

    inputs = [keras.Input((2,), name="state"), keras.Input((4,), name="tank")]
    hidden = keras.layers.Dense(32, activation="relu", name="hidden")(inputs[1])
    score = keras.layers.Dense(1, name="score")(hidden)
    model = keras.Model(inputs, Cooling(name="cooling")(inputs[0], score))
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss="mse")
    model.fit(x, after, batch_size=32, epochs=10, verbose=0, callbacks=callbacks)
    return explained_variance(model, x, after)


def fault_bfloat16_weights(rng, callbacks):
    """Weights stored in bfloat16 lose the small updates of SGD.

    Typical for "bfloat16" in place of "mixed_bfloat16", to save memory.
    """
    kmp.enable("mixed_bfloat16")
    keras.config.set_dtype_policy("bfloat16")

    x, y = clusters(rng, 4, 1536, (16,), noise=0.6)

    model = keras.Sequential(
        [
            keras.Input((16,), name="features"),
            keras.layers.Dense(256, activation="relu", name="hidden"),
            keras.layers.Dense(4, name="logits"),
        ]
    )
    model.compile(optimizer=keras.optimizers.SGD(learning_rate=8e-4), loss=crossentropy())
    model.fit(
        x[:1024],
        y[:1024],
        batch_size=32,
        epochs=18,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x[1024:], y[1024:])


def fault_bfloat16_ratings(rng, callbacks):
    """Ratings near 1500 in a bfloat16 table never move: its steps are 8 there.

    Typical for saving the memory of one large table.
    """
    kmp.enable("mixed_bfloat16")

    strength = rng.normal(size=80)
    home, away = rng.integers(0, 80, (2, 4096)).astype("int32")
    home_wins = (strength[home] > strength[away]).astype("float32")[:, None]

    inputs = [keras.Input((), dtype="int32", name=name) for name in ("home", "away")]
    rating = keras.layers.Embedding(
        80,
        1,
        embeddings_initializer=keras.initializers.Constant(1500.0),
        dtype="bfloat16",
        name="rating",
    )
    ahead = keras.layers.Subtract(dtype="float32", name="ahead")([rating(each) for each in inputs])
    model = keras.Model(inputs, ahead)
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=0.05),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    model.fit(
        [home[:3072], away[:3072]],
        home_wins[:3072],
        batch_size=32,
        epochs=5,
        verbose=0,
        callbacks=callbacks,
    )
    return sign_accuracy(model, [home[3072:], away[3072:]], home_wins[3072:])


def fault_bfloat16_ids(rng, callbacks):
    """A table of floats with a column of ids, which a layer looks up.

    bfloat16 has every integer only up to 256. Typical for a data frame as the only input.
    """
    kmp.enable("mixed_bfloat16")

    class StationTable(keras.layers.Layer):
        """Replaces the first column, an id, by the station's vector."""

        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.vectors = keras.layers.Embedding(1001, 8, name="vectors")

        def call(self, table):
            station = ops.cast(table[:, 0], "int32")
            return ops.concatenate([self.vectors(station), table[:, 1:]], axis=-1)

    station = rng.integers(0, 1000, 4096)
    label = rng.integers(0, 2, 1000)[station]
    table = np.stack([station, rng.random(4096)], axis=1).astype("float32")

    model = classifier_after(StationTable(name="station"), (2,), units=16)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=2e-2), loss=crossentropy())
    model.fit(table, label, batch_size=64, epochs=8, verbose=0, callbacks=callbacks)
    return accuracy(model, table, label)  # of known stations
