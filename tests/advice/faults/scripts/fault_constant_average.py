"""A masked mean adds 1e-10 to a count that can be zero, which float16 rounds to zero, typical for empty texts."""

import keras
import numpy as np
from keras import ops

import kmp


class MaskedAverage(keras.layers.Layer):
    def call(self, embedded, is_word):
        total = ops.sum(embedded * is_word[:, :, None], axis=1)
        return total / (ops.sum(is_word, axis=1, keepdims=True) + 1e-10)


keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
kmp.enable()

length = rng.integers(0, 9, 1280)
is_word = (np.arange(8) < length[:, None]).astype("float32")
tokens = (rng.integers(1, 50, size=(1280, 8)) * is_word).astype("int32")
meaning = rng.normal(size=50)
y = ((meaning[tokens] * is_word).sum(axis=1) > 0).astype("float32")[:, None]
train = {"tokens": tokens[:1024], "is_word": is_word[:1024]}
test = {"tokens": tokens[1024:], "is_word": is_word[1024:]}

token_input, word_input = keras.Input((8,), dtype="int32", name="tokens"), keras.Input((8,), name="is_word")
embedded = keras.layers.Embedding(50, 12, name="embedding")(token_input)
averaged = MaskedAverage(name="masked_average")(embedded, word_input)
hidden = keras.layers.Dense(16, activation="relu", name="hidden")(averaged)
logit = keras.layers.Dense(1, name="logit")(hidden)
model = keras.Model({"tokens": token_input, "is_word": word_input}, logit)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=1e-2),
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
)
callbacks = kmp.callbacks.defaults(log_dir="run")
model.fit(train, y[:1024], batch_size=32, epochs=5, verbose=0, callbacks=callbacks)

score = float(np.mean((model.predict(test, verbose=0) > 0) == (y[1024:] > 0)))
