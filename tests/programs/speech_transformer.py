"""The method of "Automatic Speech Recognition with Transformer".

https://keras.io/examples/audio/transformer_asr/
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

VOCABULARY, LENGTH, UNITS = 12, 10, 16


class TokenEmbedding(layers.Layer):
    def __init__(self):
        super().__init__()
        self.tokens = layers.Embedding(VOCABULARY, UNITS)
        self.positions = layers.Embedding(LENGTH, UNITS)

    def call(self, x):
        return self.tokens(x) + self.positions(tf.range(tf.shape(x)[-1]))


class Block(layers.Layer):
    """Attention to `source` and a dense part, each added to its input and normalized."""

    def __init__(self, causal=False):
        super().__init__()
        self.causal = causal
        self.attention = layers.MultiHeadAttention(num_heads=2, key_dim=UNITS)
        self.dense = keras.Sequential([layers.Dense(2 * UNITS, "relu"), layers.Dense(UNITS)])
        self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
        self.dropout = layers.Dropout(0.1)

    def mask(self, x):
        """Returns a mask of shape (batch, length, length): each position attends to the past."""
        count, length = tf.unstack(tf.shape(x)[:2])
        positions = tf.range(length)
        past = tf.cast(positions[:, None] >= positions, tf.bool)
        return tf.tile(past[None], [count, 1, 1])

    def call(self, x, source, training=False):
        mask = self.mask(x) if self.causal else None
        attended = self.attention(x, source, attention_mask=mask)
        x = self.norms[0](x + self.dropout(attended, training=training))
        return self.norms[1](x + self.dropout(self.dense(x), training=training))


class SpeechTransformer(keras.Model):
    def __init__(self):
        super().__init__()
        self.convolutions = [
            layers.Conv1D(UNITS, 5, strides=2, padding="same", activation="relu") for _ in range(2)
        ]
        self.embedding = TokenEmbedding()
        self.encoder = Block()
        self.decoder, self.cross = Block(causal=True), Block()
        self.classifier = layers.Dense(VOCABULARY)
        self.mean_loss = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.mean_loss]

    def call(self, inputs, training=False):
        sound, tokens = inputs
        for convolution in self.convolutions:
            sound = convolution(sound)
        sound = self.encoder(sound, sound, training=training)
        x = self.embedding(tokens)
        x = self.decoder(x, x, training=training)
        return self.classifier(self.cross(x, sound, training=training))

    def train_step(self, batch):
        tokens, targets = batch["target"][:, :-1], batch["target"][:, 1:]
        with tf.GradientTape() as tape:
            logits = self([batch["source"], tokens], training=True)
            one_hot = tf.one_hot(targets, VOCABULARY)
            mask = tf.math.logical_not(tf.math.equal(targets, 0))
            loss = self.compute_loss(None, one_hot, logits, sample_weight=mask)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.mean_loss.update_state(loss)
        return {"loss": self.mean_loss.result()}


class Warmup(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that grows for some epochs and then decays."""

    def __init__(self, steps_per_epoch):
        super().__init__()
        self.steps_per_epoch = steps_per_epoch

    def __call__(self, step):
        epoch = tf.cast(step // self.steps_per_epoch, "float32")
        return tf.math.minimum(1e-3 + 1e-3 * epoch, tf.math.maximum(5e-4, 8e-3 - 1e-3 * epoch))


def recordings(count):
    """Returns sounds whose features repeat the code of each token, and the tokens."""
    random = np.random.default_rng(0)
    tokens = random.integers(4, VOCABULARY, (count, LENGTH))
    tokens[:, 0] = 2  # the start of a sequence
    tokens[count // 2 :, LENGTH - 2 :] = 0  # padding
    codes = random.normal(size=(VOCABULARY, 13))
    sounds = codes[tokens].repeat(4, axis=1)
    sounds += random.normal(scale=0.1, size=sounds.shape)
    return {"source": sounds.astype("float32"), "target": tokens}


def train(callbacks=(), seed=0):
    keras.utils.set_random_seed(seed)
    data = tf.data.Dataset.from_tensor_slices(recordings(320)).batch(16)
    model = SpeechTransformer()
    model.compile(
        keras.optimizers.Adam(Warmup(steps_per_epoch=20)),
        keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
    )
    return model.fit(data, epochs=6, verbose=0, shuffle=False, callbacks=callbacks).history
