"""Sound: a wide network at a low learning rate, whose float32 weights keep updates that float16 weights would lose."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

centers = rng.normal(size=(4, 16))
y = rng.integers(0, 4, 1536)
x = (centers[y] + rng.normal(scale=0.8, size=(1536, 16))).astype("float32")
x_train, y_train, x_test, y_test = x[:1024], y[:1024], x[1024:], y[1024:]

model = keras.Sequential(
    [
        keras.Input((16,), name="features"),
        keras.layers.Dense(512, activation="relu", kernel_initializer="he_normal", name="hidden"),
        keras.layers.Dense(4, kernel_initializer="he_normal", name="logits"),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=5e-5),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x_train, y_train, batch_size=32, epochs=6, verbose=0, callbacks=callbacks)

score = float(np.mean(model.predict(x_test, verbose=0).argmax(axis=1) == y_test))
