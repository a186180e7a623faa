"""Sound: a classifier in which more than half of the hidden units are dead from the start."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

weights = rng.normal(size=(16, 4))
x = rng.normal(size=(1280, 16)).astype("float32")
y = (x @ weights).argmax(axis=1)
x_train, y_train, x_test, y_test = x[:1024], y[:1024], x[1024:], y[1024:]

model = keras.Sequential(
    [
        keras.Input((16,), name="features"),
        keras.layers.Dense(
            96,
            activation="relu",
            bias_initializer=keras.initializers.RandomUniform(minval=-6.0, maxval=1.0),
            name="hidden_1",
        ),
        keras.layers.Dense(32, activation="relu", name="hidden_2"),
        keras.layers.Dense(4, name="logits"),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=3e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x_train, y_train, batch_size=32, epochs=5, verbose=0, callbacks=callbacks)

score = float(np.mean(model.predict(x_test, verbose=0).argmax(axis=1) == y_test))
