"""Float32Fallback on networks as people write them, and in a process that continues a run that was killed."""

import signal
import subprocess
import sys

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


@pytest.fixture(scope="module", params=[(unet, discs), (transformer, sentences)], ids=["unet", "transformer"])
def network(request):
    build, make_data = request.param
    data = make_data()
    return build, data, trained(build, data, "float32")[1]


@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_unet_and_transformer_with_a_planted_overflow_score_as_in_float32(network, jit_compile, monkeypatch):
    monkeypatch.setattr(batch_replayer, "_MOST_SECONDS", 600.0)  # on a busy machine too
    build, data, sound = network
    model, score, run = trained(build, data, "mixed_float16", jit_compile)
    expected = {"standardize"} if build is unet else {"attention0", "attention1"}
    assert {path.rpartition("/")[2] for row in run.rows for path in row.get("fallback", ())} == expected
    assert sound > 0.93
    assert score == pytest.approx(sound, abs=0.03)
    snapshot = model.optimizer.snapshot()
    assert snapshot.overflow_count <= 8
    assert snapshot.overflows_in_a_row == 0
    assert kmp.advise(run).problems == ()


RESUMABLE = """
import os, signal, sys
import keras, kmp, numpy as np

folder, kill_at = sys.argv[1], int(sys.argv[2])

class Cube(keras.layers.Layer):
    def call(self, x):
        return x * x * x

class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.snapshot().step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

keras.utils.set_random_seed(0)
kmp.enable()
model = keras.Sequential([keras.Input((4,)), Cube(name="cube"), keras.layers.BatchNormalization(name="norm"),
                          keras.layers.Dense(1, name="head")])
model.compile(keras.optimizers.Adam(1e-2), "mse", jit_compile=False)
x = np.random.default_rng(0).uniform(20, 60, (64, 4)).astype("float32")
backup = keras.callbacks.BackupAndRestore(folder + "/backup", double_checkpoint=True)
callbacks = [*kmp.callbacks.defaults(folder + "/run"), backup, Kill()]
fit = model.fit(x, x[:, :1] > 40, batch_size=8, epochs=6, shuffle=False, verbose=0, callbacks=callbacks)
print(len(fit.epoch), fit.history["loss"][-1], [layer.compute_dtype for layer in model.layers])
"""


def test_killed_run_resumes_in_a_new_process_with_the_same_layers_before_its_first_step(tmp_path):
    def process(folder, kill_at):
        command = [sys.executable, "-c", RESUMABLE, str(folder), str(kill_at)]
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)

    killed = process(tmp_path / "killed", 20)  # in the third epoch
    assert killed.returncode == -signal.SIGKILL
    skipped = kmp.load_run(tmp_path / "killed" / "run").last("overflow_count")
    resumed, unbroken = process(tmp_path / "killed", 0), process(tmp_path / "unbroken", 0)
    epochs, loss, dtypes = resumed.stdout.split(maxsplit=2)
    assert epochs == "4"
    assert dtypes == "['float32', 'float32', 'float16']\n"
    assert "As at step 1, before the training was resumed, kmp set 'sequential/cube'" in resumed.stderr
    run = kmp.load_run(tmp_path / "killed" / "run")
    assert run.last("overflow_count") == skipped  # no step after the resume was skipped
    assert len([row for row in run.rows if "fallback" in row]) == 1
    assert kmp.advise(run).problems == ()
    assert float(loss) == pytest.approx(float(unbroken.stdout.split()[1]), rel=1e-3)
