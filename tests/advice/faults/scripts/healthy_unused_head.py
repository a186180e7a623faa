"""Sound: a model with two heads of which only one has a loss, so the other's weights never get a gradient."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

x = rng.normal(size=(1280, 10)).astype("float32")
demand = (np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2])[:, None].astype("float32")

inputs = keras.Input((10,), name="store")
trunk = keras.layers.Dense(64, activation="tanh", name="trunk")(inputs)
first = keras.layers.Dense(32, activation="tanh", name="demand_hidden")(trunk)
second = keras.layers.Dense(16, activation="tanh", name="returns_hidden")(trunk)
outputs = {
    "demand": keras.layers.Dense(1, dtype="float32", name="demand")(first),
    "returns": keras.layers.Dense(1, dtype="float32", name="returns")(second),
}
model = keras.Model(inputs, outputs)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=5e-3),
    loss={"demand": keras.losses.MeanSquaredError(), "returns": None},
)
targets = {"demand": demand[:1024], "returns": np.zeros((1024, 1), "float32")}
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x[:1024], targets, batch_size=32, epochs=6, verbose=0, callbacks=callbacks)

error = model.predict(x[1024:], verbose=0)["demand"] - demand[1024:]
score = 1.0 - float(np.mean(error**2) / np.var(demand[1024:]))
