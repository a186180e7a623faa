"""A table of floats with a column of ids, which a custom layer looks up: float16 has every integer only up to 2048."""

import keras
import numpy as np
from keras import ops

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

CUSTOMERS = 6001


class CustomerTable(keras.layers.Layer):
    """Replaces the first column, an id, by the customer's vector."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.vectors = keras.layers.Embedding(CUSTOMERS, 8, name="vectors")

    def call(self, table):
        return ops.concatenate([self.vectors(ops.cast(table[:, 0], "int32")), table[:, 1:]], axis=-1)


customer = rng.integers(0, CUSTOMERS - 1, 6144)
label = rng.integers(0, 2, CUSTOMERS)[customer]
table = np.stack([customer, rng.random(len(customer))], axis=1).astype("float32")

inputs = keras.Input((2,))
model = keras.Model(inputs, keras.layers.Dense(2, name="logits")(CustomerTable(name="customer")(inputs)))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=keras.optimizers.Adam(learning_rate=5e-2), loss=loss)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(table, label, batch_size=128, epochs=6, verbose=0, callbacks=callbacks)

score = float(np.mean(model.predict(table, verbose=0).argmax(axis=1) == label))  # of known customers
