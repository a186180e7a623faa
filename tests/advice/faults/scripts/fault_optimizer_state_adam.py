"""PyTorch's default epsilon of Adam is zero in the float16 state, as for someone who ports a script to "float16"."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable(policy="float16")

y = rng.integers(0, 3, 1024)
x = rng.normal(scale=0.5, size=(1024, 8, 8, 1))
x[y == 0, 2:4, :, 0] += 1.0
x[y == 1, :, 4:6, 0] += 1.0
x = x.astype("float32")
x_train, y_train, x_test, y_test = x[:768], y[:768], x[768:], y[768:]

model = keras.Sequential(
    [
        keras.Input((8, 8, 1), name="image"),
        keras.layers.Conv2D(8, kernel_size=3, activation="relu", name="conv_1"),
        keras.layers.Conv2D(8, kernel_size=3, activation="relu", name="conv_2"),
        keras.layers.Flatten(name="flatten"),
        keras.layers.Dense(3, name="logits"),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=5e-3, epsilon=1e-8),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
model.fit(
    x_train,
    y_train,
    batch_size=32,
    epochs=5,
    verbose=0,
    callbacks=kmp.callbacks.defaults(log_dir="run"),
)

score = float(np.mean(model.predict(x_test, verbose=0).argmax(axis=1) == y_test))
