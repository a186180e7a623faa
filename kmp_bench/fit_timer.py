"""Time and memory of the steps of `fit`, which run as they do without a measurement."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from kmp_bench.measurement import peak_memory, reset_peak_memory


@dataclass(frozen=True)
class Blocks:
    """How many steps are taken: a warm-up, then blocks of steps, whose times are measured."""

    warm_up: int = 10
    count: int = 3
    steps: int = 10


@dataclass(frozen=True)
class FitTimes:
    """What `time_fit` measures.

    Args:
        seconds: The mean seconds of a step, for each block.
        peak_memory: As `kmp_bench.measurement.peak_memory`; on a GPU, since the warm-up.
    """

    seconds: list[float]
    peak_memory: int


def time_fit(
    model: keras.Model,
    data: tf.data.Dataset,
    blocks: Blocks,
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> FitTimes:
    """Trains a compiled model with one call of `fit`, and returns what was measured.

    Args:
        model: A compiled model.
        data: Batches without end.
        blocks: How many steps are taken.
        callbacks: More callbacks of `fit`.
    """
    timer = _BlockTimer(blocks)
    # The last block ends where one more step begins.
    steps = blocks.warm_up + blocks.count * blocks.steps + 1
    model.fit(data, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=[timer, *callbacks])
    pairs = zip(timer.times[:-1], timer.times[1:], strict=True)
    return FitTimes([(end - begin) / blocks.steps for begin, end in pairs], timer.peak_memory)


class _BlockTimer(keras.callbacks.Callback):
    """Records when the device has finished the steps before each block.

    Keras 3.15 copies the loss to the host after each call of the train function, also without
    callbacks, so the device waits for the host between two steps as in any `fit`.
    """

    def __init__(self, blocks: Blocks) -> None:
        super().__init__()
        self.blocks, self.times, self.peak_memory = blocks, list[float](), 0

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        since_warm_up = batch - self.blocks.warm_up
        if since_warm_up < 0 or since_warm_up % self.blocks.steps:
            return
        tf.test.experimental.sync_devices()  # a GPU runs asynchronously
        self.times.append(time.perf_counter())
        if since_warm_up == 0:
            reset_peak_memory()  # the first steps try algorithms that need more memory
        self.peak_memory = peak_memory()
