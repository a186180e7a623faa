"""Small models to train, and what 16-bit training gains on them."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmp import layers
from kmp.bench.optimizer_step import BARE, KERAS, MODES, OURS
from kmp.bench.timing import Measurement, alternate, comparison, peak_memory
from kmp.optimizer import LossScaleOptimizer
from kmp.policy import guarding

WITH_CALLBACKS = "kmp + callbacks"
POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")


@dataclass(frozen=True)
class Task:
    """A model and the batch that it is trained on.

    Args:
        build: Returns the model, not compiled.
        x: A batch of inputs.
        y: Integer labels.
        unit: Unit of the throughput: `"images/s"` or `"tokens/s"`.
        units: Images or tokens per batch.
    """

    build: Callable[[], keras.Model]
    x: np.ndarray
    y: np.ndarray
    unit: str
    units: int


def mlp(width: int) -> Task:
    """Returns a task for four dense layers of a width."""
    batch = 128
    x = np.random.default_rng(0).normal(size=(batch, width)).astype("float32")

    def build() -> keras.Model:
        hidden = [keras.layers.Dense(width, activation="relu") for _ in range(4)]
        return keras.Sequential([keras.Input((width,)), *hidden, keras.layers.Dense(10), layers.Softmax()])

    return Task(build, x, np.arange(batch) % 10, "images/s", batch)


def convolutional(channels: int) -> Task:
    """Returns a task for three convolutions with BatchNormalization, the first with a number of channels."""
    batch = 32
    x = np.random.default_rng(0).normal(size=(batch, 32, 32, 3)).astype("float32")

    def build() -> keras.Model:
        blocks = []
        for width in (channels, 2 * channels, 4 * channels):
            blocks.append(keras.layers.Conv2D(width, 3, strides=2, padding="same", use_bias=False))
            blocks += [keras.layers.BatchNormalization(), keras.layers.Activation("relu")]
        head = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10), layers.Softmax()]
        return keras.Sequential([keras.Input((32, 32, 3)), *blocks, *head])

    return Task(build, x, np.arange(batch) % 10, "images/s", batch)


def transformer(size: int, batch: int = 8) -> Task:
    """Returns a task for a transformer block that predicts the next of 64 tokens, with a width of 64 times `size`."""
    width, length, vocabulary = 64 * size, 64, 1000
    x = np.random.default_rng(0).integers(0, vocabulary, (batch, length))

    def build() -> keras.Model:
        tokens = keras.Input((length,), dtype="int32")
        hidden = keras.layers.Embedding(vocabulary, width)(tokens)
        normed = keras.layers.LayerNormalization()(hidden)
        hidden = hidden + keras.layers.MultiHeadAttention(4, width // 4)(normed, normed, use_causal_mask=True)
        expanded = keras.layers.Dense(4 * width, activation="gelu")(keras.layers.LayerNormalization()(hidden))
        hidden = hidden + keras.layers.Dense(width)(expanded)
        return keras.Model(tokens, layers.Softmax()(keras.layers.Dense(vocabulary)(hidden)))

    return Task(build, x, np.roll(x, -1, axis=1), "tokens/s", batch * length)


TASKS: dict[str, Callable[[int], Task]] = {
    "MLP": lambda size: mlp(256 * size),
    "conv net": lambda size: convolutional(16 * size),
    "transformer block": transformer,
}


class StepTimer(keras.callbacks.Callback):
    """Measures the time of all steps but the first, which includes the start of `fit`."""

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if batch in (0, self.params["steps"] - 1):
            tf.test.experimental.sync_devices()  # a GPU runs asynchronously
        self._last = time.perf_counter()
        if batch == 0:
            self._begin = self._last

    @property
    def seconds(self) -> float:
        """Total time of these steps in the last `fit`."""
        return self._last - self._begin


def compiled_model(task: Task, policy: str, variant: str, mode: str) -> keras.Model:
    """Returns a new compiled model of a task.

    Args:
        task: The task.
        policy: The dtype policy of the layers.
        variant: Whether and how the loss is scaled: `BARE`, `KERAS`, `OURS` or `WITH_CALLBACKS`.
        mode: One of `MODES`.
    """
    previous_policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    model = task.build()
    keras.config.set_dtype_policy(previous_policy)
    optimizer: keras.optimizers.Optimizer = keras.optimizers.Adam(1e-4)
    if variant != BARE:
        optimizer = (keras.optimizers.LossScaleOptimizer if variant == KERAS else LossScaleOptimizer)(optimizer)
    options = {"jit_compile": MODES[mode], "auto_scale_loss": False}
    model.compile(optimizer, "sparse_categorical_crossentropy", **options)
    if isinstance(optimizer, LossScaleOptimizer):
        guarding.install(model)
    return model


def batches(task: Task) -> tf.data.Dataset:
    """Returns a data set that repeats the batch of a task without end."""
    return tf.data.Dataset.from_tensors((task.x, task.y)).cache().repeat()


def timed_training(
    model: keras.Model, task: Task, steps: int, extra_callbacks: Sequence[Any] = ()
) -> Callable[[], float]:
    """Returns a function that continues the training with `fit` and returns the mean seconds of a step.

    Args:
        model: A compiled model of the task.
        task: The task.
        steps: Number of steps to time in each call.
        extra_callbacks: Callbacks of the training.
    """
    data = batches(task)
    timer = StepTimer()

    def train() -> float:
        model.fit(data, steps_per_epoch=steps + 1, shuffle=False, verbose=0, callbacks=[*extra_callbacks, timer])
        return timer.seconds / steps

    return train


def trainer(task: Task, policy: str, variant: str, mode: str, steps: int) -> Callable[[], float]:
    """Returns `timed_training` of a `compiled_model`."""
    return timed_training(compiled_model(task, policy, variant, mode), task, steps)


def measure_precisions(size: int, mode: str, steps: int, repeats: int) -> Iterator[list[Measurement]]:
    """Measures the training throughput in each precision, with kmp's loss scaling in float16."""
    for name, make_task in TASKS.items():
        task = make_task(size)
        trainers = {policy: trainer(task, policy, variant_for(policy), mode, steps) for policy in POLICIES}
        rates = {
            policy: [task.units / seconds for seconds in turns]
            for policy, turns in alternate(trainers, repeats).items()
        }
        yield comparison("throughput", name, mode, rates, task.unit)


def memory_of(policy: str, name: str, size: int, mode: str) -> int:
    """Returns the bytes that training a model adds to the peak memory of this process. Call it in a new process."""
    trainer(mlp(256), "float32", BARE, mode, 1)()
    before = peak_memory()
    trainer(TASKS[name](size), policy, variant_for(policy), mode, 2)()
    return peak_memory() - before


def variant_for(policy: str) -> str:
    """Returns how the loss is scaled with a policy: by kmp in float16, and not at all in the others."""
    return OURS if policy == "mixed_float16" else BARE
