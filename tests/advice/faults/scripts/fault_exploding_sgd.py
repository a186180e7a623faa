"""SGD with momentum has a learning rate 30 times too large, typical for a rate taken from a much larger batch."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

x = rng.normal(size=(1280, 16)).astype("float32")
weights = rng.normal(size=(16, 3)) / 4
y = (np.tanh(2 * x @ weights) + rng.normal(scale=0.05, size=(1280, 3))).astype("float32")
x_train, y_train, x_test, y_test = x[:1024], y[:1024], x[1024:], y[1024:]

model = keras.Sequential(
    [
        keras.Input((16,), name="features"),
        keras.layers.Dense(48, activation="relu", name="hidden_1"),
        keras.layers.Dense(48, activation="relu", name="hidden_2"),
        keras.layers.Dense(3, name="response"),
    ]
)
model.compile(
    optimizer=keras.optimizers.SGD(learning_rate=1.5, momentum=0.9),
    loss=keras.losses.MeanSquaredError(),
)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x_train, y_train, batch_size=32, epochs=12, verbose=0, callbacks=callbacks)

error = model.predict(x_test, verbose=0).astype("float32") - y_test
score = 1.0 - float(np.mean(error**2) / np.var(y_test))
