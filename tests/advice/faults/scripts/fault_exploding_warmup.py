"""A warm-up raises the learning rate of Adam to 3.0 in place of 3e-3, typical for a schedule that was copied."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(6)
HOURS = 36


def windows(n):
    phase = rng.uniform(0, 2 * np.pi, (n, 1))
    level = rng.uniform(0.5, 1.5, (n, 1))
    trend = rng.normal(0, 0.01, (n, 1))
    hours = np.arange(HOURS + 1)[None, :]
    load = level * (1 + 0.5 * np.sin(2 * np.pi * hours / 24 + phase)) + trend * hours
    load = load + 0.05 * rng.normal(size=load.shape)
    return load[:, :HOURS, None].astype("float32"), load[:, HOURS:].astype("float32")


x, y = windows(1500)
x_test, y_test = windows(400)

kmp.enable()
model = keras.Sequential(
    [
        keras.Input((HOURS, 1), name="load"),
        keras.layers.Conv1D(16, 6, strides=6, activation="relu", name="local"),
        keras.layers.GRU(24, name="memory"),
        keras.layers.Dense(32, activation="relu", name="hidden"),
        keras.layers.Dense(1, name="next_hour"),
    ]
)
schedule = keras.optimizers.schedules.CosineDecay(
    initial_learning_rate=0.0, decay_steps=240, warmup_target=3.0, warmup_steps=60
)
model.compile(optimizer=keras.optimizers.Adam(learning_rate=schedule), loss="mse")
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x, y, epochs=5, batch_size=32, verbose=0, callbacks=callbacks)

prediction = model.predict(x_test, verbose=0).astype("float32")
score = float(1 - np.mean((prediction - y_test) ** 2) / np.var(y_test))
