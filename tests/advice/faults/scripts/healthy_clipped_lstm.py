"""Sound: an LSTM whose gradients are clipped by their global norm in most steps."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

x = rng.choice([-1.0, 1.0], size=(1024, 12, 2)).astype("float32")
y = x[:, :, 0].sum(axis=1, keepdims=True) / 4
x_train, y_train, x_test, y_test = x[:768], y[:768], x[768:], y[768:]

model = keras.Sequential(
    [
        keras.Input((12, 2), name="sequence"),
        keras.layers.LSTM(16, name="lstm"),
        keras.layers.Dense(8, activation="relu", name="hidden"),
        keras.layers.Dense(1, name="total"),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=5e-3, global_clipnorm=0.1),
    loss=keras.losses.MeanSquaredError(),
)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x_train, y_train, batch_size=32, epochs=5, verbose=0, callbacks=callbacks)

error = model.predict(x_test, verbose=0).astype("float32") - y_test
score = -float(np.mean(error**2))
