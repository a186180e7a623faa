"""What callbacks find in a training loop in bfloat16 that scales no loss."""

import re

import keras
import tensorflow as tf
from keras import layers

import kmp


class Division(layers.Layer):
    """Divides by 0.001, which bfloat16 rounds to 0."""

    def call(self, inputs):
        return inputs / (tf.cast(1.0, inputs.dtype) - tf.cast(0.999, inputs.dtype))


def test_replay_finds_the_operation_in_a_loop_whose_loss_is_not_known():
    with kmp.enable("mixed_bfloat16"):
        model = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(4),
                Division(name="division"),
                layers.Dense(1, dtype="float32"),
            ]
        )
        optimizer = kmp.wrap("adam")
        model.compile(optimizer)

        @tf.function
        def step(x):
            with kmp.guard(optimizer, model):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(model(x, training=True)))
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply(gradients, model.trainable_variables)

        (monitor,) = kmp.callbacks.defaults(on_nonfinite="ignore", repair=False)
        callbacks = keras.callbacks.CallbackList([monitor], model=model)
        callbacks.on_train_begin()
        for index in range(12):
            callbacks.on_train_batch_begin(index)
            step(tf.random.normal((32, 4)))
            callbacks.on_train_batch_end(index)
        callbacks.on_train_end()
    finding = kmp.advise(monitor.run)[0]
    assert finding.title == "Layer 'division' divides by 0: in bfloat16 the divisor is 0."
    assert re.search(
        r"RealDiv in layer 'division' \(.*scaling.py, line \d+\) is the first to return inf, for 0;"
        " in float32 all outputs are finite$",
        finding.evidence,
    )
    assert finding.tried.endswith("the outputs and gradients for the batch are finite")
