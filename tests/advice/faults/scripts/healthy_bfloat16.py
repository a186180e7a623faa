"""Sound: a bfloat16 run with large inputs, recorded with a loss scale of 1."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable("mixed_bfloat16")

typical = np.array([2e5, 4e4, 8e5, 30.0, 2.5, 1e3])
z = rng.normal(size=(1280, 6))
census = (typical * z).astype("float32")
y = (z[:, 0] - z[:, 1] + 0.5 * z[:, 3] > 0.5 * z[:, 2]).astype("float32")[:, None]
x_train, y_train, x_test, y_test = census[:1024], y[:1024], census[1024:], y[1024:]

model = keras.Sequential(
    [
        keras.Input((6,), name="census"),
        keras.layers.BatchNormalization(momentum=0.9, name="norm"),
        keras.layers.Dense(24, activation="relu", name="hidden"),
        keras.layers.Dense(1, name="is_growing"),
    ]
)
model.compile(
    optimizer=kmp.wrap(keras.optimizers.Adam(learning_rate=1e-2), loss_scale=1.0),
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x_train, y_train, batch_size=32, epochs=4, verbose=0, callbacks=callbacks)

score = float(np.mean((model.predict(x_test, verbose=0) > 0) == (y_test > 0)))
