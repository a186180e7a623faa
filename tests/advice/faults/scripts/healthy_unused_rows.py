"""Sound: an embedding for 2000 words of which the texts use 60, so most of its gradient is zero."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

words = rng.choice(rng.choice(2000, size=60, replace=False), size=(1280, 8)).astype("int32")
meaning = rng.normal(size=2000)
y = (meaning[words].sum(axis=1) > 0).astype("float32")[:, None]
x_train, y_train, x_test, y_test = words[:1024], y[:1024], words[1024:], y[1024:]

model = keras.Sequential(
    [
        keras.Input((8,), dtype="int32", name="words"),
        keras.layers.Embedding(2000, 16, name="embedding"),
        keras.layers.GlobalAveragePooling1D(name="average"),
        keras.layers.Dense(16, activation="relu", name="hidden"),
        keras.layers.Dense(1, name="logit"),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=1e-2),
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x_train, y_train, batch_size=32, epochs=5, verbose=0, callbacks=callbacks)

score = float(np.mean((model.predict(x_test, verbose=0) > 0) == (y_test > 0)))
