"""A root mean square in which the mean of squares overflows, so that the layer returns zeros: no loss is NaN or Inf."""

import keras
import numpy as np
from keras import ops

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()


class RootMeanSquare(keras.layers.Layer):
    """Scales each recording to the same loudness."""

    def build(self, input_shape):
        self.gain = self.add_weight(shape=(input_shape[-1],), initializer="ones", name="gain")

    def call(self, x):
        return x / ops.sqrt(ops.mean(ops.square(x), axis=-1, keepdims=True) + 1e-3) * self.gain


signal = rng.normal(size=(1024, 16))
label = (signal[:, :4].sum(axis=1) > 0).astype("int32")
signal = (signal * rng.uniform(400, 5000, (1024, 1))).astype("float32")

inputs = keras.Input((16,))
hidden = keras.layers.Dense(32, activation="relu", name="hidden")(RootMeanSquare(name="loudness")(inputs))
model = keras.Model(inputs, keras.layers.Dense(2, name="logits")(hidden))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss=loss)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(signal[:768], label[:768], batch_size=32, epochs=6, verbose=0, callbacks=callbacks)

score = float(np.mean(model.predict(signal[768:], verbose=0).argmax(axis=1) == label[768:]))
