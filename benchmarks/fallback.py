"""How long does a run whose layer overflows train nothing, until it is repaired?

    python benchmarks/fallback.py [--quick] [--json FILE]

From the first skipped step to the first good one, in steps, and in seconds beside the first step of
the same run: both trace the step, and the repair also replays a batch and searches the layers. The
first layer of the model has a constant that is infinite in float16. Not under XLA, which computes
this fault in float32.
"""

import time
import warnings

import keras
import numpy as np
from keras import ops
from measuring import main

import kmp
from kmp_bench.measurement import comparison
from kmp_bench.models import mlp

FIRST, REPAIR = "first step", "first skipped step to first good step"


class HideMissing(keras.layers.Layer):
    """Adds -1e9 to missing values: infinite in float16, and NaN for the others."""

    def call(self, x):
        return x + ops.cast(x < -1e4, x.dtype) * -1e9


class Times(keras.callbacks.Callback):
    """The end of each step, before other callbacks run, and the number of steps skipped by then."""

    def on_train_begin(self, logs=None):
        self.ends, self.skipped = [], []

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 0:
            self.begin = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.skipped.append(self.model.optimizer.snapshot().overflow_count)
        self.ends.append(time.perf_counter())


def measure(is_quick):
    """Yields seconds and steps."""
    runs = [repaired_run() for _ in range(1 if is_quick else 3)]
    seconds = {FIRST: [run[0] for run in runs], REPAIR: [run[1] for run in runs]}
    yield comparison("fallback: time", "MLP", "graph", seconds)
    yield comparison(
        "fallback: skipped steps", "MLP", "graph", {REPAIR: [run[2] for run in runs]}, "steps"
    )


def repaired_run():
    """Returns the seconds of the first step and of the repair, and the steps that were skipped."""
    task = mlp(512)
    with kmp.enable():
        model = keras.Sequential(
            [keras.Input(task.x.shape[1:]), HideMissing(name="hide_missing"), task.build()]
        )
        model.compile("adam", "sparse_categorical_crossentropy", jit_compile=False)
    times = Times()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x, y = np.tile(task.x, (20, 1)), np.tile(task.y, 20)
        callbacks = [times, *kmp.callbacks.defaults()]
        model.fit(x, y, batch_size=len(task.x), verbose=0, callbacks=callbacks)
    skipped = times.skipped[-1]
    first = next(step for step, count in enumerate(times.skipped) if count)
    good = next(
        step
        for step in range(first + 1, len(times.ends))
        if times.skipped[step] == times.skipped[step - 1]
    )
    return times.ends[0] - times.begin, times.ends[good] - times.ends[first], skipped


if __name__ == "__main__":
    main(measure, __doc__)
