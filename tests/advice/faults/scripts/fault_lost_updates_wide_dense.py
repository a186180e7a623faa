"""Weights stored in float16 lose the small updates of plain SGD, as for someone who sets "float16" to save memory."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable(policy="float16")

centers = rng.normal(size=(4, 16))
y = rng.integers(0, 4, 1536)
x = (centers[y] + rng.normal(scale=0.6, size=(1536, 16))).astype("float32")
x_train, y_train, x_test, y_test = x[:1024], y[:1024], x[1024:], y[1024:]

model = keras.Sequential(
    [
        keras.Input((16,), name="features"),
        keras.layers.Dense(512, activation="relu", name="hidden"),
        keras.layers.Dense(4, name="logits"),
    ]
)
model.compile(
    optimizer=keras.optimizers.SGD(learning_rate=2e-4),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
model.fit(
    x_train,
    y_train,
    batch_size=32,
    epochs=18,
    verbose=0,
    callbacks=kmp.callbacks.defaults(log_dir="run"),
)

score = float(np.mean(model.predict(x_test, verbose=0).argmax(axis=1) == y_test))
