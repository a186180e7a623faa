"""One embedding keeps values near 100 in float16 and never moves, typical for saving the memory of one table."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
kmp.enable()

rng = np.random.default_rng(0)
hours = np.arange(168)
week = 100 + 3 * np.sin(2 * np.pi * hours / 24) + 1.5 * (hours < 120) + rng.normal(scale=0.9, size=168)
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
    168, 1, embeddings_initializer=keras.initializers.Constant(100.0), dtype="float16", name="week_profile"
)(hour_input)
base = keras.layers.Flatten(name="base")(base)
weather = keras.layers.Dense(8, activation="relu", name="heating")(temperature_input)
weather = keras.layers.Dense(1, name="weather")(weather)
output = keras.layers.Add(name="load")([base, weather])
model = keras.Model({"hour": hour_input, "temperature": temperature_input}, output)
model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss="mse")
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x, y, batch_size=64, epochs=6, verbose=0, callbacks=callbacks)

prediction = model.predict(x_test, verbose=0).astype("float32")[:, 0]
score = float(1 - np.mean((prediction - y_test) ** 2) / np.var(y_test))
