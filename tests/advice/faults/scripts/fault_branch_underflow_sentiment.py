"""The sentiment head has a tiny weight next to the tokens, typical for a side task under a fixed loss scale of 8."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable(loss_scale=8.0)

tokens = rng.integers(0, 12, size=(1280, 8)).astype("int32")
tags = ((5 * tokens + 3) % 12).astype("int32")
mood = rng.permutation(np.linspace(-1, 1, 12))
sentiment = (mood[tokens].sum(axis=1) > 0).astype("int32")

inputs = keras.Input((8,), dtype="int32", name="tokens")
embedded = keras.layers.Embedding(12, 24, name="embedding")(inputs)
attended = keras.layers.MultiHeadAttention(num_heads=2, key_dim=8, name="attention")(embedded, embedded)
hidden = keras.layers.LayerNormalization(name="norm")(keras.layers.Add(name="add")([embedded, attended]))
first = keras.layers.Dense(16, activation="relu", name="tags_hidden")(hidden)
second = keras.layers.GlobalAveragePooling1D(name="average")(hidden)
second = keras.layers.Dense(16, activation="relu", name="sentiment_hidden")(second)
outputs = {
    "tags": keras.layers.Dense(12, name="tags")(first),
    "sentiment": keras.layers.Dense(2, name="sentiment")(second),
}
model = keras.Model(inputs, outputs)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=5e-3, epsilon=1e-12),
    loss={
        "tags": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "sentiment": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    },
    loss_weights={"tags": 1.0, "sentiment": 1e-7},
)
targets = {"tags": tags[:1024], "sentiment": sentiment[:1024]}
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(tokens[:1024], targets, batch_size=32, epochs=7, verbose=0, callbacks=callbacks)

score = float(np.mean(model.predict(tokens[1024:], verbose=0)["sentiment"].argmax(axis=1) == sentiment[1024:]))
