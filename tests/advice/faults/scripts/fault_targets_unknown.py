"""Texts without a label have the label -1, typical for a data set that is labelled only in part."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

topics = rng.integers(0, 4, 1280)
is_topical = rng.random((1280, 12)) < 0.5
words = np.where(is_topical, 25 * topics[:, None], 0) + rng.integers(0, 25, (1280, 12))
words = words.astype("int32")
labels = topics.copy()
labels[rng.choice(1024, size=128, replace=False)] = -1
x_train, y_train, x_test, y_test = words[:1024], labels[:1024], words[1024:], topics[1024:]

model = keras.Sequential(
    [
        keras.Input((12,), dtype="int32", name="words"),
        keras.layers.Embedding(100, 16, name="embedding"),
        keras.layers.GlobalAveragePooling1D(name="average"),
        keras.layers.Dense(16, activation="relu", name="hidden"),
        keras.layers.Dense(4, name="topic"),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=1e-2),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    jit_compile=True,
)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x_train, y_train, batch_size=32, epochs=5, verbose=0, callbacks=callbacks)

score = float(np.mean(model.predict(x_test, verbose=0).argmax(axis=1) == y_test))
