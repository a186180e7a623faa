"""An L1 penalty is summed over the batch in float16 before it is scaled down, typical for sparse autoencoders."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(3)
WIDTH, ATOMS = 48, 96
dictionary = rng.normal(size=(ATOMS, WIDTH)) / np.sqrt(WIDTH)


def activations(n):
    codes = rng.gamma(2.0, 1.5, (n, ATOMS)) * (rng.random((n, ATOMS)) < 0.06)
    return (codes @ dictionary + 0.02 * rng.normal(size=(n, WIDTH))).astype("float32")


x = activations(4096)
y = x
x_test = activations(512)

kmp.enable()


class L1Penalty(keras.layers.Layer):
    def __init__(self, coefficient, **kwargs):
        super().__init__(**kwargs)
        self.coefficient = coefficient

    def call(self, codes):
        self.add_loss(self.coefficient * keras.ops.sum(keras.ops.abs(codes)))
        return codes


model = keras.Sequential(
    [
        keras.Input((WIDTH,), name="activations"),
        keras.layers.Dense(1024, activation="relu", name="encoder"),
        L1Penalty(1e-8, name="sparsity"),
        keras.layers.Dense(WIDTH, name="decoder"),
    ]
)
model.compile(optimizer=keras.optimizers.Adam(learning_rate=3e-3), loss="mse")
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x, y, epochs=13, batch_size=512, verbose=0, callbacks=callbacks)

prediction = model.predict(x_test, verbose=0).astype("float32")
score = float(1 - np.mean((prediction - x_test) ** 2) / np.var(x_test))
