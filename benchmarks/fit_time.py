"""What do loss scaling and callbacks add to `fit`: to its first epoch, which traces and compiles, and to a later one?

    python benchmarks/fit_time.py [--quick] [--json FILE]

CPU time and wall time of float32 training with a scaled loss, relative to Keras' loss scaling. A first epoch is a call
of `fit`, its start and end included, in a new process for each round; a later one is the second epoch of a call.
"""

import gc
import tempfile
import time

import keras
import tensorflow as tf
from measuring import main, modes_of

from kmp import callbacks
from kmp.bench.measurement import alternate, comparison, in_new_process
from kmp.bench.models import BARE, KERAS, OURS, compiled_model, convolutional, mlp

WITH_CALLBACKS = "kmp + callbacks"
VARIANTS = (KERAS, OURS, WITH_CALLBACKS, BARE)
MODELS = {"MLP of width 128": (mlp, 128), "conv net of width 40": (convolutional, 40)}
STEPS = 250  # of an epoch: the callbacks read once


def measure(is_quick):
    """Yields CPU time and wall time of first and later epochs of each model in each mode."""
    rounds, steps = (1, 20) if is_quick else (5, STEPS)
    for name in list(MODELS)[: 1 if is_quick else None]:
        for mode in modes_of(is_quick):
            processes = [in_new_process(first_epochs, name, mode, steps) for _ in range(rounds)]
            first = {variant: [own[variant] for own in processes] for variant in VARIANTS}
            yield from comparisons("first epoch", f"{name}, {steps} steps", mode, first, 1)
            with tempfile.TemporaryDirectory() as folder:
                epochs = {variant: later_epoch(name, variant, mode, steps, folder) for variant in VARIANTS}
                later = alternate(epochs, rounds)
            yield from comparisons("step of `fit`", f"{name}, {steps} steps", mode, later, steps)


def comparisons(section, case, mode, usage, per):
    """Yields the comparisons of CPU seconds and of wall seconds, which are pairs."""
    for index, clock in enumerate(("CPU", "wall")):
        values = {variant: [pair[index] / per for pair in rounds] for variant, rounds in usage.items()}
        yield comparison(f"{section}: {clock} time", case, mode, values)


def first_epochs(name, mode, steps):
    """Returns the seconds of a first epoch of each variant, in a new process, which frees the graphs."""
    for number in (2, steps):  # the first ones exclude what happens once per process
        usage = {}
        for variant in VARIANTS:
            with tempfile.TemporaryDirectory() as folder:
                usage[variant] = training(name, variant, mode, number, folder)()
            gc.collect()  # models have reference cycles
    return usage


def later_epoch(name, variant, mode, steps, folder):
    """Returns a function that continues a training for two epochs and returns the seconds of the second one."""
    timer = EpochTimer()
    train = training(name, variant, mode, steps, folder, timer, epochs=2)

    def timed():
        train()
        return timer.usage

    return timed


class EpochTimer(keras.callbacks.Callback):
    """Measures the last epoch of a training; to be the last callback."""

    def on_epoch_begin(self, epoch, logs=None):
        self._begin = now()

    def on_epoch_end(self, epoch, logs=None):
        self.usage = since(self._begin)


def training(name, variant, mode, steps, folder, *extra, epochs=1):
    """Returns a function that continues the training of a new model and returns the seconds of the call of `fit`."""
    make_task, width = MODELS[name]
    task = make_task(width)
    model = compiled_model(task, "float32", OURS if variant == WITH_CALLBACKS else variant, mode)
    data = tf.data.Dataset.from_tensors((task.x, task.y)).cache().repeat()
    own = callbacks.defaults(folder) if variant == WITH_CALLBACKS else []
    options = {"steps_per_epoch": steps, "epochs": epochs, "shuffle": False, "verbose": 0, "callbacks": [*own, *extra]}

    def train():
        begin = now()
        model.fit(data, **options)
        return since(begin)

    return train


def now():
    """Returns the CPU seconds of all threads of this process, and the seconds of a clock."""
    return time.process_time(), time.perf_counter()


def since(begin):
    """Returns the seconds of both since `begin`."""
    return tuple(end - start for start, end in zip(begin, now(), strict=True))


if __name__ == "__main__":
    main(measure, __doc__)
