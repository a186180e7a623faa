"""Sound: a train_step that calls scale_loss on a small loss, so the loss scale lifts its gradients."""

import keras
import numpy as np
import tensorflow as tf

import kmp


class Denoiser(keras.Model):
    def train_step(self, data):
        noisy, clean = data
        with tf.GradientTape() as tape:
            denoised = self(noisy, training=True)
            loss = self.compute_loss(y=clean, y_pred=denoised)
            scaled_loss = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled_loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self.compute_metrics(noisy, clean, denoised)


keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

time = np.arange(32)
clean = np.sin(rng.uniform(0.1, 0.4, (768, 1)) * time + rng.uniform(0, 6, (768, 1)))[..., None].astype("float32")
noisy = (clean + rng.normal(scale=0.5, size=clean.shape)).astype("float32")

inputs = keras.Input((32, 1), name="noisy")
hidden = keras.layers.Conv1D(16, kernel_size=9, padding="same", activation="relu", name="conv_1")(inputs)
hidden = keras.layers.Conv1D(16, kernel_size=9, padding="same", activation="relu", name="conv_2")(hidden)
outputs = keras.layers.Conv1D(1, kernel_size=9, padding="same", name="denoised")(hidden)
model = Denoiser(inputs, outputs)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=3e-3),
    loss=keras.losses.MeanSquaredError(),
    loss_weights=[1e-2],
)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(noisy, clean, batch_size=32, epochs=4, verbose=0, callbacks=callbacks)

error = model.predict(noisy, verbose=0).astype("float32") - clean
score = 1.0 - float(np.mean(error**2) / np.var(clean))
