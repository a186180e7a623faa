"""A minimum loss scale of 2^12 is too large for a loss in raw prices, typical for a bound that suited a classifier."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
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
    callbacks=kmp.callbacks.defaults(log_dir="run"),
)

score = 1.0 - float(np.mean((model.predict(x[1024:], verbose=0) - y[1024:]) ** 2) / np.var(y[1024:]))
