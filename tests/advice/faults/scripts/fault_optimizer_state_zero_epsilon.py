"""An epsilon of 0 divides 0 by 0 where inputs are always 0, typical for a constant that looks superfluous."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

y = rng.integers(0, 4, 1280).astype("int32")
centers = rng.normal(scale=1.5, size=(4, 20))
x = (centers[y] + rng.normal(size=(1280, 20))).astype("float32")
x[:, :3] = 0.0  # sensors that are not connected

model = keras.Sequential(
    [
        keras.Input((20,), name="sensors"),
        keras.layers.Dense(32, activation="tanh", name="hidden"),
        keras.layers.Dense(4, dtype="float32", name="state"),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=3e-3, epsilon=0.0),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
model.fit(
    x[:1024],
    y[:1024],
    batch_size=32,
    epochs=4,
    verbose=0,
    callbacks=kmp.callbacks.defaults(log_dir="run"),
)

score = float(np.mean(model.predict(x[1024:], verbose=0).argmax(axis=1) == y[1024:]))
