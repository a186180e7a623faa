"""An activity penalty sums squares in float16 beyond its range, as for someone who writes a sparsity layer by hand."""

import keras
import numpy as np
from keras import ops

import kmp


class ActivityPenalty(keras.layers.Layer):
    def __init__(self, rate, **kwargs):
        super().__init__(**kwargs)
        self.rate = rate

    def call(self, inputs):
        self.add_loss(self.rate * ops.sum(ops.square(inputs)))
        return inputs


keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

weights = rng.normal(size=(12, 4))
x = rng.normal(scale=3.0, size=(1280, 12)).astype("float32")
y = (x @ weights).argmax(axis=1)
x_train, y_train, x_test, y_test = x[:1024], y[:1024], x[1024:], y[1024:]

inputs = keras.Input((12,), name="features")
hidden = keras.layers.Dense(512, activation="relu", kernel_initializer="he_normal", name="hidden")(inputs)
hidden = ActivityPenalty(rate=1e-7, name="activity_penalty")(hidden)
logits = keras.layers.Dense(4, name="logits")(hidden)
model = keras.Model(inputs, logits)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=1e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x_train, y_train, batch_size=32, epochs=8, verbose=0, callbacks=callbacks)

score = float(np.mean(model.predict(x_test, verbose=0).argmax(axis=1) == y_test))
