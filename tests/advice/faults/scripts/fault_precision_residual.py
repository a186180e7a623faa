"""A train_step subtracts a base from pressures near 1013 in the dtype of the outputs, which rounds them to halves."""

import keras
import numpy as np
import tensorflow as tf

import kmp


class Barometer(keras.Model):
    """Predicts the difference from the mean pressure."""

    def train_step(self, data):
        x, pressure = data
        with tf.GradientTape() as tape:
            change = self(x, training=True)
            target = tf.cast(pressure, change.dtype) - tf.cast(1013.0, change.dtype)
            loss = tf.reduce_mean(tf.square(tf.cast(target - change, "float32")))
            scaled_loss = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled_loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

x = rng.normal(size=(2048, 4)).astype("float32")
change = 0.06 * np.tanh(x[:, :1]) + 0.03 * x[:, 1:2] * x[:, 2:3]
pressure = (1013.0 + change).astype("float32")

inputs = keras.Input((4,))
hidden = keras.layers.Dense(32, activation="tanh", name="hidden")(inputs)
model = Barometer(inputs, keras.layers.Dense(1, name="change")(hidden))
model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-2))
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x[:1536], pressure[:1536], batch_size=32, epochs=15, verbose=0, callbacks=callbacks)

error = model.predict(x[1536:], verbose=0) - change[1536:]
score = 1.0 - float(np.mean(error**2) / np.var(change[1536:]))
