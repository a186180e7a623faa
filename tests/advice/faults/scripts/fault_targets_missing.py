"""Some targets of one output are NaN, typical for measurements of which a sensor misses a part."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
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
    loss={"temperature": keras.losses.MeanSquaredError(), "humidity": keras.losses.MeanSquaredError()},
)
targets = {"temperature": temperature[:1024], "humidity": measured}
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(days[:1024], targets, batch_size=32, epochs=4, verbose=0, callbacks=callbacks)

found = model.predict(days[1024:], verbose=0)
errors = [found["temperature"] - temperature[1024:], found["humidity"] - humidity[1024:]]
score = -float(np.mean(np.square(errors)))
