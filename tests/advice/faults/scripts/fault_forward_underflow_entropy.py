"""A mask hides the logarithm of 0 from the loss but not from its gradient, typical for an entropy by hand."""

import keras
import numpy as np
from keras import ops

import kmp


class Attention(keras.layers.Layer):
    """Weights the steps, and adds the entropy of the weights to the loss."""

    def build(self, shape):
        self.query = self.add_weight(shape=(shape[-1], 1), name="query")

    def call(self, x):
        scores = ops.matmul(x, ops.cast(self.query, x.dtype))
        exponentials = ops.exp(scores - ops.max(scores, axis=1, keepdims=True))
        weights = exponentials / ops.sum(exponentials, axis=1, keepdims=True)
        information = ops.where(weights > 0, weights * ops.log(weights), 0.0)
        self.add_loss(1e-3 * ops.mean(ops.cast(information, "float32")))
        return ops.sum(weights * x, axis=1)


keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

y = rng.integers(0, 4, 1280).astype("int32")
x = rng.normal(size=(1280, 12, 8)).astype("float32")
event = rng.integers(0, 12, 1280)
x[np.arange(1280), event] += 4 * np.eye(4, 8)[y]
x[np.arange(1280), event, 7] += 60

inputs = keras.Input((12, 8), name="signals")
hidden = Attention(name="attention")(keras.layers.Dense(16, name="embed")(inputs))
outputs = keras.layers.Dense(4, dtype="float32", name="event")(hidden)
model = keras.Model(inputs, outputs)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=0.01),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
model.fit(
    x[:1024],
    y[:1024],
    batch_size=32,
    epochs=6,
    verbose=0,
    callbacks=kmp.callbacks.defaults(log_dir="run"),
)

score = float(np.mean(model.predict(x[1024:], verbose=0).argmax(axis=1) == y[1024:]))
