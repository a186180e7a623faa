"""Sound: residual gates and a head that start at zero, with a learning rate that warms up from zero."""

import keras
import numpy as np

import kmp

keras.utils.set_random_seed(0)
rng = np.random.default_rng(20)
LENGTH, VOCABULARY = 16, 12


def brackets(n):
    tokens = rng.integers(0, VOCABULARY, (n, LENGTH))
    labels = ((tokens == 3).sum(axis=1) > (tokens == 7).sum(axis=1)).astype("int32")
    return tokens.astype("int32"), labels


x, y = brackets(2400)
x_test, y_test = brackets(800)

kmp.enable()


class Gate(keras.layers.Layer):
    def build(self, shape):
        self.alpha = self.add_weight(shape=(), initializer="zeros", name="alpha")

    def call(self, branch):
        return self.alpha * branch


tokens = keras.Input((LENGTH,), dtype="int32", name="tokens")
h = keras.layers.Embedding(VOCABULARY, 24, name="embedding")(tokens)
attended = keras.layers.MultiHeadAttention(3, 8, name="attention")(h, h)
h = keras.layers.Add(name="residual_1")([h, Gate(name="gate_1")(attended)])
inner = keras.layers.Dense(48, activation="gelu", name="expand")(h)
inner = keras.layers.Dense(24, name="contract")(inner)
h = keras.layers.Add(name="residual_2")([h, Gate(name="gate_2")(inner)])
pooled = keras.layers.GlobalAveragePooling1D(name="pooled")(h)
outputs = keras.layers.Dense(2, kernel_initializer="zeros", dtype="float32", name="head")(pooled)
model = keras.Model(tokens, outputs, name="rezero")
schedule = keras.optimizers.schedules.CosineDecay(
    initial_learning_rate=0.0, decay_steps=260, warmup_target=1e-2, warmup_steps=64
)
model.compile(
    optimizer=keras.optimizers.AdamW(learning_rate=schedule, weight_decay=1e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(x, y, epochs=8, batch_size=60, verbose=0, callbacks=callbacks)

logits = model.predict(x_test, verbose=0)
score = float(np.mean(logits.argmax(axis=1) == y_test))
