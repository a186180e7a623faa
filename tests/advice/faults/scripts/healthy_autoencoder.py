"""Sound: a variational autoencoder whose layer samples, and adds a small divergence, in float32."""

import keras
import numpy as np
from keras import ops

import kmp


class Sampling(keras.layers.Layer):
    def __init__(self, weight, **kwargs):
        super().__init__(**kwargs)
        self.weight = weight
        self.seed_generator = keras.random.SeedGenerator(0)

    def call(self, mean, log_variance):
        mean, log_variance = ops.cast(mean, "float32"), ops.cast(log_variance, "float32")
        divergence = ops.square(mean) + ops.exp(log_variance) - log_variance - 1
        self.add_loss(self.weight * ops.mean(divergence))
        noise = keras.random.normal(ops.shape(mean), dtype="float32", seed=self.seed_generator)
        return ops.cast(mean + ops.exp(0.5 * log_variance) * noise, self.compute_dtype)


keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

images = (np.tanh(rng.normal(size=(1024, 3)) @ rng.normal(size=(3, 64)))).astype("float32")

inputs = keras.Input((64,), name="image")
hidden = keras.layers.Dense(48, activation="relu", name="encoder")(inputs)
mean = keras.layers.Dense(4, name="mean")(hidden)
log_variance = keras.layers.Dense(4, kernel_initializer="zeros", name="log_variance")(hidden)
code = Sampling(weight=1e-3, name="sampling")(mean, log_variance)
hidden = keras.layers.Dense(48, activation="relu", name="decoder")(code)
outputs = keras.layers.Dense(64, name="pixels")(hidden)
model = keras.Model(inputs, outputs)
model.compile(optimizer=keras.optimizers.Adam(learning_rate=5e-3), loss=keras.losses.MeanSquaredError())
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(images, images, batch_size=32, epochs=6, verbose=0, callbacks=callbacks)

error = model.predict(images, verbose=0).astype("float32") - images
score = 1.0 - float(np.mean(error**2) / np.var(images))
