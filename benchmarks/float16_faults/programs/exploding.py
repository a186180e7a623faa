"""Learning rates that are too large."""

import keras
import numpy as np

import kmp
from float16_faults.programs.frame import (
    accuracy,
    crossentropy,
    event_classifier,
    events,
    explained_variance,
)


def fault_exploding_sgd(rng, callbacks):
    """SGD with momentum has a learning rate 30 times too large.

    Typical for a rate taken from a much larger batch.
    """
    kmp.enable()

    x = rng.normal(size=(1280, 16)).astype("float32")
    weights = rng.normal(size=(16, 3)) / 4
    y = (np.tanh(2 * x @ weights) + rng.normal(scale=0.05, size=(1280, 3))).astype("float32")
    x_train, y_train, x_test, y_test = x[:1024], y[:1024], x[1024:], y[1024:]

    model = keras.Sequential(
        [
            keras.Input((16,), name="features"),
            keras.layers.Dense(48, activation="relu", name="hidden_1"),
            keras.layers.Dense(48, activation="relu", name="hidden_2"),
            keras.layers.Dense(3, name="response"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(learning_rate=1.5, momentum=0.9),
        loss=keras.losses.MeanSquaredError(),
    )
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=12,
        verbose=0,
        callbacks=callbacks,
    )
    return explained_variance(model, x_test, y_test)


def fault_exploding_warmup(rng, callbacks):
    """A warm-up raises the learning rate of Adam to 3.0 in place of 3e-3.

    Typical for a schedule that was copied.
    """
    rng = np.random.default_rng(6)
    HOURS = 36

    def windows(n):
        phase = rng.uniform(0, 2 * np.pi, (n, 1))
        level = rng.uniform(0.5, 1.5, (n, 1))
        trend = rng.normal(0, 0.01, (n, 1))
        hours = np.arange(HOURS + 1)[None, :]
        load = level * (1 + 0.5 * np.sin(2 * np.pi * hours / 24 + phase)) + trend * hours
        load = load + 0.05 * rng.normal(size=load.shape)
        return load[:, :HOURS, None].astype("float32"), load[:, HOURS:].astype("float32")

    x, y = windows(1500)
    x_test, y_test = windows(400)

    kmp.enable()
    model = keras.Sequential(
        [
            keras.Input((HOURS, 1), name="load"),
            keras.layers.Conv1D(16, 6, strides=6, activation="relu", name="local"),
            keras.layers.GRU(24, name="memory"),
            keras.layers.Dense(32, activation="relu", name="hidden"),
            keras.layers.Dense(1, name="next_hour"),
        ]
    )
    schedule = keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=0.0, decay_steps=240, warmup_target=3.0, warmup_steps=60
    )
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=schedule), loss="mse")
    model.fit(x, y, epochs=5, batch_size=32, verbose=0, callbacks=callbacks)
    return explained_variance(model, x_test, y_test)


def fault_exploding_lion(rng, callbacks):
    """Lion has a learning rate 500 times too large for a subclassed GRU.

    Typical for a rate that suited SGD.
    """
    kmp.enable()
    time = np.linspace(0, 1, 8)[None, :, None]
    label = rng.integers(0, 3, size=2000)
    frequency = 1 + label[:, None, None]
    phase = rng.uniform(0, 2 * np.pi, size=(2000, 1, 3))
    signal = np.sin(2 * np.pi * frequency * time + phase) + 0.3 * rng.normal(size=(2000, 8, 3))
    signal = signal.astype("float32")
    x, y = signal[:1600], label[:1600]
    x_test, y_test = signal[1600:], label[1600:]

    class Gestures(keras.Model):
        def __init__(self):
            super().__init__()
            self.recurrent = keras.layers.GRU(24, name="recurrent")
            self.hidden = keras.layers.Dense(24, activation="relu", name="hidden")
            self.classes = keras.layers.Dense(3, name="classes")

        def call(self, sequence):
            return self.classes(self.hidden(self.recurrent(sequence)))

    model = Gestures()
    model.compile(optimizer=keras.optimizers.Lion(learning_rate=0.5), loss=crossentropy())
    model.fit(x, y, batch_size=50, epochs=5, verbose=0, callbacks=callbacks)
    return accuracy(model, x_test, y_test)


def fault_exploding_gru(rng, callbacks):
    """Adam has a learning rate 300 times too large, typical for a rate that suited SGD."""
    kmp.enable()

    words = rng.integers(1, 40, size=(1024, 5)).astype("int32")
    sign = rng.choice([-1.0, 1.0], size=40)
    y = (sign[words].sum(axis=1) > 0).astype("int32")
    x_train, y_train, x_test, y_test = words[:768], y[:768], words[768:], y[768:]

    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32", name="words"),
            keras.layers.Embedding(40, 16, name="embedding"),
            keras.layers.GRU(24, name="gru"),
            keras.layers.Dense(2, name="logits"),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1.5), loss=crossentropy())
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=8,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x_test, y_test)


def fault_exploding_attention(rng, callbacks):
    """Adam has a learning rate 1000 times too large, typical for a forgotten exponent."""
    kmp.enable()

    sequence, y = events(rng)

    model = event_classifier()
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=3.0), loss=crossentropy())
    model.fit(
        sequence[:768],
        y[:768],
        batch_size=32,
        epochs=7,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, sequence[768:], y[768:])
