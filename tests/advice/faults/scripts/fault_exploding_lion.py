"""Lion has a learning rate 500 times too large for a subclassed GRU, typical for a rate that suited SGD."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
kmp.enable()

rng = np.random.default_rng(0)
time = np.linspace(0, 1, 8)[None, :, None]
label = rng.integers(0, 3, size=2000)
frequency = 1 + label[:, None, None]
phase = rng.uniform(0, 2 * np.pi, size=(2000, 1, 3))
signal = np.sin(2 * np.pi * frequency * time + phase) + 0.3 * rng.normal(size=(2000, 8, 3))
signal = signal.astype("float32")
x, y = signal[:1600], label[:1600]
x_test, y_test = signal[1600:], label[1600:]


class Gestures(keras.Model):
    def __init__(self):
        super().__init__()
        self.recurrent = keras.layers.GRU(24, name="recurrent")
        self.hidden = keras.layers.Dense(24, activation="relu", name="hidden")
        self.classes = keras.layers.Dense(3, name="classes")

    def call(self, sequence):
        return self.classes(self.hidden(self.recurrent(sequence)))


model = Gestures()
model.compile(
    optimizer=keras.optimizers.Lion(learning_rate=0.5),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x, y, batch_size=50, epochs=5, verbose=0, callbacks=callbacks)

prediction = model.predict(x_test, verbose=0)
score = float(np.mean(prediction.argmax(axis=1) == y_test))
