"""Repairs of a network as people write it."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import kmp
from kmp.callbacks import replay_time

RNG = np.random.default_rng(0)
WORDS, LENGTH, WIDTH = 20, 12, 16


class MaskedAttention(layers.Layer):
    """Attention with a mask of -1e9, which is infinite in float16, and times 0 NaN."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.query, self.key, self.value = (
            layers.Dense(WIDTH, name=name) for name in ("query", "key", "value")
        )

    def call(self, x, is_word):
        scores = ops.matmul(self.query(x), ops.transpose(self.key(x), (0, 2, 1))) / WIDTH**0.5
        scores = scores + (1 - ops.cast(is_word, scores.dtype))[:, None, :] * -1e9
        return ops.matmul(ops.softmax(scores), self.value(x))


def transformer():
    words = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH)(words)
    for index in range(2):
        attended = MaskedAttention(name=f"attention{index}")(
            layers.LayerNormalization()(x), words > 0
        )
        x = layers.Add()([x, attended])
        hidden = layers.Dense(2 * WIDTH, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(WIDTH)(hidden)])
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(words, layers.Dense(1, activation="sigmoid", dtype="float32")(x))


def sentences(count=512):
    """Sentences of word indices, and whether they have more low than high ones."""
    words = RNG.integers(0, WORDS, (count, LENGTH)).astype("int32")
    return words, (np.sum(words < 5, 1) > np.sum(words >= 15, 1)).astype("float32")[:, None]


def trained(data, policy):
    """Returns a trained model, its best accuracy and the records."""
    keras.utils.set_random_seed(1)
    with kmp.enable(policy):
        model = transformer()
        model.compile(
            keras.optimizers.Adam(3e-3),
            "binary_crossentropy",
            metrics=["accuracy"],
            jit_compile=True,
        )
    callbacks = kmp.callbacks.defaults() if policy == "mixed_float16" else []
    history = model.fit(*data, batch_size=16, epochs=6, verbose=0, callbacks=callbacks).history
    return model, max(history["accuracy"]), callbacks[0].run if callbacks else None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*kmp set")
# Of the mask's constant, by NumPy.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_transformer_whose_attention_masks_overflow_scores_as_in_float32_under_xla(monkeypatch):
    monkeypatch.setattr(replay_time, "_MOST_SECONDS", 600.0)  # on a busy machine too
    data = sentences()
    _, sound, _ = trained(data, "float32")
    model, score, run = trained(data, "mixed_float16")
    fallbacks = {path.rpartition("/")[2] for row in run.rows for path in row.fallback or ()}
    assert fallbacks == {"attention0", "attention1"}
    assert sound > 0.93
    assert score == pytest.approx(sound, abs=0.03)
    snapshot = model.optimizer.snapshot()
    assert snapshot.overflow_count <= 8
    assert snapshot.overflows_in_a_row == 0
    assert kmp.advise(run).problems == ()
