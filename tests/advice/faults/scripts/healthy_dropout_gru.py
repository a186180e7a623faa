"""Sound: strong dropout before and after a GRU, which makes many gradients zero and the loss noisy."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

frequency = rng.choice([0.3, 0.5, 0.8], size=1280)
phase = rng.uniform(0, 2 * np.pi, size=(1280, 1))
waves = np.sin(frequency[:, None] * np.arange(16) + phase) + rng.normal(scale=0.1, size=(1280, 16))
x = waves[..., None].astype("float32")
y = np.digitize(frequency, [0.4, 0.6])
x_train, y_train, x_test, y_test = x[:1024], y[:1024], x[1024:], y[1024:]

model = keras.Sequential(
    [
        keras.Input((16, 1), name="waves"),
        keras.layers.GRU(24, name="gru"),
        keras.layers.Dropout(0.4, name="dropout_1"),
        keras.layers.Dense(48, activation="relu", name="hidden"),
        keras.layers.Dropout(0.5, name="dropout_2"),
        keras.layers.Dense(3, name="logits"),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=1e-2),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x_train, y_train, batch_size=32, epochs=4, verbose=0, callbacks=callbacks)

score = float(np.mean(model.predict(x_test, verbose=0).argmax(axis=1) == y_test))
