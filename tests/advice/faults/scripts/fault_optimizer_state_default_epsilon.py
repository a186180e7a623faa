"""Adam with its default epsilon takes huge steps under "float16", as for someone who wants to save memory."""

import keras
import numpy as np
from sklearn.datasets import load_digits

import kmp

keras.utils.set_random_seed(0)
kmp.enable("float16")

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
x, y = digits.images.reshape(-1, 64)[order].astype("float32") / 16, digits.target[order]
x_train, y_train, x_test, y_test = x[:1536], y[:1536], x[1536:], y[1536:]

model = keras.Sequential(
    [
        keras.Input((64,), name="pixels"),
        keras.layers.Dense(64, activation="relu", name="hidden"),
        keras.layers.Dense(10, name="logits"),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=1e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
model.fit(
    x_train,
    y_train,
    batch_size=32,
    epochs=8,
    verbose=0,
    callbacks=kmp.callbacks.defaults(log_dir="run", every_n_steps=20),
)

score = float(np.mean(model.predict(x_test, verbose=0).argmax(axis=1) == y_test))
