"""What loss scaling and callbacks add to a training step, and what a lower precision gives: three kinds of model."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmp import callbacks, layers
from kmp.backend import global_policy
from kmp.bench.optimizer_step import BARE, KERAS, MODES, OURS
from kmp.bench.timing import Measured, compared, peak_memory, take_turns
from kmp.optimizer import LossScaleOptimizer
from kmp.policy import skipped_step_rollback

WITH_CALLBACKS = "kmp + callbacks"
POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")


@dataclass(frozen=True)
class Task:
    """A model to train, and what it is trained on.

    Args:
        build: Makes the model, not compiled.
        x: A batch of inputs.
        y: Their labels.
        unit: What an example is: `"images/s"` or `"tokens/s"`.
        units: How many of those a batch holds.
    """

    build: Callable[[], keras.Model]
    x: np.ndarray
    y: np.ndarray
    unit: str
    units: int


def _mlp(size: int) -> Task:
    width, batch = 256 * size, 128
    x = np.random.default_rng(0).normal(size=(batch, width)).astype("float32")

    def build() -> keras.Model:
        hidden = [keras.layers.Dense(width, activation="relu") for _ in range(4)]
        return keras.Sequential([keras.Input((width,)), *hidden, keras.layers.Dense(10), layers.Softmax()])

    return Task(build, x, np.arange(batch) % 10, "images/s", batch)


def _convolutional(size: int) -> Task:
    channels, batch = 16 * size, 32
    x = np.random.default_rng(0).normal(size=(batch, 32, 32, 3)).astype("float32")

    def build() -> keras.Model:
        blocks = []
        for width in (channels, 2 * channels, 4 * channels):
            blocks.append(keras.layers.Conv2D(width, 3, strides=2, padding="same", use_bias=False))
            blocks += [keras.layers.BatchNormalization(), keras.layers.Activation("relu")]
        head = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10), layers.Softmax()]
        return keras.Sequential([keras.Input((32, 32, 3)), *blocks, *head])

    return Task(build, x, np.arange(batch) % 10, "images/s", batch)


def _transformer(size: int) -> Task:
    width, batch, length, words = 64 * size, 8, 64, 1000
    x = np.random.default_rng(0).integers(0, words, (batch, length))

    def build() -> keras.Model:
        tokens = keras.Input((length,), dtype="int32")
        hidden = keras.layers.Embedding(words, width)(tokens)
        normed = keras.layers.LayerNormalization()(hidden)
        hidden = hidden + keras.layers.MultiHeadAttention(4, width // 4)(normed, normed, use_causal_mask=True)
        wide = keras.layers.Dense(4 * width, activation="gelu")(keras.layers.LayerNormalization()(hidden))
        hidden = hidden + keras.layers.Dense(width)(wide)
        return keras.Model(tokens, layers.Softmax()(keras.layers.Dense(words)(hidden)))

    return Task(build, x, np.roll(x, -1, axis=1), "tokens/s", batch * length)


TASKS: dict[str, Callable[[int], Task]] = {"MLP": _mlp, "conv net": _convolutional, "transformer block": _transformer}


class Clock(keras.callbacks.Callback):
    """Takes the time of the steps after the first, in which a `fit` has more to do than in others."""

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._last = time.perf_counter()
        if batch == 0:
            self._begin = self._last

    @property
    def seconds(self) -> float:
        """What the steps of the last `fit` took together."""
        return self._last - self._begin


def compiled(task: Task, policy: str, way: str, mode: str) -> keras.Model:
    """Returns a model to train.

    Args:
        task: What to train.
        policy: The dtype policy of its layers.
        way: How its optimizer is scaled: `BARE`, `KERAS`, `OURS` or `WITH_CALLBACKS`.
        mode: One of `MODES`.
    """
    with global_policy(policy):
        model = task.build()
    optimizer: keras.optimizers.Optimizer = keras.optimizers.Adam(1e-4)
    if way != BARE:
        optimizer = (keras.optimizers.LossScaleOptimizer if way == KERAS else LossScaleOptimizer)(optimizer)
    options = {"jit_compile": MODES[mode], "auto_scale_loss": False}
    model.compile(optimizer, "sparse_categorical_crossentropy", **options)
    if isinstance(optimizer, LossScaleOptimizer):
        skipped_step_rollback.install(model)
    return model


def timed(model: keras.Model, task: Task, steps: int, used: Sequence[Any] = ()) -> Callable[[], float]:
    """Returns what trains a model by `fit` and returns the seconds of a step; it goes on where the last call left it.

    Args:
        model: A compiled model of the task.
        task: What to train it on.
        steps: How many steps count.
        used: Callbacks of the training.
    """
    data = tf.data.Dataset.from_tensors((task.x, task.y)).cache().repeat()
    clock = Clock()

    def train() -> float:
        model.fit(data, steps_per_epoch=steps + 1, shuffle=False, verbose=0, callbacks=[*used, clock])
        return clock.seconds / steps

    return train


def trainer(task: Task, policy: str, way: str, mode: str, steps: int) -> Callable[[], float]:
    """Returns what `timed` does of a model that is `compiled`, with `defaults()` if the way is `WITH_CALLBACKS`."""
    used = callbacks.defaults(tempfile.mkdtemp()) if way == WITH_CALLBACKS else []
    return timed(compiled(task, policy, way, mode), task, steps, used)


def scaling(size: int, modes: Sequence[str], ways: Sequence[str], steps: int, repeats: int) -> Iterator[list[Measured]]:
    """Measures what scaling and callbacks add to the training of a float32 model, where nothing else differs."""
    for name, make in TASKS.items():
        for mode in modes:
            found = take_turns({way: trainer(make(size), "float32", way, mode, steps) for way in ways}, repeats, _read)
            yield compared("training step", name, mode, found)


def formats(size: int, mode: str, steps: int, repeats: int) -> Iterator[list[Measured]]:
    """Measures how much is trained in a second in each precision, float16 with kmp's loss scale."""
    for name, make in TASKS.items():
        task = make(size)
        every = {policy: trainer(task, policy, _scaled_for(policy), mode, steps) for policy in POLICIES}
        found = {
            policy: [task.units / seconds for seconds in turns]
            for policy, turns in take_turns(every, repeats, _read).items()
        }
        yield compared("throughput", name, mode, found, task.unit)


def memory_of(policy: str, name: str, size: int, mode: str) -> int:
    """Returns the bytes that a model's training added to this process' peak; meant for a fresh process."""
    trainer(_mlp(1), "float32", BARE, mode, 1)()
    before = peak_memory()
    trainer(TASKS[name](size), policy, _scaled_for(policy), mode, 2)()
    return peak_memory() - before


def _read(train: Callable[[], float]) -> float:
    return train()


def _scaled_for(policy: str) -> str:
    return OURS if policy == "mixed_float16" else BARE
