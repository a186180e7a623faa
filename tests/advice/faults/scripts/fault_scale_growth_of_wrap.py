"""A loop's own wrap lets the scale grow after each step by 2^12, as for someone who tries to find the largest scale."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import kmp

keras.utils.set_random_seed(29)
kmp.enable()

peaks = np.random.uniform(5, 91, (6, 3))


def spectra(n):
    mineral = np.random.randint(0, 6, n)
    shift = np.arange(96)[None, None]
    line = np.exp(-(((shift - peaks[mineral][..., None] - np.random.normal(0, 1.5, (n, 1, 1))) / 2.5) ** 2)).sum(1)
    return (line + 0.6 * np.random.normal(size=line.shape))[..., None].astype("float32"), mineral.astype("int32")


model = keras.Sequential(
    [
        keras.Input((96, 1), name="raman_shift"),
        layers.Conv1D(16, 9, strides=2, activation="relu", name="lines"),
        layers.Conv1D(16, 9, strides=2, activation="relu", name="bands"),
        layers.Flatten(name="fingerprint"),
        layers.Dense(6, dtype="float32", name="mineral"),
    ]
)
optimizer = kmp.wrap(keras.optimizers.RMSprop(3e-4), growth_interval=1, growth_factor=2.0**12)
model.compile(optimizer=optimizer)
entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function
def step(x, y):
    with kmp.guard(optimizer, model):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(entropy(y, model(x, training=True)))
        optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)


x, mineral = spectra(3200)
x_test, mineral_test = spectra(600)
callbacks = keras.callbacks.CallbackList(kmp.callbacks.defaults(log_dir="run"), model=model)
callbacks.on_train_begin()
for epoch in range(8):
    callbacks.on_epoch_begin(epoch)
    order = np.random.permutation(len(x)).reshape(-1, 64)
    for index, rows in enumerate(order):
        callbacks.on_train_batch_begin(index)
        step(tf.constant(x[rows]), tf.constant(mineral[rows]))
        callbacks.on_train_batch_end(index)
    callbacks.on_epoch_end(epoch)
callbacks.on_train_end()
score = float(np.mean(np.argmax(model(x_test).numpy(), -1) == mineral_test))
