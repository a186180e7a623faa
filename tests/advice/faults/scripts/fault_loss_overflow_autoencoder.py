"""A layer adds up squared pixel errors of 0 to 255 in float16, typical for an autoencoder that holds its own loss."""

import keras
import numpy as np
from keras import ops

import kmp


class ReconstructionLoss(keras.layers.Layer):
    def call(self, image, decoded):
        squares = ops.square(image - decoded)
        self.add_loss(ops.mean(ops.sum(squares, axis=-1)) * 1e-4)
        return decoded


keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

codes = rng.normal(size=(1024, 4))
images = (255 / (1 + np.exp(-codes @ rng.normal(size=(4, 64))))).astype("float32")

inputs = keras.Input((64,), name="image")
hidden = keras.layers.Rescaling(scale=1 / 255, name="rescaling")(inputs)
hidden = keras.layers.Dense(48, activation="relu", name="encoder")(hidden)
code = keras.layers.Dense(6, name="code")(hidden)
hidden = keras.layers.Dense(48, activation="relu", name="decoder")(code)
hidden = keras.layers.Dense(64, activation="sigmoid", name="pixels")(hidden)
decoded = keras.layers.Rescaling(scale=255.0, name="decoded")(hidden)
outputs = ReconstructionLoss(name="reconstruction_loss")(inputs, decoded)
model = keras.Model(inputs, outputs)
model.compile(optimizer=keras.optimizers.Adam(learning_rate=8e-3))
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(images, batch_size=32, epochs=6, verbose=0, callbacks=callbacks)

error = model.predict(images, verbose=0).astype("float32") - images
score = 1.0 - float(np.mean(error**2) / np.var(images))
