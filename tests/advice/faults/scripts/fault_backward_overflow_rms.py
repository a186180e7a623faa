"""The root of a mean square that underflows has an infinite slope in float16, typical for energies of quiet sound."""

import keras
import numpy as np
from keras import ops

import kmp


class Loudness(keras.layers.Layer):
    def call(self, bands):
        return ops.sqrt(ops.mean(ops.square(bands), axis=1))


keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

amplitude = 10.0 ** rng.uniform(-4.5, 0, size=(1024, 1))
y = rng.integers(0, 2, 1024)
frequency = np.where(y, 0.6, 1.8)[:, None] + rng.normal(scale=0.1, size=(1024, 1))
sound = amplitude * np.sin(frequency * np.arange(48) + rng.uniform(0, 6, (1024, 1)))
sound = sound[..., None].astype("float32")
x_train, y_train, x_test, y_test = sound[:768], y[:768], sound[768:], y[768:]

inputs = keras.Input((48, 1), name="sound")
bands = keras.layers.Conv1D(8, kernel_size=9, use_bias=False, name="filters")(inputs)
loudness = Loudness(name="loudness")(bands)
hidden = keras.layers.LayerNormalization(epsilon=1e-6, dtype="float32", name="norm")(loudness)
logits = keras.layers.Dense(2, name="logits")(hidden)
model = keras.Model(inputs, logits)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=1e-2),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x_train, y_train, batch_size=32, epochs=5, verbose=0, callbacks=callbacks)

score = float(np.mean(model.predict(x_test, verbose=0).argmax(axis=1) == y_test))
