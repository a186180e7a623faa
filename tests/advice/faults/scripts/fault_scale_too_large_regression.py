"""A fixed loss scale of 2^17 skips most steps of a regression, typical for a scale that suited a classifier."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable(loss_scale=131072.0)

x = rng.normal(size=(1280, 10)).astype("float32")
y = 4 * np.sin(x[:, 0]) + 3 * x[:, 1] * x[:, 2] + 2 * x[:, 3]
y = (y + rng.normal(scale=0.1, size=1280))[:, None].astype("float32")
x_train, y_train, x_test, y_test = x[:1024], y[:1024], x[1024:], y[1024:]

model = keras.Sequential(
    [
        keras.Input((10,), name="features"),
        keras.layers.Dense(64, activation="tanh", name="hidden_1"),
        keras.layers.Dense(64, activation="tanh", name="hidden_2"),
        keras.layers.Dense(1, dtype="float32", name="response"),
    ]
)
model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss=keras.losses.MeanSquaredError())
model.fit(
    x_train,
    y_train,
    batch_size=32,
    epochs=10,
    verbose=0,
    callbacks=kmp.callbacks.defaults(log_dir="run"),
)

score = 1.0 - float(np.mean((model.predict(x_test, verbose=0) - y_test) ** 2) / np.var(y_test))
