"""The demo's experiment: one model on real data, trained in three ways.

In float32, in float16 without loss scaling, and in float16 with kmp.
The model denoises scikit-learn's digits and also classifies them, with one trunk for both tasks.
The classification loss has a small weight, as auxiliary losses do, so its gradients are small:
float16 flushes many of them to zero, and the accuracy drops.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kmp import callbacks, layers
from kmp.enabling import enable, wrap
from kmp.optimizer import LossScaleOptimizer
from kmp.records import Run, load_run

SEEDS = (0, 1, 2)
BATCH_SIZE = 256
LABEL_WEIGHT = 1e-5
GROWTH_INTERVAL = 20
_NOISE = 0.3
_TEST_SHARE = 0.2
_MOST_EPOCHS = 8


class Data(NamedTuple):
    """Images and their labels.

    Args:
        noisy: Float32 images with noise, of shape `(images, pixels)`.
        clean: The same images without it.
        labels: Their integer labels.
    """

    noisy: np.ndarray
    clean: np.ndarray
    labels: np.ndarray


class Variant(NamedTuple):
    """How the model is trained.

    Args:
        name: For the table and for folders.
        policy: The dtype policy.
        scaled: Whether kmp scales the loss.
    """

    name: str
    policy: str
    scaled: bool


@dataclass(frozen=True)
class Result:
    """Validation accuracy of a training, its seconds, and its records."""

    accuracy: float
    seconds: float
    run: Run

    @property
    def zeros(self) -> float:
        """Share of gradient elements that are exactly zero: the median over the sampled steps."""
        return statistics.median(histogram.zero_fraction for histogram in self.run.histograms)


def load() -> tuple[Data, Data]:
    """Returns the training part and the validation part of scikit-learn's digits.

    Raises:
        ImportError: If scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise ImportError(
            "The demo's data set is part of scikit-learn: pip install 'kmp[demo]'"
        ) from error
    images, labels = load_digits(return_X_y=True)
    clean = (images / 16.0).astype("float32")
    noise = np.random.default_rng(0).normal(0.0, _NOISE, clean.shape)
    split = train_test_split(
        (clean + noise).astype("float32"), clean, labels, test_size=_TEST_SHARE, random_state=0
    )
    return Data(*split[0::2]), Data(*split[1::2])


def variants(mixed_policy: str) -> list[Variant]:
    """Returns the variants: float32, the policy without loss scaling, and, for float16, with it."""
    dtype = mixed_policy.removeprefix("mixed_")
    compared = [Variant("float32", "float32", scaled=False)]
    if dtype != "float32":
        compared.append(Variant(f"{dtype} without loss scaling", mixed_policy, scaled=False))
    if dtype == "float16":
        compared.append(Variant(f"{dtype} with kmp", mixed_policy, scaled=True))
    return compared


def train(
    variant: Variant,
    seed: int,
    steps: int,
    parts: tuple[Data, Data],
    log_dir: Path,
    on_step: Callable[[], None],
) -> Result:
    """Trains one variant with one seed, writes its log, and evaluates it on the validation part."""
    (noisy, clean, labels), test = parts
    keras.utils.set_random_seed(seed)
    with enable(variant.policy, growth_interval=GROWTH_INTERVAL):
        adam = keras.optimizers.Adam(2e-3)
        model = _model(clean.shape[1], classes=int(labels.max()) + 1)
        model.compile(
            # A fixed scale of 1 does not scale the loss. It has the counters, so that all variants
            # are measured alike.
            wrap(adam) if variant.scaled else LossScaleOptimizer(adam, loss_scale=1.0),
            loss={"image": "mse", "label": "sparse_categorical_crossentropy"},
            loss_weights={"image": 1.0, "label": LABEL_WEIGHT},
            metrics={"label": "accuracy"},
        )
        targets = {"image": clean, "label": labels}
        examples = tf.data.Dataset.from_tensor_slices((noisy, targets)).cache()
        shuffled = examples.shuffle(len(labels), seed=seed).repeat()
        batches = shuffled.batch(BATCH_SIZE, drop_remainder=True)
        loggers = callbacks.defaults(log_dir, every_n_steps=max(1, steps // 60))
        progress = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: on_step())
        started = time.perf_counter()
        epochs = max(number for number in range(1, _MOST_EPOCHS + 1) if steps % number == 0)
        history = model.fit(
            batches.prefetch(tf.data.AUTOTUNE),
            epochs=epochs,
            steps_per_epoch=steps // epochs,
            validation_data=(test.noisy, {"image": test.clean, "label": test.labels}),
            validation_batch_size=BATCH_SIZE,
            callbacks=[*loggers, progress],
            shuffle=False,
            verbose=0,
        )
        seconds = time.perf_counter() - started
    return Result(history.history["val_label_accuracy"][-1], seconds, load_run(log_dir))


def _model(pixels: int, classes: int) -> keras.Model:
    dense = keras.layers.Dense
    noisy = keras.Input((pixels,))
    trunk = dense(128, activation="relu", name="trunk_1")(noisy)
    trunk = dense(128, activation="relu", name="trunk_2")(trunk)
    image_hidden = dense(128, activation="relu", name="image_hidden")(trunk)
    image = dense(pixels, dtype="float32", name="image")(image_hidden)
    label_hidden = dense(128, activation="relu", name="label_hidden")(trunk)
    logits = dense(classes, name="logits")(label_hidden)
    label = layers.Softmax(name="label")(logits)
    return keras.Model(noisy, {"image": image, "label": label})
