"""Squared distances from the products of positions near 100 cancel in float16, in a custom training loop."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()


class SquaredDistances(keras.layers.Layer):
    """Returns the squared distances to learned places, as |x|^2 + |p|^2 - 2 xp."""

    def build(self, input_shape):
        around = keras.initializers.RandomUniform(98, 102)
        self.places = self.add_weight(shape=(6, input_shape[-1]), initializer=around, name="places")

    def call(self, x):
        places = ops.convert_to_tensor(self.places)
        squares = ops.sum(x * x, -1, keepdims=True) + ops.sum(places * places, -1)[None]
        return (squares - 2 * ops.matmul(x, ops.transpose(places))) / 10


position = (100 + rng.normal(size=(2048, 2))).astype("float32")
is_near = (((position - 100.3) ** 2).sum(axis=1) < 1.4).astype("int32")

inputs = keras.Input((2,))
hidden = keras.layers.Dense(16, activation="tanh", name="hidden")(SquaredDistances(name="distances")(inputs))
model = keras.Model(inputs, keras.layers.Dense(2, name="logits", dtype="float32")(hidden))
loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = kmp.wrap(keras.optimizers.Adam(learning_rate=1e-2))
model.compile(optimizer=optimizer)


@tf.function
def train_step(x, y):
    with kmp.guard(optimizer, model):
        with tf.GradientTape() as tape:
            scaled_loss = optimizer.scale_loss(loss_function(y, model(x, training=True)))
        optimizer.apply(tape.gradient(scaled_loss, model.trainable_variables), model.trainable_variables)


callbacks = keras.callbacks.CallbackList(kmp.callbacks.defaults(log_dir="run"), model=model)
callbacks.on_train_begin()
for epoch in range(5):
    callbacks.on_epoch_begin(epoch)
    for index, start in enumerate(range(0, 1536, 32)):
        callbacks.on_train_batch_begin(index)
        train_step(tf.constant(position[start : start + 32]), tf.constant(is_near[start : start + 32]))
        callbacks.on_train_batch_end(index)
    callbacks.on_epoch_end(epoch)
callbacks.on_train_end()

score = float(np.mean(model.predict(position[1536:], verbose=0).argmax(axis=1) == is_near[1536:]))
