"""The epsilon of a normalization by hand is zero in float16, so blank images divide 0 by 0, as in ported NumPy code."""

import keras
import numpy as np
from keras import ops

import kmp


class Standardize(keras.layers.Layer):
    def __init__(self, epsilon=1e-12, **kwargs):
        super().__init__(**kwargs)
        self.epsilon = epsilon

    def call(self, images):
        mean = ops.mean(images, axis=(1, 2, 3), keepdims=True)
        variance = ops.mean(ops.square(images - mean), axis=(1, 2, 3), keepdims=True)
        return (images - mean) / ops.sqrt(variance + self.epsilon)


keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

y = rng.integers(0, 4, 1024)
images = rng.normal(scale=0.3, size=(1024, 8, 8, 1))
for number, (row, column) in enumerate([(0, 0), (0, 4), (4, 0)]):
    images[y == number, row : row + 4, column : column + 4] += 0.6
images[y == 3] = 0.0
images = images.astype("float32")
x_train, y_train, x_test, y_test = images[:768], y[:768], images[768:], y[768:]

inputs = keras.Input((8, 8, 1), name="image")
hidden = Standardize(epsilon=1e-12, name="standardize")(inputs)
hidden = keras.layers.Conv2D(8, kernel_size=3, strides=2, activation="relu", name="conv")(hidden)
hidden = keras.layers.Flatten(name="flatten")(hidden)
logits = keras.layers.Dense(4, name="logits")(hidden)
model = keras.Model(inputs, logits)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=3e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x_train, y_train, batch_size=32, epochs=5, verbose=0, callbacks=callbacks)

score = float(np.mean(model.predict(x_test, verbose=0).argmax(axis=1) == y_test))
