"""Training steps that take the loss scale into account twice."""

import keras
import tensorflow as tf

import kmp
from float16_faults.programs.frame import accuracy, clusters, crossentropy


def fault_unscaled_loss_divided(rng, callbacks):
    """A training step divides the gradients by the loss scale, and the optimizer does so again.

    Typical for a port of a step that unscaled gradients by hand.
    """

    class Classifier(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
                scaled_loss = self.optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled_loss, self.trainable_variables)
            gradients = [gradient / self.optimizer.loss_scale for gradient in gradients]
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    kmp.enable()

    x, y = clusters(rng, 4, 1536, (16,), noise=0.6)
    x_train, y_train, x_test, y_test = x[:1024], y[:1024], x[1024:], y[1024:]

    model = Classifier(
        [
            keras.Input((16,), name="features"),
            keras.layers.Dense(32, activation="relu", name="hidden"),
            keras.layers.Dense(4, name="logits"),
        ]
    )
    model.compile(optimizer=keras.optimizers.SGD(learning_rate=5e-2), loss=crossentropy())
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=6,
        verbose=0,
        callbacks=callbacks,
    )
    return accuracy(model, x_test, y_test)
