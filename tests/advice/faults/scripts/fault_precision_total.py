"""A running total of many small amounts, which float16 rounds away once the total is large."""

import keras
import numpy as np
from keras import ops

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

DAYS = 400


class Total(keras.layers.Layer):
    """Returns the running total of the last day."""

    def call(self, amounts):
        return (ops.cumsum(amounts, axis=1)[:, -1] - 3000.0) / 6.0


amounts = rng.normal(7.5, 0.3, (1024, DAYS, 1)).astype("float32")
label = (amounts.sum(axis=(1, 2)) > 7.5 * DAYS).astype("int32")

inputs = keras.Input((DAYS, 1))
hidden = keras.layers.Dense(16, activation="relu", name="hidden")(Total(name="total")(inputs))
model = keras.Model(inputs, keras.layers.Dense(2, name="logits")(hidden))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2), loss=loss)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(amounts[:768], label[:768], batch_size=32, epochs=6, verbose=0, callbacks=callbacks)

score = float(np.mean(model.predict(amounts[768:], verbose=0).argmax(axis=1) == label[768:]))
