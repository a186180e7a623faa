"""A compute_loss adds squares over time and sensors in the model's float16, typical for a loss moved into the model."""

import keras
import numpy as np
from keras import ops

import kmp


class Forecaster(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        error = ops.cast(y, y_pred.dtype) - y_pred
        return ops.sum(ops.square(error)) / 1000


keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

phase, level = rng.uniform(0, 6, (1024, 1, 8)), rng.normal(scale=5.0, size=(1024, 1, 8))
series = 5 * np.sin(0.4 * np.arange(36)[:, None] + phase) + level
series = (series + rng.normal(scale=0.2, size=series.shape)).astype("float32")
past, future = series[:, :12], series[:, 12:]

inputs = keras.Input((12, 8), name="past")
hidden = keras.layers.Flatten(name="flatten")(inputs)
hidden = keras.layers.Dense(96, activation="relu", name="hidden")(hidden)
hidden = keras.layers.Dense(24 * 8, name="forecast")(hidden)
outputs = keras.layers.Reshape((24, 8), name="future")(hidden)
model = Forecaster(inputs, outputs)
model.compile(optimizer=keras.optimizers.Adam(learning_rate=5e-3))
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(past, future, batch_size=32, epochs=7, verbose=0, callbacks=callbacks)

error = model.predict(past, verbose=0).astype("float32") - future
score = 1.0 - float(np.mean(error**2) / np.var(future))
