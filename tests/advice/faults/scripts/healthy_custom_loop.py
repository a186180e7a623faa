"""Sound: a custom training loop with scale_loss, kmp.guard and gradients that are clipped by hand after unscale."""

import keras
import numpy as np
import tensorflow as tf

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

tokens = np.zeros((768, 13), "int32")
tokens[:, 0] = rng.integers(0, 20, 768)
for position in range(1, 13):
    is_noise = rng.random(768) < 0.1
    tokens[:, position] = np.where(is_noise, rng.integers(0, 20, 768), (7 * tokens[:, position - 1] + 3) % 20)

model = keras.Sequential(
    [
        keras.Input((12,), dtype="int32", name="tokens"),
        keras.layers.Embedding(20, 16, name="embedding"),
        keras.layers.GRU(24, return_sequences=True, name="gru"),
        keras.layers.Dense(20, name="logits"),
    ]
)
loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = kmp.wrap(keras.optimizers.Adam(learning_rate=5e-3))
model.compile(optimizer=optimizer)


@tf.function
def train_step(batch):
    with kmp.guard(optimizer, model):
        with tf.GradientTape() as tape:
            logits = model(batch[:, :-1], training=True)
            scaled_loss = optimizer.scale_loss(loss_function(batch[:, 1:], logits))
        gradients = optimizer.unscale(tape.gradient(scaled_loss, model.trainable_variables))
        gradients, _ = tf.clip_by_global_norm(gradients, 0.5)
        optimizer.apply(gradients, model.trainable_variables, unscaled=True)


callbacks = keras.callbacks.CallbackList(kmp.callbacks.defaults(log_dir="run"), model=model)
callbacks.on_train_begin()
for epoch in range(5):
    callbacks.on_epoch_begin(epoch)
    for index, start in enumerate(range(0, len(tokens), 32)):
        callbacks.on_train_batch_begin(index)
        train_step(tf.constant(tokens[start : start + 32]))
        callbacks.on_train_batch_end(index)
    callbacks.on_epoch_end(epoch)
callbacks.on_train_end()

score = float(np.mean(model.predict(tokens[:, :-1], verbose=0).argmax(axis=-1) == tokens[:, 1:]))
