"""Ratings near 10 that are stored in float16 never move, as for someone who halves the memory of an embedding table."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable("float16")

strength = rng.normal(size=60)
home, away = rng.integers(0, 60, size=(2, 2560, 3)).astype("int32")
home_wins = (strength[home].sum(axis=1) > strength[away].sum(axis=1)).astype("float32")[:, None]
train, y_train = {"home": home[:2048], "away": away[:2048]}, home_wins[:2048]
test, y_test = {"home": home[2048:], "away": away[2048:]}, home_wins[2048:]

inputs = {
    "home": keras.Input((3,), dtype="int32", name="home"),
    "away": keras.Input((3,), dtype="int32", name="away"),
}
rating = keras.layers.Embedding(60, 1, embeddings_initializer=keras.initializers.Constant(10.0), name="rating")
average = keras.layers.GlobalAveragePooling1D(name="average")
logit = keras.layers.Subtract(name="difference")([average(rating(inputs["home"])), average(rating(inputs["away"]))])
model = keras.Model(inputs, logit)
model.compile(
    optimizer=keras.optimizers.SGD(learning_rate=0.4),
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
)
model.fit(
    train,
    y_train,
    batch_size=64,
    epochs=5,
    verbose=0,
    callbacks=kmp.callbacks.defaults(log_dir="run"),
)

score = float(np.mean((model.predict(test, verbose=0) > 0) == (y_test > 0)))
