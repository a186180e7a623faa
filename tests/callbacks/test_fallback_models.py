"""Float32Fallback on networks as people write them."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import kmp
from kmp.callbacks import batch_replayer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*kmp set"),
    pytest.mark.filterwarnings("ignore:overflow encountered in cast"),  # of the mask's constant, by NumPy
]

RNG = np.random.default_rng(0)
SIZE, WORDS, LENGTH, WIDTH = 16, 20, 12, 16


class Standardize(layers.Layer):
    """Standardizes each image; a square of its raw values overflows float16."""

    def call(self, x):
        mean = ops.mean(x, axis=(1, 2), keepdims=True)
        variance = ops.mean(x * x, axis=(1, 2), keepdims=True) - mean * mean
        return (x - mean) / ops.sqrt(variance + 1e-3)


class MaskedAttention(layers.Layer):
    """Attention with a mask of -1e9, which is infinite in float16, and times 0 NaN."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.query, self.key, self.value = (layers.Dense(WIDTH, name=name) for name in ("query", "key", "value"))

    def call(self, x, is_word):
        scores = ops.matmul(self.query(x), ops.transpose(self.key(x), (0, 2, 1))) / WIDTH**0.5
        scores = scores + (1 - ops.cast(is_word, scores.dtype))[:, None, :] * -1e9
        return ops.matmul(ops.softmax(scores), self.value(x))


def unet():
    def convolutions(x, filters):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        return layers.ReLU()(layers.BatchNormalization()(x))

    inputs = keras.Input((SIZE, SIZE, 1))
    fine = convolutions(Standardize(name="standardize")(inputs), 8)
    coarse = convolutions(layers.MaxPooling2D()(fine), 16)
    x = convolutions(layers.MaxPooling2D()(coarse), 32)
    x = convolutions(layers.Concatenate()([layers.UpSampling2D()(x), coarse]), 16)
    x = convolutions(layers.Concatenate()([layers.UpSampling2D()(x), fine]), 8)
    return keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid", dtype="float32")(x))


def discs(count=256):
    """Images of a scanner with a bright disc, and the masks of the discs."""
    centers, radii = RNG.integers(4, 12, (2, count, 1, 1)), RNG.integers(2, 5, (count, 1, 1))
    rows, columns = np.mgrid[:SIZE, :SIZE]
    masks = ((rows - centers[0]) ** 2 + (columns - centers[1]) ** 2 <= radii**2)[..., None].astype("float32")
    return 1000 + 400 * (masks + 0.3 * RNG.normal(size=masks.shape)).astype("float32"), masks


def transformer():
    words = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH)(words)
    for index in range(2):
        attended = MaskedAttention(name=f"attention{index}")(layers.LayerNormalization()(x), words > 0)
        x = layers.Add()([x, attended])
        hidden = layers.Dense(2 * WIDTH, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(WIDTH)(hidden)])
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(words, layers.Dense(1, activation="sigmoid", dtype="float32")(x))


def sentences(count=512):
    """Sentences of word indices, and whether they have more low than high ones."""
    words = RNG.integers(0, WORDS, (count, LENGTH)).astype("int32")
    return words, (np.sum(words < 5, 1) > np.sum(words >= 15, 1)).astype("float32")[:, None]


def trained(build, data, policy, jit_compile=False):
    """Returns a trained model, its best accuracy and the records."""
    keras.utils.set_random_seed(1)
    optimizer = keras.optimizers.Adam(3e-3)
    with kmp.enable(policy):
        model = build()
        model.compile(optimizer, "binary_crossentropy", metrics=["accuracy"], jit_compile=jit_compile)
    callbacks = kmp.callbacks.defaults() if policy == "mixed_float16" else []
    history = model.fit(*data, batch_size=16, epochs=6, verbose=0, callbacks=callbacks).history
    return model, max(history["accuracy"]), callbacks[0].run if callbacks else None


@pytest.mark.parametrize(
    ("build", "make_data", "jit_compile", "expected"),
    [
        (unet, discs, True, {"standardize"}),
        (transformer, sentences, False, {"attention0", "attention1"}),
    ],
    ids=["U-Net under XLA", "transformer in graph mode"],
)
def test_network_with_a_planted_overflow_scores_as_in_float32(build, make_data, jit_compile, expected, monkeypatch):
    monkeypatch.setattr(batch_replayer, "_MOST_SECONDS", 600.0)  # on a busy machine too
    data = make_data()
    _, sound, _ = trained(build, data, "float32")
    model, score, run = trained(build, data, "mixed_float16", jit_compile)
    assert {path.rpartition("/")[2] for row in run.rows for path in row.get("fallback", ())} == expected
    assert sound > 0.93
    assert score == pytest.approx(sound, abs=0.03)
    snapshot = model.optimizer.snapshot()
    assert snapshot.overflow_count <= 8
    assert snapshot.overflows_in_a_row == 0
    assert kmp.advise(run).problems == ()
