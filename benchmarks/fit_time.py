"""What do loss scaling and callbacks add to `fit`?

    python benchmarks/fit_time.py [--quick] [--json FILE]

It measures the first epoch, which traces and compiles, and a later one.

CPU time of float32 training with a scaled loss, relative to Keras' loss scaling. A first epoch is a
call of `fit`, its start and end included, in a new process for each round; a later one is the
second epoch of a call.
"""

import functools
import gc
import itertools
import tempfile
import time

import keras
import tensorflow as tf
from measuring import WITH_CALLBACKS, main, modes_of

from kmp import callbacks
from kmp.bench.measurement import alternate, comparison, in_new_process
from kmp.bench.models import BARE, KERAS, OURS, compiled_model, convolutional, mlp

VARIANTS = (KERAS, OURS, WITH_CALLBACKS, BARE)
MODELS = {"MLP of width 128": (mlp, 128), "conv net of width 40": (convolutional, 40)}
STEPS = 250  # of an epoch: the callbacks read once


def measure(is_quick):
    """Yields the CPU time of first and later epochs of each model in each mode."""
    rounds, steps = (1, 20) if is_quick else (5, STEPS)
    names = list(MODELS)[:1] if is_quick else MODELS
    for name, mode in itertools.product(names, modes_of(is_quick)):
        case = f"{name}, {steps} steps"
        processes = [in_new_process(first_epochs, name, mode, steps) for _ in range(rounds)]
        first = {variant: [own[variant] for own in processes] for variant in VARIANTS}
        yield comparison("first epoch: CPU time", case, mode, first)
        per_step = later_steps(name, mode, steps, rounds)
        yield comparison("step of `fit`: CPU time", case, mode, per_step)


def later_steps(name, mode, steps, rounds):
    """Returns the seconds of a step of a later epoch, for each variant and round."""
    with tempfile.TemporaryDirectory() as folder:
        two_epochs = {
            variant: functools.partial(training(name, variant, mode, steps, folder), 2)
            for variant in VARIANTS
        }
        results = alternate(two_epochs, rounds)
    return {variant: [last / steps for _, last in epochs] for variant, epochs in results.items()}


def first_epochs(name, mode, steps):
    """Returns the seconds of a first epoch of each variant.

    Call it in a new process, which frees the graphs.
    """
    for number in (2, steps):  # the first ones exclude what happens once per process
        seconds = {}
        for variant in VARIANTS:
            with tempfile.TemporaryDirectory() as folder:
                seconds[variant], _ = training(name, variant, mode, number, folder)(epochs=1)
            gc.collect()  # models have reference cycles
    return seconds


def training(name, variant, mode, steps, folder):
    """Returns a function that continues the training of a new model.

    It takes the number of epochs, and returns the CPU seconds, of all threads, of the whole call
    and of its last epoch.
    """
    make_task, width = MODELS[name]
    task = make_task(width)
    model = compiled_model(task, "float32", OURS if variant == WITH_CALLBACKS else variant, mode)
    data = tf.data.Dataset.from_tensors((task.x, task.y)).cache().repeat()
    begins, ends = [], []
    timer = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: begins.append(time.process_time()),
        on_epoch_end=lambda epoch, logs: ends.append(time.process_time()),
    )
    extra = [*(callbacks.defaults(folder) if variant == WITH_CALLBACKS else []), timer]

    def train(epochs):
        begin = time.process_time()
        model.fit(
            data, steps_per_epoch=steps, epochs=epochs, shuffle=False, verbose=0, callbacks=extra
        )
        return time.process_time() - begin, ends[-1] - begins[-1]

    return train


if __name__ == "__main__":
    main(measure, __doc__)
