"""A recurrent model with float16 weights hardly learns at a low learning rate, as when "float16" is taken for AMP."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable("float16")

centers = rng.normal(size=(3, 8))
y = rng.integers(0, 3, 1280)
sequence = (centers[y][:, None, :] + 0.8 * rng.normal(size=(1280, 5, 8))).astype("float32")
x_train, y_train, x_test, y_test = sequence[:1024], y[:1024], sequence[1024:], y[1024:]

model = keras.Sequential(
    [
        keras.Input((5, 8), name="sequence"),
        keras.layers.GRU(32, name="gru"),
        keras.layers.Dense(512, activation="relu", name="hidden"),
        keras.layers.Dense(3, name="logits"),
    ]
)
model.compile(
    optimizer=keras.optimizers.SGD(learning_rate=6e-4),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
model.fit(
    x_train,
    y_train,
    batch_size=32,
    epochs=5,
    verbose=0,
    callbacks=kmp.callbacks.defaults(log_dir="run"),
)

score = float(np.mean(model.predict(x_test, verbose=0).argmax(axis=1) == y_test))
