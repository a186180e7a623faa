"""A squared distance is expanded and rounds below zero before its root, typical for siamese networks by hand."""

import keras
import numpy as np
from keras import ops

import kmp

keras.utils.set_random_seed(0)
kmp.enable()
rng = np.random.default_rng(0)


class Euclidean(keras.layers.Layer):
    def call(self, a, b):
        squared = (
            ops.sum(a * a, axis=-1, keepdims=True)
            + ops.sum(b * b, axis=-1, keepdims=True)
            - 2 * ops.sum(a * b, axis=-1, keepdims=True)
        )
        return ops.sqrt(squared + 1e-4)


def contrastive(y_true, y_pred):
    return y_true * ops.square(y_pred) + (1 - y_true) * ops.square(ops.relu(1 - y_pred))


strokes = 1.5 * rng.normal(size=(3000, 24))
other = strokes + 0.4 * rng.normal(size=(3000, 24))
same = rng.integers(0, 2, size=3000)
strokes2 = strokes + 0.015 * rng.normal(size=(3000, 24))
strokes2[same == 0] = other[same == 0]
strokes, strokes2, same = strokes.astype("float32"), strokes2.astype("float32"), same.astype("float32")[:, None]
x, y = [strokes[:2500], strokes2[:2500]], same[:2500]
x_test, y_test = [strokes[2500:], strokes2[2500:]], same[2500:]

code_in = keras.Input((24,), name="strokes")
h = keras.layers.Dense(64, activation="tanh", name="encode_1")(code_in)
h = keras.layers.Dense(32, name="encode_2")(h)
encoder = keras.Model(code_in, h, name="encoder")
left = keras.Input((24,), name="left")
right = keras.Input((24,), name="right")
distance = Euclidean(name="distance")(encoder(left), encoder(right))
model = keras.Model([left, right], distance)
model.compile(optimizer=keras.optimizers.Adam(learning_rate=5e-3), loss=contrastive)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x, y, batch_size=50, epochs=12, verbose=0, callbacks=callbacks)

prediction = model.predict(x_test, verbose=0) < 0.5
score = float(np.mean(prediction == y_test))
