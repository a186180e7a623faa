"""States of an optimizer in float16, and an epsilon that is 0."""

import keras
import numpy as np
from sklearn.datasets import load_digits

import kmp
from float16_faults.programs.frame import accuracy, crossentropy, walk_model, walks


def fault_optimizer_state_adam(rng, callbacks):
    """PyTorch's default epsilon of Adam is zero in the float16 state.

    Typical when a script is ported to "float16".
    """
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
        optimizer=keras.optimizers.Adam(learning_rate=5e-3, epsilon=1e-8), loss=crossentropy()
    )
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=5,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x_test, y_test)


def fault_optimizer_state_default_epsilon(rng, callbacks):
    """Adam with its default epsilon takes huge steps under "float16".

    Typical for "float16" to save memory.
    """
    kmp.enable("float16")

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x, y = digits.images.reshape(-1, 64)[order].astype("float32") / 16, digits.target[order]
    x_train, y_train, x_test, y_test = x[:1536], y[:1536], x[1536:], y[1536:]

    model = keras.Sequential(
        [
            keras.Input((64,), name="pixels"),
            keras.layers.Dense(64, activation="relu", name="hidden"),
            keras.layers.Dense(10, name="logits"),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-3), loss=crossentropy())
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=8,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x_test, y_test)


def fault_optimizer_state_rmsprop(rng, callbacks):
    """RMSprop divides by zero because its epsilon vanishes in a float16 state.

    Typical when every dtype is "float16".
    """
    kmp.enable("float16")

    x, y = walks(rng)
    x_train, y_train, x_test, y_test = x[:768], y[:768], x[768:], y[768:]

    model = walk_model()
    model.compile(
        optimizer=keras.optimizers.RMSprop(learning_rate=5e-3, epsilon=1e-9),
        loss=keras.losses.MeanSquaredError(),
    )
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=6,
        verbose=0,
        callbacks=callbacks,
    )

    error = model.predict(x_test, verbose=0).astype("float32") - y_test
    return -float(np.mean(error**2))


def fault_optimizer_state_zero_epsilon(rng, callbacks):
    """An epsilon of 0 divides 0 by 0 where inputs are always 0.

    Typical for a constant that looks superfluous.
    """
    kmp.enable()

    y = rng.integers(0, 4, 1280).astype("int32")
    centers = rng.normal(scale=1.5, size=(4, 20))
    x = (centers[y] + rng.normal(size=(1280, 20))).astype("float32")
    x[:, :3] = 0.0  # sensors that are not connected

    model = keras.Sequential(
        [
            keras.Input((20,), name="sensors"),
            keras.layers.Dense(32, activation="tanh", name="hidden"),
            keras.layers.Dense(4, dtype="float32", name="state"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=3e-3, epsilon=0.0), loss=crossentropy()
    )
    model.fit(
        x[:1024],
        y[:1024],
        batch_size=32,
        epochs=4,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x[1024:], y[1024:])
