"""Targets and data that are wrong in every precision."""

import keras
import numpy as np

import kmp
from float16_faults.programs.frame import accuracy, census, crossentropy, quadrants, sign_accuracy


def fault_targets_weighted(rng, callbacks):
    """Missing labels are NaN with a sample weight of 0, and 0 times NaN is NaN.

    Typical for a port from pandas.
    """
    kmp.enable()

    voice = rng.normal(size=(3000, 12)).astype("float32")
    valence = np.tanh(voice[:, 0] + voice[:, 1]) + 0.1 * rng.normal(size=3000)
    arousal = np.tanh(voice[:, 2] - voice[:, 3]) + 0.3 * voice[:, 4] + 0.1 * rng.normal(size=3000)
    valence, arousal = valence.astype("float32")[:, None], arousal.astype("float32")[:, None]
    rated = rng.random(2500) > 0.2
    arousal_train = arousal[:2500].copy()
    arousal_train[~rated] = np.nan
    x, y = voice[:2500], {"valence": valence[:2500], "arousal": arousal_train}
    weights = {"valence": np.ones(2500, "float32"), "arousal": rated.astype("float32")}
    x_test = voice[2500:]

    inputs = keras.Input((12,), name="voice")
    h = keras.layers.Dense(48, activation="relu", name="shared")(inputs)
    h = keras.layers.LayerNormalization(name="norm")(h)
    a = keras.layers.Dense(16, activation="relu", name="valence_tower")(h)
    a = keras.layers.Dense(1, dtype="float32", name="valence")(a)
    b = keras.layers.Dense(16, activation="relu", name="arousal_tower")(h)
    b = keras.layers.Dense(1, dtype="float32", name="arousal")(b)
    model = keras.Model(inputs, {"valence": a, "arousal": b})
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=6e-3),
        loss={"valence": "mse", "arousal": "mse"},
    )
    model.fit(
        x,
        y,
        sample_weight=weights,
        batch_size=50,
        epochs=4,
        verbose=0,
        callbacks=callbacks,
    )

    prediction = model.predict(x_test, verbose=0)
    r2_valence = 1 - np.mean((valence[2500:] - prediction["valence"]) ** 2) / np.var(valence[2500:])
    r2_arousal = 1 - np.mean((arousal[2500:] - prediction["arousal"]) ** 2) / np.var(arousal[2500:])
    return float(min(r2_valence, r2_arousal))


def fault_targets_binary(rng, callbacks):
    """Masks are coded 1 and 2 while binary cross-entropy takes 0 and 1.

    Typical for masks of an annotation tool.
    """
    rng = np.random.default_rng(4)
    SIZE = 16

    def photos(n):
        rows, columns = np.mgrid[0:SIZE, 0:SIZE]
        images = 0.25 * rng.normal(size=(n, SIZE, SIZE, 3))
        masks = np.full((n, SIZE, SIZE, 1), 2, "float32")
        for i in range(n):
            for _ in range(2):
                cy, cx = rng.uniform(4, SIZE - 4, 2)
                inside = np.hypot(rows - cy, columns - cx) < rng.uniform(3, 5)
                masks[i, inside, 0] = 1
            images[i] += 0.5 * (masks[i] == 1) * rng.uniform(0.5, 1.0, 3)
        return images.astype("float32"), masks

    x, y = photos(320)
    x_test, y_test = photos(96)

    kmp.enable()
    inputs = keras.Input((SIZE, SIZE, 3), name="photo")
    down = keras.layers.Conv2D(8, 3, padding="same", activation="relu", name="down")(inputs)
    bottom = keras.layers.MaxPooling2D(2, name="pool")(down)
    bottom = keras.layers.Conv2D(16, 3, padding="same", activation="relu", name="bottom")(bottom)
    up = keras.layers.UpSampling2D(2, name="up")(bottom)
    merged = keras.layers.Concatenate(name="skip")([down, up])
    merged = keras.layers.Conv2D(8, 3, padding="same", activation="relu", name="merge")(merged)
    outputs = keras.layers.Conv2D(1, 1, activation="sigmoid", dtype="float32", name="mask")(merged)
    model = keras.Model(inputs, outputs, name="unet")
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=3e-3), loss="binary_crossentropy")
    model.fit(x, y, epochs=8, batch_size=32, verbose=0, callbacks=callbacks)

    animal = model.predict(x_test, verbose=0) < 0.5
    overlap = np.sum(animal & (y_test == 1)) / np.sum(animal | (y_test == 1))
    return float(overlap)


def fault_targets_unknown(rng, callbacks):
    """Texts without a label have the label -1.

    Typical for a data set that is labelled only in part.
    """
    kmp.enable()

    topics = rng.integers(0, 4, 1280)
    is_topical = rng.random((1280, 12)) < 0.5
    words = np.where(is_topical, 25 * topics[:, None], 0) + rng.integers(0, 25, (1280, 12))
    words = words.astype("int32")
    labels = topics.copy()
    labels[rng.choice(1024, size=128, replace=False)] = -1
    x_train, y_train, x_test, y_test = words[:1024], labels[:1024], words[1024:], topics[1024:]

    model = keras.Sequential(
        [
            keras.Input((12,), dtype="int32", name="words"),
            keras.layers.Embedding(100, 16, name="embedding"),
            keras.layers.GlobalAveragePooling1D(name="average"),
            keras.layers.Dense(16, activation="relu", name="hidden"),
            keras.layers.Dense(4, name="topic"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss=crossentropy(), jit_compile=True
    )
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=5,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x_test, y_test)


def fault_targets_one_based(rng, callbacks):
    """Labels count from 1 while the classes count from 0.

    Typical for labels exported from MATLAB or R.
    """
    kmp.enable()

    images, quadrant = quadrants(rng, 0.8)
    labels = quadrant + 1
    x_train, y_train, x_test, y_test = images[:768], labels[:768], images[768:], labels[768:]

    model = keras.Sequential(
        [
            keras.Input((8, 8, 1), name="image"),
            keras.layers.Conv2D(8, kernel_size=3, strides=2, name="conv"),
            kmp.layers.BatchNormalization(momentum=0.9, name="norm"),
            keras.layers.ReLU(name="relu"),
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(4, name="quadrant"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=5e-3), loss=crossentropy(), jit_compile=True
    )
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=5,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x_test, y_test)


def fault_targets_missing(rng, callbacks):
    """Some targets of one output are NaN.

    Typical for measurements of which a sensor misses a part.
    """
    kmp.enable()

    days = rng.normal(size=(1280, 8, 3)).astype("float32")
    trend = days[:, :, 0].mean(axis=1) * 2
    temperature = (trend + np.tanh(days[:, -1, 1]))[:, None].astype("float32")
    humidity = (days[:, :, 2].mean(axis=1) * 2 - trend)[:, None].astype("float32")
    is_missing = rng.random(1024) < 0.15
    measured = np.where(is_missing[:, None], np.nan, humidity[:1024]).astype("float32")

    inputs = keras.Input((8, 3), name="days")
    state = keras.layers.GRU(16, name="gru")(inputs)
    first = keras.layers.Dense(16, activation="relu", name="temperature_hidden")(state)
    second = keras.layers.Dense(16, activation="relu", name="humidity_hidden")(state)
    outputs = {
        "temperature": keras.layers.Dense(1, dtype="float32", name="temperature")(first),
        "humidity": keras.layers.Dense(1, dtype="float32", name="humidity")(second),
    }
    model = keras.Model(inputs, outputs)
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=1e-2),
        loss={
            "temperature": keras.losses.MeanSquaredError(),
            "humidity": keras.losses.MeanSquaredError(),
        },
    )
    targets = {"temperature": temperature[:1024], "humidity": measured}
    model.fit(
        days[:1024],
        targets,
        batch_size=32,
        epochs=4,
        verbose=0,
        callbacks=callbacks,
    )

    found = model.predict(days[1024:], verbose=0)
    errors = [found["temperature"] - temperature[1024:], found["humidity"] - humidity[1024:]]
    return -float(np.mean(np.square(errors)))


def fault_data_missing(rng, callbacks):
    """Some rows of the training data hold NaN, typical for a table with empty cells."""
    kmp.enable()

    measured = rng.normal(size=(1280, 14)).astype("float32")
    is_fault = (measured[:, :4].sum(axis=1) > measured[:, 4:8].sum(axis=1)).astype("int32")
    x_train, y_train, x_test, y_test = (
        measured[:1024].copy(),
        is_fault[:1024],
        measured[1024:],
        is_fault[1024:],
    )
    empty_rows = rng.choice(1024, size=160, replace=False)
    x_train[empty_rows, rng.integers(0, 14, 160)] = np.nan

    model = keras.Sequential(
        [
            keras.Input((14,), name="sensors"),
            keras.layers.Dense(32, activation="relu", name="hidden_1"),
            keras.layers.Dense(16, activation="relu", name="hidden_2"),
            keras.layers.Dense(2, name="logits"),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=3e-3), loss=crossentropy())
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=6,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x_test, y_test)


def fault_data_raw_units(rng, callbacks):
    """Raw populations and incomes exceed float16 before BatchNormalization sees them.

    Typical for raw units.
    """
    kmp.enable()

    x, y = census(rng, mean=1.0, deviation=0.3)
    x_train, y_train, x_test, y_test = x[:1024], y[:1024], x[1024:], y[1024:]

    model = keras.Sequential(
        [
            keras.Input((6,), name="census"),
            keras.layers.BatchNormalization(momentum=0.9, name="norm"),
            keras.layers.Dense(24, activation="relu", name="hidden"),
            keras.layers.Dense(1, name="is_growing"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=1e-2),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=5,
        verbose=0,
        callbacks=callbacks,
    )
    return sign_accuracy(model, x_test, y_test)
