"""A loss scale of 1 is none at all for signals below a millivolt, typical for recordings that are left in volts."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable(loss_scale=1.0)

phase, speed = rng.uniform(0, 6, (1024, 1)), rng.uniform(0.1, 0.3, (1024, 1))
volts = (5e-4 * np.sin(speed * np.arange(64) + phase)).astype("float32")

model = keras.Sequential(
    [
        keras.Input((64,), name="volts"),
        keras.layers.Dense(48, activation="relu", use_bias=False, name="encoder"),
        keras.layers.Dense(8, use_bias=False, name="code"),
        keras.layers.Dense(48, activation="relu", use_bias=False, name="decoder"),
        keras.layers.Dense(64, use_bias=False, name="reconstruction"),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=6e-3, epsilon=1e-12),
    loss=keras.losses.MeanSquaredError(),
)
model.fit(
    volts,
    volts,
    batch_size=32,
    epochs=6,
    verbose=0,
    callbacks=kmp.callbacks.defaults(log_dir="run"),
)

error = model.predict(volts, verbose=0).astype("float32") - volts
score = 1.0 - float(np.mean(error**2) / np.var(volts))
