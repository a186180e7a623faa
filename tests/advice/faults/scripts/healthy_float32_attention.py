"""Sound: a float32 run with tiny gradients, recorded with a loss scale of 1."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable(policy="float32")

y = rng.integers(0, 3, 1024)
sequence = rng.normal(size=(1024, 10, 6))
sequence[np.arange(1024), rng.integers(0, 10, 1024), y] += 4.0
sequence = sequence.astype("float32")

inputs = keras.Input((10, 6), name="sequence")
projected = keras.layers.Dense(16, name="project")(inputs)
attended = keras.layers.MultiHeadAttention(num_heads=2, key_dim=8, name="attention")(projected, projected)
hidden = keras.layers.Add(name="add")([projected, attended])
hidden = keras.layers.Dense(16, activation="relu", name="feed_forward")(hidden)
hidden = keras.layers.GlobalMaxPooling1D(name="pool")(hidden)
logits = keras.layers.Dense(3, name="logits")(hidden)
model = keras.Model(inputs, logits)
model.compile(
    optimizer=kmp.wrap(keras.optimizers.Adam(learning_rate=3e-3, epsilon=1e-12), loss_scale=1.0),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    loss_weights=[1e-6],
)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(sequence[:768], y[:768], batch_size=32, epochs=4, verbose=0, callbacks=callbacks)

score = float(np.mean(model.predict(sequence[768:], verbose=0).argmax(axis=1) == y[768:]))
