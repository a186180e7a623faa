"""The demo's experiment: one network on real data, trained in three ways.

They are float32, float16 with Keras alone, and float16 with kmp. The network classifies
scikit-learn's digits. A constant of its attention is infinite in float16, and its loss is NaN.
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from kmp import callbacks
from kmp.backend.keras_internals import global_policy
from kmp.enabling import enable
from kmp.records import Run, load_run

MASK = -1e9
BATCH_SIZE = 32
_TRAINING_SHARE = 0.8
_SAMPLES = 60  # of the gradients in a training


class Data(NamedTuple):
    """Images and their labels.

    Args:
        images: Float32 images of shape `(images, columns, pixels)`, between 0 and 1.
        labels: The digits that they show.
    """

    images: np.ndarray
    labels: np.ndarray


class Parts(NamedTuple):
    """The parts of the data."""

    training: Data
    validation: Data


class Setup(NamedTuple):
    """How the network is trained.

    Args:
        name: For the table and for folders.
        policy: The dtype policy.
        with_kmp: Whether kmp is enabled. Otherwise Keras alone has the policy.
    """

    name: str
    policy: str
    with_kmp: bool = True


class Length(NamedTuple):
    """How long a training is."""

    epochs: int
    steps_per_epoch: int

    @property
    def steps(self) -> int:
        """The number of training steps."""
        return self.epochs * self.steps_per_epoch


class RepairedLayers(NamedTuple):
    """The step at which kmp set layers to float32, and the paths of these layers."""

    step: int
    layers: list[str]

    @property
    def names(self) -> str:
        """The names of the layers within the network."""
        return ", ".join(repr(path.partition("/")[2]) for path in self.layers)


@dataclass(frozen=True)
class Result:
    """What a training led to.

    Args:
        accuracies: The validation accuracy before the training and after each epoch.
        losses: The loss of each epoch.
        updates: Number of steps that updated the weights.
        loss_scale: The loss scale at the end; `None` if the loss is not scaled.
        seconds: Of the training.
        warnings: The warnings of the training, as Python prints them.
        run: The records. `None` without kmp, which nothing records.
    """

    accuracies: list[float]
    losses: list[float]
    updates: int
    loss_scale: float | None
    seconds: float
    warnings: list[str]
    run: Run | None

    @property
    def accuracy(self) -> float:
        """The validation accuracy after the training."""
        return self.accuracies[-1]

    @property
    def repairs(self) -> list[RepairedLayers]:
        """The repairs, oldest first."""
        rows = self.run.rows if self.run else []
        return [RepairedLayers(row.step, row.fallback) for row in rows if row.fallback]


Results = dict[Setup, list[Result]]  # one for each seed


class ColumnAttention(keras.layers.Layer):
    """Attends to the columns of an image that are not blank.

    The constant of the mask is infinite in float16, and 0 times infinity is NaN.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.query = keras.layers.Dense(8, name="query")
        self.key = keras.layers.Dense(8, name="key")

    def call(self, columns: Any) -> Any:
        """Returns weighted means of the columns."""
        scores = self.query(columns) @ ops.transpose(self.key(columns), (0, 2, 1))
        is_blank = ops.cast(ops.all(columns == 0, axis=-1), scores.dtype)
        return ops.softmax(scores + is_blank[:, None] * MASK) @ columns


def load() -> Parts:
    """Returns scikit-learn's digits.

    Raises:
        ImportError: If scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "The demo's data set is part of scikit-learn: pip install 'kmp[demo]'"
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    columns = pixels.reshape(-1, 8, 8).transpose(0, 2, 1)
    images = columns.astype("float32") / 16
    order = np.random.default_rng(0).permutation(len(labels))
    training, validation = np.split(order, [int(len(order) * _TRAINING_SHARE)])
    return Parts(
        Data(images[training], labels[training]),
        Data(images[validation], labels[validation]),
    )


def setups(policy: str) -> list[Setup]:
    """Returns the setups: float32, Keras' float16 if the policy is of float16, and kmp's."""
    dtype = policy.removeprefix("mixed_")
    compared = [Setup("float32", "float32")]
    if dtype == "float16":
        compared.append(Setup("float16 in Keras", policy, with_kmp=False))
    if dtype != "float32":
        compared.append(Setup(f"{dtype} with kmp", policy))
    return compared


def network() -> keras.Model:
    """Returns the compiled network. The dtype policy decides in which precision it computes."""
    model = keras.Sequential(
        [
            keras.Input((8, 8)),
            ColumnAttention(name="attention"),
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(64, activation="relu", name="hidden"),
            keras.layers.Dense(10, activation="softmax", dtype="float32", name="digit"),
        ],
        name="digits",
    )
    # On a GPU, XLA may keep more bits between operations, which would hide the fault.
    model.compile(
        keras.optimizers.Adam(3e-3),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        jit_compile=False,
    )
    return model


def train(
    setup: Setup,
    seed: int,
    length: Length,
    parts: Parts,
    log_dir: Path,
    on_step: Callable[[], None] | None = None,
) -> Result:
    """Trains one setup with one seed.

    Args:
        setup: The setup.
        seed: The seed of the weights and of the order of the images.
        length: Of the training.
        parts: What `load` returns.
        log_dir: Where kmp writes its log.
        on_step: Called after each step.
    """
    keras.utils.set_random_seed(seed)
    policy = enable(setup.policy) if setup.with_kmp else global_policy(setup.policy)
    with policy, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        model = network()
        before = model.evaluate(*parts.validation, batch_size=BATCH_SIZE, verbose=0)[1]
        attached = []
        if setup.with_kmp:
            every = max(1, length.steps // _SAMPLES)
            attached += callbacks.defaults(log_dir, every)
        if on_step:
            attached.append(
                keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: on_step())
            )
        started = time.perf_counter()
        history = model.fit(
            _batches(parts.training, seed),
            epochs=length.epochs,
            steps_per_epoch=length.steps_per_epoch,
            validation_data=parts.validation,
            validation_batch_size=BATCH_SIZE,
            callbacks=attached,
            shuffle=False,
            verbose=0,
        ).history
        seconds = time.perf_counter() - started
    run = load_run(log_dir) if setup.with_kmp else None
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    loss_scale = getattr(model.optimizer, "dynamic_scale", None)
    if run is not None and not run.has_loss_scale:  # as in bfloat16
        loss_scale = None
    return Result(
        accuracies=[before, *history["val_accuracy"]],
        losses=history["loss"],
        updates=int(inner.iterations),
        loss_scale=None if loss_scale is None else float(loss_scale),
        seconds=seconds,
        warnings=[f"{each.category.__name__}: {each.message}" for each in caught],
        run=run,
    )


def _batches(data: Data, seed: int) -> tf.data.Dataset:
    """Returns batches of the images in random order, without end."""
    shuffled = tf.data.Dataset.from_tensor_slices(data).shuffle(len(data.labels), seed=seed)
    batches = shuffled.repeat().batch(BATCH_SIZE, drop_remainder=True)
    return batches.prefetch(tf.data.AUTOTUNE)
