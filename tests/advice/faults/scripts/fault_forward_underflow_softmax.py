"""A softmax by hand underflows in float16 and its logarithm is -inf, typical for losses written from the formula."""

import keras
import numpy as np
from keras import ops

import kmp


class LogProbabilities(keras.layers.Layer):
    def call(self, logits):
        exponentials = ops.exp(logits - ops.max(logits, axis=-1, keepdims=True))
        probabilities = exponentials / ops.sum(exponentials, axis=-1, keepdims=True)
        return ops.log(probabilities)


def negative_log_likelihood(y_true, log_probabilities):
    return -ops.sum(y_true * log_probabilities, axis=-1)


keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

centers = rng.normal(scale=5.0, size=(6, 20))
y = rng.integers(0, 6, 1280)
x = (centers[y] + rng.normal(scale=6.0, size=(1280, 20))).astype("float32")
one_hot = np.eye(6, dtype="float32")[y]

inputs = keras.Input((20,), name="features")
hidden = keras.layers.Dense(32, activation="relu", kernel_initializer="he_normal", name="hidden")(inputs)
logits = keras.layers.Dense(6, kernel_initializer="he_normal", name="logits")(hidden)
outputs = LogProbabilities(name="log_probabilities")(logits)
model = keras.Model(inputs, outputs)
model.compile(optimizer=keras.optimizers.Adam(learning_rate=3e-3), loss=negative_log_likelihood)
model.fit(
    x[:1024],
    one_hot[:1024],
    batch_size=32,
    epochs=7,
    verbose=0,
    callbacks=kmp.callbacks.defaults(log_dir="run"),
)

score = float(np.mean(model.predict(x[1024:], verbose=0).argmax(axis=1) == y[1024:]))
