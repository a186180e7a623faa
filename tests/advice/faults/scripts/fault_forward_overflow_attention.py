"""Attention scores without a division by sqrt(d) exceed float16 for large inputs, typical for attention by hand."""

import keras
import numpy as np
from keras import ops

import kmp


class DotAttention(keras.layers.Layer):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.query = keras.layers.Dense(units, use_bias=False, name="query")
        self.key = keras.layers.Dense(units, use_bias=False, name="key")
        self.value = keras.layers.Dense(units, use_bias=False, name="value")

    def call(self, inputs):
        scores = ops.matmul(self.query(inputs), ops.transpose(self.key(inputs), (0, 2, 1)))
        weights = ops.softmax(scores, axis=-1)
        return ops.matmul(weights, self.value(inputs))


keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

centers = rng.normal(scale=60, size=(3, 16))
y = rng.integers(0, 3, 1024)
x = (centers[y][:, None, :] + rng.normal(scale=90, size=(1024, 8, 16))).astype("float32")
x_train, y_train, x_test, y_test = x[:768], y[:768], x[768:], y[768:]

inputs = keras.Input((8, 16), name="readings")
attended = DotAttention(units=32, name="dot_attention")(inputs)
hidden = keras.layers.LayerNormalization(name="norm")(attended)
hidden = keras.layers.GlobalAveragePooling1D(name="average")(hidden)
logits = keras.layers.Dense(3, name="logits")(hidden)
model = keras.Model(inputs, logits)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=5e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x_train, y_train, batch_size=32, epochs=6, verbose=0, callbacks=callbacks)

score = float(np.mean(model.predict(x_test, verbose=0).argmax(axis=1) == y_test))
