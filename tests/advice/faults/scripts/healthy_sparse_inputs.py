"""Sound: bags of words, in which 98 percent of the inputs are zero."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

topic = rng.integers(0, 5, 1280)
counts = np.zeros((1280, 400), "float32")
for row, number in enumerate(topic):
    own_words = rng.integers(40 * number, 40 * number + 40, 4)
    np.add.at(counts[row], own_words, 1.0)
    np.add.at(counts[row], rng.integers(0, 400, 4), 1.0)
x_train, y_train, x_test, y_test = counts[:1024], topic[:1024], counts[1024:], topic[1024:]

model = keras.Sequential(
    [
        keras.Input((400,), name="counts"),
        keras.layers.Dense(32, activation="relu", name="hidden"),
        keras.layers.Dense(5, name="topic"),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=5e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x_train, y_train, batch_size=32, epochs=4, verbose=0, callbacks=callbacks)

score = float(np.mean(model.predict(x_test, verbose=0).argmax(axis=1) == y_test))
