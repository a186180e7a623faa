"""The main job on real data: one model trained in float32, in float16 as it is, and in float16 with kmp.

The model denoises an image and names the digit on it, with one trunk for both tasks. The digit's loss has a small
weight, as auxiliary losses do, so its gradients are small: float16 flushes many of them to zero, and the digits suffer.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kmp import callbacks, layers
from kmp.optimizer import LossScaleOptimizer
from kmp.policy import enable, wrap
from kmp.records import Run, Snapshot

SEEDS = (0, 1, 2)
BATCH_SIZE = 256
LABEL_WEIGHT = 1e-5
GROWTH_INTERVAL = 10
_NOISE = 0.3
_TEST_SHARE = 0.2


@dataclass(frozen=True)
class Data:
    """Noisy images, clean ones and labels; images are flat, float32, with pixels from 0 to 1 before the noise."""

    noisy: np.ndarray
    clean: np.ndarray
    labels: np.ndarray

    @property
    def targets(self) -> dict[str, np.ndarray]:
        """What the model is to make of `noisy`, by output."""
        return {"image": self.clean, "label": self.labels}


@dataclass(frozen=True)
class Way:
    """One way to train: its name, the policy, and whether kmp scales the loss."""

    name: str
    policy: str
    scaled: bool


@dataclass(frozen=True)
class Result:
    """What came of one training: validation accuracy, seconds, the last reading and all readings."""

    accuracy: float
    seconds: float
    snapshot: Snapshot
    run: Run

    @property
    def zeros(self) -> float:
        """Share of gradient elements that were exactly zero, the median over the sampled steps."""
        return statistics.median(histogram.zero_fraction for histogram in self.run.histograms)


def load(name: str) -> tuple[Data, Data]:
    """Loads a data set and returns its training and validation part.

    Args:
        name: `"digits"`, which scikit-learn ships, or `"cifar10"`, which Keras downloads.

    Raises:
        ImportError: If scikit-learn is missing.
    """
    images, labels = {"digits": _digits, "cifar10": _cifar10}[name]()
    random = np.random.default_rng(0)
    order = random.permutation(len(images))
    clean = images.reshape(len(images), -1).astype("float32")[order]
    noisy = (clean + random.normal(0.0, _NOISE, clean.shape)).astype("float32")
    split = int(len(images) * (1 - _TEST_SHARE))
    parts = (slice(None, split), slice(split, None))
    train, test = (Data(noisy[part], clean[part], labels[order][part]) for part in parts)
    return train, test


def ways(mixed_policy: str) -> list[Way]:
    """Returns the ways to compare: float32, the policy without a loss scale, and float16 with kmp's."""
    dtype = mixed_policy.removeprefix("mixed_")
    found = [Way("float32", "float32", scaled=False)]
    if dtype != "float32":
        found.append(Way(f"{dtype}, no loss scale", mixed_policy, scaled=False))
    if dtype == "float16":
        found.append(Way(f"{dtype} with kmp", mixed_policy, scaled=True))
    return found


def train(
    way: Way, seed: int, steps: int, parts: tuple[Data, Data], log_dir: Path, on_step: Callable[[], None]
) -> Result:
    """Trains the model in one way with one seed, logging into `log_dir`, and scores it on the validation part."""
    keras.utils.set_random_seed(seed)
    with enable(way.policy, growth_interval=GROWTH_INTERVAL):
        model = _model(parts[0].clean.shape[1], classes=int(parts[0].labels.max()) + 1)
        _compile(model, way.scaled)
        readers = callbacks.defaults(log_dir, every_n_steps=max(1, steps // 60))
        tick = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: on_step())
        started = time.perf_counter()
        batches = _batches(parts[0], seed)
        model.fit(batches, steps_per_epoch=steps, callbacks=[*readers, tick], shuffle=False, verbose=0)
        seconds = time.perf_counter() - started
        scores = model.evaluate(parts[1].noisy, parts[1].targets, batch_size=BATCH_SIZE, return_dict=True, verbose=0)
    return Result(scores["label_accuracy"], seconds, model.optimizer.snapshot(), Run.load(log_dir))


def _model(pixels: int, classes: int) -> keras.Model:
    dense = keras.layers.Dense
    noisy = keras.Input((pixels,))
    trunk = dense(128, activation="relu")(dense(128, activation="relu")(noisy))
    image = dense(pixels, dtype="float32", name="image")(dense(128, activation="relu")(trunk))
    label = layers.Softmax(name="label")(dense(classes)(dense(128, activation="relu")(trunk)))
    return keras.Model(noisy, {"image": image, "label": label})


def _compile(model: keras.Model, scaled: bool) -> None:
    adam = keras.optimizers.Adam(2e-3)
    # A fixed scale of 1 is no scale: it is there for the counters, so that all ways are measured alike.
    optimizer = wrap(adam) if scaled else LossScaleOptimizer(adam, loss_scale=1.0)
    model.compile(
        optimizer,
        loss={"image": "mse", "label": "sparse_categorical_crossentropy"},
        loss_weights={"image": 1.0, "label": LABEL_WEIGHT},
        metrics={"label": "accuracy"},
    )


def _batches(data: Data, seed: int) -> Any:
    import tensorflow as tf

    examples = tf.data.Dataset.from_tensor_slices((data.noisy, data.targets)).cache()
    shuffled = examples.shuffle(len(data.labels), seed=seed).repeat()
    return shuffled.batch(BATCH_SIZE, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def _digits() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("The demo's data come with scikit-learn: pip install 'kmp[demo]'") from error
    digits = load_digits()
    return digits.images / 16.0, digits.target


def _cifar10() -> tuple[np.ndarray, np.ndarray]:
    try:
        (train_images, train_labels), (test_images, test_labels) = keras.datasets.cifar10.load_data()
    except Exception as error:  # Keras raises no kind of its own
        raise ConnectionError(f"CIFAR-10 could not be downloaded: {error}") from error
    images, labels = np.concatenate([train_images, test_images]), np.concatenate([train_labels, test_labels])
    return images / 255.0, labels.ravel()
