"""Sound: attention that sets the scores of padding to -inf, in rows that always keep at least one word."""

import keras
import numpy as np
from keras import ops

import kmp


class MaskedAttention(keras.layers.Layer):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.query = keras.layers.Dense(units, use_bias=False, name="query")
        self.key = keras.layers.Dense(units, use_bias=False, name="key")
        self.value = keras.layers.Dense(units, use_bias=False, name="value")

    def call(self, inputs, is_word):
        scores = ops.matmul(self.query(inputs), ops.transpose(self.key(inputs), (0, 2, 1))) / self.units**0.5
        scores = ops.where(is_word[:, None, :] > 0, scores, -float("inf"))
        return ops.matmul(ops.softmax(scores, axis=-1), self.value(inputs))


keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

length = rng.integers(4, 11, 1024)
is_word = (np.arange(10) < length[:, None]).astype("float32")
tokens = rng.integers(1, 40, size=(1024, 10)).astype("int32")
weight = rng.normal(size=40)
y = ((weight[tokens] * is_word).sum(axis=1) > 0).astype("int32")
data = {"tokens": tokens, "is_word": is_word}

token_input, word_input = keras.Input((10,), dtype="int32", name="tokens"), keras.Input((10,), name="is_word")
embedded = keras.layers.Embedding(40, 16, name="embedding")(token_input)
attended = MaskedAttention(units=16, name="masked_attention")(embedded, word_input)
pooled = keras.layers.GlobalAveragePooling1D(name="average")(attended)
logits = keras.layers.Dense(2, name="logits")(pooled)
model = keras.Model({"tokens": token_input, "is_word": word_input}, logits)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=1e-2),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(data, y, batch_size=32, epochs=4, verbose=0, callbacks=callbacks)

score = float(np.mean(model.predict(data, verbose=0).argmax(axis=1) == y))
