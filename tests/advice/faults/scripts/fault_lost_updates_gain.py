"""A layer of the user's own keeps the gain of each channel in float16, near 100, and its updates are lost."""

import keras
import numpy as np
from keras import ops

import kmp

keras.utils.set_random_seed(0)
kmp.enable()


class Calibration(keras.layers.Layer):
    """Multiplies each channel by a learned gain."""

    def build(self, input_shape):
        self.gain = self.add_weight(
            shape=(input_shape[-1],), initializer=keras.initializers.Constant(100.0), dtype="float16", name="gain"
        )

    def call(self, x):
        return x * ops.cast(self.gain, x.dtype)


rng = np.random.default_rng(0)
volts = rng.uniform(0.2, 1.0, size=(5000, 6)).astype("float32")
gains = 100 + 2 * rng.normal(size=6)
power = (volts * gains + rng.normal(scale=0.33, size=(5000, 6))).astype("float32")

inputs = keras.Input((6,), name="volts")
outputs = Calibration(name="calibration")(inputs)
model = keras.Model(inputs, outputs)
model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss="mse")
model.fit(
    volts[:4000], power[:4000], batch_size=32, epochs=6, verbose=0, callbacks=kmp.callbacks.defaults(log_dir="run")
)

prediction = model.predict(volts[4000:], verbose=0).astype("float32")
score = float(1 - np.mean((prediction - power[4000:]) ** 2) / np.mean((power[4000:] - 100 * volts[4000:]) ** 2))
