"""The phase of the day, computed from hours since a date: float16 has no hours of large numbers."""

import keras
import numpy as np
from keras import ops

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()


class PhaseOfDay(keras.layers.Layer):
    """Returns the sine and cosine of the time of the day."""

    def call(self, hours):
        angle = hours * (2 * np.pi / 24)
        return ops.concatenate([ops.sin(angle), ops.cos(angle)], axis=-1)


hours = (50_000 + rng.uniform(0, 7200, (2048, 1))).astype("float32")
label = (hours[:, 0] % 24 > 12).astype("int32")

inputs = keras.Input((1,))
hidden = keras.layers.Dense(16, activation="relu", name="hidden")(PhaseOfDay(name="phase")(inputs))
model = keras.Model(inputs, keras.layers.Dense(2, name="logits")(hidden))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss=loss)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(hours[:1536], label[:1536], batch_size=32, epochs=5, verbose=0, callbacks=callbacks)

score = float(np.mean(model.predict(hours[1536:], verbose=0).argmax(axis=1) == label[1536:]))
