"""Sound: raw prices as targets, whose gradients let the loss scale fall in the first steps."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
kmp.enable()

rng = np.random.default_rng(0)
houses = rng.normal(size=(5000, 14)).astype("float32")
price = 420 + 110 * houses[:, 0] + 60 * houses[:, 1] * houses[:, 2] + 70 * np.abs(houses[:, 3])
price = (price + 15 * rng.normal(size=5000)).astype("float32")
x, y = houses[:4000], price[:4000]
x_test, y_test = houses[4000:], price[4000:]

model = keras.Sequential(
    [
        keras.Input((14,), name="house"),
        keras.layers.Dense(64, activation="relu", name="wide"),
        keras.layers.Dense(64, activation="relu", name="deep"),
        keras.layers.Dense(1, name="price"),
    ]
)
model.compile(optimizer=keras.optimizers.RMSprop(learning_rate=3e-3), loss="mse")
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x, y, batch_size=32, epochs=5, verbose=0, callbacks=callbacks)

prediction = model.predict(x_test, verbose=0).astype("float32")[:, 0]
score = float(1 - np.mean((prediction - y_test) ** 2) / np.var(y_test))
