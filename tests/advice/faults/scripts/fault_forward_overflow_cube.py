"""Cubes of features near 60 exceed float16, typical for polynomial features that are built inside the model."""

import keras
import numpy as np
from keras import ops

import kmp


class Polynomial(keras.layers.Layer):
    def call(self, inputs):
        return ops.concatenate([inputs, inputs**2, inputs**3], axis=-1)


keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

speed = rng.uniform(5, 60, size=(1280, 4)).astype("float32")
power = (speed**3 / 2e5).sum(axis=1, keepdims=True)
power = (power + rng.normal(scale=0.02, size=power.shape)).astype("float32")
x_train, y_train, x_test, y_test = speed[:1024], power[:1024], speed[1024:], power[1024:]

model = keras.Sequential(
    [
        keras.Input((4,), name="speed"),
        Polynomial(name="polynomial"),
        keras.layers.BatchNormalization(momentum=0.9, dtype="float32", name="norm"),
        keras.layers.Dense(16, activation="relu", name="hidden"),
        keras.layers.Dense(1, dtype="float32", name="power"),
    ]
)
model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss=keras.losses.MeanSquaredError())
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x_train, y_train, batch_size=32, epochs=6, verbose=0, callbacks=callbacks)

score = 1.0 - float(np.mean((model.predict(x_test, verbose=0) - y_test) ** 2) / np.var(y_test))
