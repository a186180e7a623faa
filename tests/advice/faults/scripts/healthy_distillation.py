"""Sound: a train_step adds a divergence from a frozen teacher to the loss, and keeps a moving average in float32."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import kmp


class Distiller(keras.Model):
    def __init__(self, teacher, student):
        super().__init__()
        self.teacher, self.student = teacher, student
        self.teacher.trainable = False
        self.average = [tf.Variable(weight, trainable=False) for weight in student.trainable_variables]

    def call(self, x, training=False):
        return self.student(x, training=training)

    def train_step(self, data):
        x, y = data
        expected = ops.softmax(ops.cast(self.teacher(x, training=False), "float32") / 3.0)
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = ops.mean(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))
            loss += ops.mean(keras.losses.kl_divergence(expected, ops.softmax(logits / 3.0)))
            scaled_loss = self.optimizer.scale_loss(loss)
        gradients = self.optimizer.unscale(tape.gradient(scaled_loss, self.trainable_variables))
        self.optimizer.apply(tf.clip_by_global_norm(gradients, 1.0)[0], self.trainable_variables)
        for average, weight in zip(self.average, self.trainable_variables, strict=True):
            average.assign_add(0.01 * (tf.convert_to_tensor(weight) - average))
        return {"loss": loss}


keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

x = rng.normal(size=(2048, 12)).astype("float32")
y = np.tanh(x @ rng.normal(size=(12, 4))).argmax(axis=1)

teacher = keras.Sequential([keras.Input((12,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(4)])
layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(4, dtype="float32")]
model = Distiller(teacher, keras.Sequential([keras.Input((12,)), *layers]))
model.compile(optimizer=keras.optimizers.Adam(learning_rate=3e-3))
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x[:1536], y[:1536], batch_size=32, epochs=4, verbose=0, callbacks=callbacks)

score = float(np.mean(model.predict(x[1536:], verbose=0).argmax(axis=1) == y[1536:]))
