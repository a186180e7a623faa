"""Adam has a learning rate 300 times too large, typical for a rate that suited SGD."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

words = rng.integers(1, 40, size=(1024, 5)).astype("int32")
sign = rng.choice([-1.0, 1.0], size=40)
y = (sign[words].sum(axis=1) > 0).astype("int32")
x_train, y_train, x_test, y_test = words[:768], y[:768], words[768:], y[768:]

model = keras.Sequential(
    [
        keras.Input((5,), dtype="int32", name="words"),
        keras.layers.Embedding(40, 16, name="embedding"),
        keras.layers.GRU(24, name="gru"),
        keras.layers.Dense(2, name="logits"),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=1.5),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x_train, y_train, batch_size=32, epochs=8, verbose=0, callbacks=callbacks)

score = float(np.mean(model.predict(x_test, verbose=0).argmax(axis=1) == y_test))
