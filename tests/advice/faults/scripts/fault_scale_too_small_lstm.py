"""A small loss scale from a model whose loss was a sum meets sample weights that add up to one, a copied setting."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable(loss_scale=2.0**-10)

steps = rng.choice([-1.0, 1.0], size=(1024, 12, 1), p=[0.5, 0.5])
x = np.concatenate([steps, rng.normal(size=(1024, 12, 1))], axis=-1).astype("float32")
y = (steps.sum(axis=(1, 2)) > 0).astype("float32")[:, None]
weight = rng.uniform(0.5, 1.5, 1024)
weight = (weight / weight.sum()).astype("float32")

model = keras.Sequential(
    [
        keras.Input((12, 2), name="walk"),
        keras.layers.LSTM(16, name="lstm"),
        keras.layers.Dense(16, activation="relu", name="hidden"),
        keras.layers.Dense(1, name="is_up"),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=5e-3, epsilon=1e-12),
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x, y, sample_weight=weight, batch_size=32, epochs=5, verbose=0, callbacks=callbacks)

score = float(np.mean((model.predict(x, verbose=0) > 0) == (y > 0)))
