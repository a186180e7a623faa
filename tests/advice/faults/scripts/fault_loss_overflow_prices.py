"""The loop squares errors of raw prices in the dtype of the prediction, typical for a loop written before float16."""

import keras
import numpy as np
import tensorflow as tf

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

x = rng.normal(size=(768, 8)).astype("float32")
factors = 0.6 * x[:, 0] + 0.5 * np.tanh(2 * x[:, 1]) + 0.4 * np.abs(x[:, 2])
price = (30000 + 6000 * factors[:, None] + rng.normal(scale=200, size=(768, 1))).astype("float32")

model = keras.Sequential(
    [
        keras.Input((8,), name="house"),
        keras.layers.Dense(32, activation="relu", name="hidden_1"),
        keras.layers.Dense(32, activation="relu", name="hidden_2"),
        keras.layers.Dense(1, name="relative_price"),
        keras.layers.Lambda(lambda relative: 6000.0 * relative + 30000.0, name="price"),
    ]
)
optimizer = kmp.wrap(keras.optimizers.Adam(learning_rate=8e-3))
model.compile(optimizer=optimizer)


@tf.function
def train_step(house, target):
    with kmp.guard(optimizer, model):
        with tf.GradientTape() as tape:
            prediction = model(house, training=True)
            error = tf.cast(target, prediction.dtype) - prediction
            loss = tf.reduce_mean(tf.square(error))
            scaled_loss = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled_loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)


callbacks = keras.callbacks.CallbackList(kmp.callbacks.defaults(log_dir="run"), model=model)
callbacks.on_train_begin()
for epoch in range(10):
    callbacks.on_epoch_begin(epoch)
    for index, start in enumerate(range(0, len(x), 32)):
        callbacks.on_train_batch_begin(index)
        train_step(tf.constant(x[start : start + 32]), tf.constant(price[start : start + 32]))
        callbacks.on_train_batch_end(index)
    callbacks.on_epoch_end(epoch)
callbacks.on_train_end()

error = model.predict(x, verbose=0).astype("float32") - price
score = 1.0 - float(np.mean(error**2) / np.var(price))
