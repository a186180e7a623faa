"""Small float32 models of typical architectures.

Each function returns a model and a batch for it.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops


@keras.saving.register_keras_serializable(package="tests.models")
class Block(keras.layers.Layer):
    """Creates its own sublayers and passes its dtype policy to them, as Keras recommends."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.dense = layers.Dense(units, dtype=self.dtype_policy)
        self.normalize = layers.BatchNormalization(dtype=self.dtype_policy)

    def build(self, shape):
        self.dense.build(shape)
        self.normalize.build((*shape[:-1], self.units))

    def call(self, inputs, training=None):
        return self.normalize(self.dense(inputs), training=training)

    def compute_output_shape(self, shape):
        return (*shape[:-1], self.units)

    def get_config(self):
        return super().get_config() | {"units": self.units}


@keras.saving.register_keras_serializable(package="tests.models")
class WithoutDtype(keras.layers.Layer):
    """A layer whose constructor has no `dtype` argument."""

    def __init__(self, name=None):
        super().__init__(name=name)

    def call(self, inputs):
        return inputs * 2.0

    def compute_output_shape(self, shape):
        return shape

    def get_config(self):
        return {"name": self.name}


class OwnStep(keras.Model):
    """Has a `train_step` of its own, which takes the loss of a batch from `loss_of`."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(*data)
            scaled = self.optimizer.scale_loss(loss)
        self.optimizer.apply(
            tape.gradient(scaled, self.trainable_variables), self.trainable_variables
        )
        return {"own_loss": loss}


@keras.saving.register_keras_serializable(package="tests.models")
class Gan(keras.Model):
    """A subclassed model with two networks and a custom `train_step`."""

    def __init__(self, width=8, **kwargs):
        super().__init__(**kwargs)
        self.width = width
        policy = {"dtype": self.dtype_policy}
        self.generator = keras.Sequential(
            [layers.Dense(width, activation="relu", **policy), layers.Dense(6, **policy)],
            name="generator",
        )
        self.discriminator = keras.Sequential(
            [layers.Dense(width, activation="relu", **policy), layers.Dense(1, **policy)],
            name="discriminator",
        )

    def build(self, shape):
        self.generator.build(shape)
        self.discriminator.build((*shape[:-1], 6))
        self.built = True

    def call(self, noise):
        return self.discriminator(self.generator(noise))

    def compile(self, **optimizers):
        super().compile()
        self.optimizers = optimizers

    def train_step(self, data):
        noise, _ = data
        loss = {
            "generator": lambda: -ops.mean(ops.cast(self(noise), "float32")),
            "discriminator": self.score_difference(*data),
        }
        for name, optimizer in self.optimizers.items():
            variables = getattr(self, name).trainable_variables
            with tf.GradientTape() as tape:
                scaled = optimizer.scale_loss(loss[name]())
            optimizer.apply(tape.gradient(scaled, [v.value for v in variables]), variables)
        return {"loss": loss["generator"]()}

    def score_difference(self, noise, real):
        return lambda: ops.mean(ops.cast(self(noise) - self.discriminator(real), "float32"))

    def get_config(self):
        return super().get_config() | {"width": self.width}


@keras.saving.register_keras_serializable(package="tests.models")
class Cube(keras.layers.Layer):
    """Overflows float16 from 41 on."""

    def call(self, x):
        return x * x * x


def classifier():
    hidden = [
        layers.Dense(16, activation="relu", name="dense"),
        layers.BatchNormalization(),
        layers.Dropout(0.1, name="dropout"),
    ]
    model = keras.Sequential(
        [keras.Input((8,)), *hidden, layers.Dense(4, activation="softmax", name="probabilities")]
    )
    return model, _normal(4, 8)


def operations():
    """A functional graph with two outputs and with operations that are not layers."""
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, padding="same", name="first")(layers.Rescaling(1 / 255.0)(inputs))
    x = (
        layers.Conv2D(8, 3, padding="same", name="second")(ops.relu(layers.BatchNormalization()(x)))
        + x
    )
    energy = ops.sum(ops.exp(-ops.power(x, 2)), axis=(1, 2))
    features = layers.Concatenate()([layers.GlobalAveragePooling2D()(x), energy])
    logits = layers.Dense(5, name="logits")(features)
    return keras.Model(inputs, {"logits": logits, "probabilities": ops.softmax(logits)}), _normal(
        2, 8, 8, 3
    )


def text():
    """Recurrent layers, attention and a wrapped output layer."""
    tokens = keras.Input((None,), dtype="int32")
    x = layers.Embedding(50, 8, mask_zero=True)(tokens)
    x = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(x)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 8)(x, x))
    x = layers.Dense(8, activation="gelu")(x)
    return keras.Model(
        tokens, layers.TimeDistributed(layers.Dense(4, activation="softmax"))(x)
    ), _tokens(4, 7)


def autoencoder():
    encoder = keras.Sequential(
        [keras.Input((16,)), layers.Dense(8, activation="relu")], name="encoder"
    )
    decoder = keras.Sequential([keras.Input((8,)), layers.Dense(16)], name="decoder")
    inputs = keras.Input((16,))
    return keras.Model(inputs, decoder(encoder(inputs))), _normal(4, 16)


def siamese():
    """Two inputs with a shared trunk, compared by a Lambda layer."""
    trunk = keras.Sequential(
        [keras.Input((8,)), layers.Dense(8, activation="tanh"), layers.Dense(4)], name="trunk"
    )
    left, right = keras.Input((8,), name="left"), keras.Input((8,), name="right")
    distance = layers.Lambda(lambda pair: abs(pair[0] - pair[1]), output_shape=(4,))(
        [trunk(left), trunk(right)]
    )
    return keras.Model([left, right], layers.Dense(1, activation="sigmoid")(distance)), [
        _normal(4, 8),
        _normal(4, 8),
    ]


def preprocessing():
    normalization = layers.Normalization()
    normalization.adapt(1e5 * _normal(32, 4))
    lookup = layers.StringLookup(output_mode="multi_hot")
    lookup.adapt(np.array(["a", "b", "c"]))
    numbers, words = (
        keras.Input((4,), name="numbers"),
        keras.Input((1,), dtype="string", name="words"),
    )
    features = layers.Concatenate()([normalization(numbers), lookup(words)])
    batch = {
        "numbers": tf.constant(1e5 * _normal(3, 4)),
        "words": tf.constant([["a"], ["c"], ["?"]]),
    }
    return (
        keras.Model(
            {"numbers": numbers, "words": words}, layers.Dense(2)(layers.Dense(8)(features))
        ),
        batch,
    )


def custom_layers():
    inputs = keras.Input((8,))
    return keras.Model(
        inputs, layers.Dense(2)(WithoutDtype(name="without")(Block(6, name="block")(inputs)))
    ), _normal(4, 8)


def gan():
    model, batch = Gan(), _normal(4, 3)
    model(batch)
    return model, batch


ALL = (
    classifier,
    operations,
    text,
    autoencoder,
    siamese,
    preprocessing,
    custom_layers,
    gan,
)


def _normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def _tokens(*shape):
    return np.random.default_rng(0).integers(1, 50, shape).astype("int32")
