"""Some rows of the training data hold NaN, typical for a table with empty cells."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

measured = rng.normal(size=(1280, 14)).astype("float32")
is_fault = (measured[:, :4].sum(axis=1) > measured[:, 4:8].sum(axis=1)).astype("int32")
x_train, y_train, x_test, y_test = measured[:1024].copy(), is_fault[:1024], measured[1024:], is_fault[1024:]
empty_rows = rng.choice(1024, size=160, replace=False)
x_train[empty_rows, rng.integers(0, 14, 160)] = np.nan

model = keras.Sequential(
    [
        keras.Input((14,), name="sensors"),
        keras.layers.Dense(32, activation="relu", name="hidden_1"),
        keras.layers.Dense(16, activation="relu", name="hidden_2"),
        keras.layers.Dense(2, name="logits"),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=3e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x_train, y_train, batch_size=32, epochs=6, verbose=0, callbacks=callbacks)

score = float(np.mean(model.predict(x_test, verbose=0).argmax(axis=1) == y_test))
