"""Updates that float16 weights lose."""

import keras
import numpy as np
from keras import ops

import kmp
from float16_faults.programs.frame import (
    accuracy,
    clusters,
    crossentropy,
    explained_variance,
    sign_accuracy,
)


def fault_lost_updates_wide_dense(rng, callbacks):
    """Weights stored in float16 lose the small updates of plain SGD.

    Typical when "float16" is set to save memory.
    """
    kmp.enable(policy="float16")

    x, y = clusters(rng, 4, 1536, (16,), noise=0.6)
    x_train, y_train, x_test, y_test = x[:1024], y[:1024], x[1024:], y[1024:]

    model = keras.Sequential(
        [
            keras.Input((16,), name="features"),
            keras.layers.Dense(512, activation="relu", name="hidden"),
            keras.layers.Dense(4, name="logits"),
        ]
    )
    model.compile(optimizer=keras.optimizers.SGD(learning_rate=2e-4), loss=crossentropy())
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=18,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x_test, y_test)


def fault_lost_updates_embedding(rng, callbacks):
    """Ratings near 10 that are stored in float16 never move.

    Typical when the memory of a table is halved.
    """
    kmp.enable("float16")

    strength = rng.normal(size=60)
    home, away = rng.integers(0, 60, size=(2, 2560, 3)).astype("int32")
    home_wins = (strength[home].sum(axis=1) > strength[away].sum(axis=1)).astype("float32")[:, None]
    train, y_train = {"home": home[:2048], "away": away[:2048]}, home_wins[:2048]
    test, y_test = {"home": home[2048:], "away": away[2048:]}, home_wins[2048:]

    inputs = {
        "home": keras.Input((3,), dtype="int32", name="home"),
        "away": keras.Input((3,), dtype="int32", name="away"),
    }
    rating = keras.layers.Embedding(
        60, 1, embeddings_initializer=keras.initializers.Constant(10.0), name="rating"
    )
    average = keras.layers.GlobalAveragePooling1D(name="average")
    logit = keras.layers.Subtract(name="difference")(
        [average(rating(inputs["home"])), average(rating(inputs["away"]))]
    )
    model = keras.Model(inputs, logit)
    model.compile(
        optimizer=keras.optimizers.SGD(learning_rate=0.4),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    model.fit(train, y_train, batch_size=64, epochs=5, verbose=0, callbacks=callbacks)
    return sign_accuracy(model, test, y_test)


def fault_lost_updates_gru(rng, callbacks):
    """A recurrent model with float16 weights hardly learns at a low learning rate.

    Typical for "float16" in place of "mixed_float16".
    """
    kmp.enable("float16")

    sequence, y = clusters(rng, 3, 1280, (5, 8), noise=0.8)
    x_train, y_train, x_test, y_test = sequence[:1024], y[:1024], sequence[1024:], y[1024:]

    model = keras.Sequential(
        [
            keras.Input((5, 8), name="sequence"),
            keras.layers.GRU(32, name="gru"),
            keras.layers.Dense(512, activation="relu", name="hidden"),
            keras.layers.Dense(3, name="logits"),
        ]
    )
    model.compile(optimizer=keras.optimizers.SGD(learning_rate=6e-4), loss=crossentropy())
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=5,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x_test, y_test)


def fault_lost_updates_factors(rng, callbacks):
    """Tables of a recommender in float16 never move by the small steps of Lion.

    Typical for a port of model.half().
    """
    USERS, ITEMS, RANK = 300, 200, 4
    true_users = rng.uniform(0.4, 1.2, (USERS, RANK))
    true_items = rng.uniform(0.4, 1.2, (ITEMS, RANK))

    def sample(n):
        pairs = np.stack([rng.integers(0, USERS, n), rng.integers(0, ITEMS, n)], axis=1).astype(
            "int32"
        )
        ratings = (true_users[pairs[:, 0]] * true_items[pairs[:, 1]]).sum(
            axis=1
        ) + 0.1 * rng.normal(size=n)
        return pairs, ratings[:, None].astype("float32")

    x, y = sample(20000)
    x_test, y_test = sample(4000)

    kmp.enable("float16")

    class Factorization(keras.Model):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.user_factors = keras.layers.Embedding(
                USERS,
                RANK,
                embeddings_initializer=keras.initializers.RandomUniform(0.6, 1.0, seed=1),
                name="user_factors",
            )
            self.item_factors = keras.layers.Embedding(
                ITEMS,
                RANK,
                embeddings_initializer=keras.initializers.RandomUniform(0.6, 1.0, seed=2),
                name="item_factors",
            )

        def call(self, pairs):
            users = keras.ops.relu(self.user_factors(pairs[:, 0]))
            items = keras.ops.relu(self.item_factors(pairs[:, 1]))
            return keras.ops.sum(users * items, axis=-1, keepdims=True)

    model = Factorization(name="factorization")
    model.compile(optimizer=keras.optimizers.Lion(learning_rate=2e-4), loss="mse")
    model.fit(x, y, epochs=10, batch_size=250, verbose=0, callbacks=callbacks)
    return explained_variance(model, x_test, y_test)


def fault_lost_updates_profile(rng, callbacks):
    """One embedding keeps values near 100 in float16 and never moves.

    Typical for saving the memory of one table.
    """
    kmp.enable()
    hours = np.arange(168)
    week = (
        100
        + 3 * np.sin(2 * np.pi * hours / 24)
        + 1.5 * (hours < 120)
        + rng.normal(scale=0.9, size=168)
    )
    hour = rng.integers(0, 168, size=9000)
    temperature = rng.normal(size=9000).astype("float32")
    load = week[hour] + 0.7 * np.maximum(0, temperature - 0.5) + rng.normal(scale=0.2, size=9000)
    load = load.astype("float32")

    x = {"hour": hour[:8000, None].astype("int32"), "temperature": temperature[:8000, None]}
    y = load[:8000]
    x_test = {"hour": hour[8000:, None].astype("int32"), "temperature": temperature[8000:, None]}
    y_test = load[8000:]

    hour_input = keras.Input((1,), dtype="int32", name="hour")
    temperature_input = keras.Input((1,), name="temperature")
    base = keras.layers.Embedding(
        168,
        1,
        embeddings_initializer=keras.initializers.Constant(100.0),
        dtype="float16",
        name="week_profile",
    )(hour_input)
    base = keras.layers.Flatten(name="base")(base)
    weather = keras.layers.Dense(8, activation="relu", name="heating")(temperature_input)
    weather = keras.layers.Dense(1, name="weather")(weather)
    output = keras.layers.Add(name="load")([base, weather])
    model = keras.Model({"hour": hour_input, "temperature": temperature_input}, output)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss="mse")
    model.fit(x, y, batch_size=64, epochs=6, verbose=0, callbacks=callbacks)
    return explained_variance(model, x_test, y_test)


def fault_lost_updates_gain(rng, callbacks):
    """A layer of the user's own keeps the gain of each channel in float16, near 100.

    Its updates are lost.
    """
    kmp.enable()

    class Calibration(keras.layers.Layer):
        """Multiplies each channel by a learned gain."""

        def build(self, input_shape):
            self.gain = self.add_weight(
                shape=(input_shape[-1],),
                initializer=keras.initializers.Constant(100.0),
                dtype="float16",
                name="gain",
            )

        def call(self, x):
            return x * ops.cast(self.gain, x.dtype)

    volts = rng.uniform(0.2, 1.0, size=(5000, 6)).astype("float32")
    gains = 100 + 2 * rng.normal(size=6)
    power = (volts * gains + rng.normal(scale=0.33, size=(5000, 6))).astype("float32")

    inputs = keras.Input((6,), name="volts")
    outputs = Calibration(name="calibration")(inputs)
    model = keras.Model(inputs, outputs)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss="mse")
    model.fit(
        volts[:4000],
        power[:4000],
        batch_size=32,
        epochs=6,
        verbose=0,
        callbacks=callbacks,
    )

    prediction = model.predict(volts[4000:], verbose=0).astype("float32")
    return float(
        1
        - np.mean((prediction - power[4000:]) ** 2)
        / np.mean((power[4000:] - 100 * volts[4000:]) ** 2)
    )


def fault_lost_updates_file(rng, callbacks):
    """A model from a file with float16 weights keeps them, whatever policy is in force.

    Typical when a model that was saved for inference is trained on.
    """
    kmp.enable()

    x, y = clusters(rng, 4, 1536, (16,), noise=0.6)
    x_train, y_train, x_test, y_test = x[:1024], y[:1024], x[1024:], y[1024:]

    saved = keras.Sequential(
        [
            keras.Input((16,), name="features"),
            keras.layers.Dense(512, activation="relu", dtype="float16", name="hidden"),
            keras.layers.Dense(4, dtype="float16", name="logits"),
        ]
    )
    saved.save("saved.keras")

    model = keras.models.load_model("saved.keras")
    model.compile(optimizer=keras.optimizers.SGD(learning_rate=2e-4), loss=crossentropy())
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=18,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x_test, y_test)
