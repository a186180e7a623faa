"""Sound: losses that are sums over the batch, with an initial loss scale of 2^24 and a clipped global norm."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(24)
SIZE, LATENT = 16, 6


def blobs(n):
    grid = np.linspace(-1, 1, SIZE)
    cy, cx = rng.uniform(-0.5, 0.5, (2, n, 1, 1))
    width = rng.uniform(0.2, 0.5, (n, 1, 1))
    images = np.exp(-((grid[:, None] - cy) ** 2 + (grid[None, :] - cx) ** 2) / (2 * width**2))
    return images.reshape(n, SIZE * SIZE).astype("float32")


x = blobs(2000)
y = x
x_test = blobs(400)

kmp.enable(initial_scale=2.0**24)


class Sampling(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(dtype="float32", **kwargs)
        self.noise = keras.random.SeedGenerator(5)

    def call(self, mean, log_variance, training=None):
        kl = -0.5 * keras.ops.sum(1 + log_variance - keras.ops.square(mean) - keras.ops.exp(log_variance))
        self.add_loss(0.1 * kl)
        if not training:
            return mean
        return mean + keras.ops.exp(0.5 * log_variance) * keras.random.normal(keras.ops.shape(mean), seed=self.noise)


inputs = keras.Input((SIZE * SIZE,), name="pixels")
h = keras.layers.Dense(96, activation="relu", name="encoder")(inputs)
mean = keras.layers.Dense(LATENT, name="mean")(h)
log_variance = keras.layers.Dense(LATENT, kernel_initializer="zeros", name="log_variance")(h)
latent = Sampling(name="sampling")(mean, log_variance)
h = keras.layers.Dense(96, activation="relu", name="decoder")(latent)
outputs = keras.layers.Dense(SIZE * SIZE, name="reconstruction")(h)
model = keras.Model(inputs, outputs, name="vae")
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=3e-3, global_clipnorm=10.0),
    loss=keras.losses.MeanSquaredError(reduction="sum"),
    loss_weights=[float(SIZE * SIZE)],
)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x, y, epochs=10, batch_size=100, verbose=0, callbacks=callbacks)

prediction = model.predict(x_test, verbose=0).astype("float32")
score = float(1 - np.mean((prediction - x_test) ** 2) / np.var(x_test))
