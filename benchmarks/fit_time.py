"""What do loss scaling and callbacks add to `fit`?

    python benchmarks/fit_time.py [--quick] [--json FILE]

It measures the first epoch, which traces and compiles, and a later one; and whole calls of `fit` in
float16 with few steps, with and without callbacks.

CPU time of float32 training with a scaled loss, relative to Keras' loss scaling. A first epoch is a
call of `fit`, its start and end included, in a new process for each round; a later one is the
second epoch of a call. Calls in float16, where callbacks also replay batches, take turns in one
process, and the CPU time of all threads is given next to the wall time.
"""

import functools
import gc
import itertools
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf
from measuring import WITH_CALLBACKS, main, modes_of

from kmp import callbacks, layers
from kmp_bench.measurement import alternate, comparison, in_new_process
from kmp_bench.models import (
    BARE,
    KERAS,
    OURS,
    Task,
    compiled_model,
    convolutional,
    mlp,
    transformer,
)

VARIANTS = (KERAS, OURS, WITH_CALLBACKS, BARE)
MODELS = {"MLP of width 128": (mlp, 128), "conv net of width 40": (convolutional, 40)}
STEPS = 250  # of an epoch: the callbacks read once


def segmentation(channels, side=288, batch=4):
    """Returns a task for a small U-Net that labels each pixel of large images."""
    random = np.random.default_rng(0)
    x = random.random((batch, side, side, 3), dtype="float32")

    def convolved(width, inputs):
        layer = keras.layers.Conv2D(width, 3, padding="same", activation="relu")
        return layer(inputs)

    def build():
        images = hidden = keras.Input((side, side, 3))
        skipped = []
        for width in (channels, 2 * channels, 4 * channels):
            hidden = convolved(width, hidden)
            skipped.append(hidden)
            hidden = keras.layers.MaxPooling2D()(hidden)
        hidden = convolved(8 * channels, hidden)
        for other in reversed(skipped):
            upsampled = keras.layers.UpSampling2D()(hidden)
            joined = keras.layers.Concatenate()([upsampled, other])
            hidden = convolved(other.shape[-1], joined)
        return keras.Model(images, layers.Softmax()(keras.layers.Conv2D(3, 1)(hidden)))

    return Task(build, x, random.integers(0, 3, x.shape[:3]), "images/s", batch)


def efficientnet(side=96, batch=16):
    """Returns a task for EfficientNetB0, which has 213 variables, on small images."""
    random = np.random.default_rng(0)
    x = 255 * random.random((batch, side, side, 3), dtype="float32")

    def build():
        network = keras.applications.EfficientNetB0(
            weights=None, input_shape=x.shape[1:], classes=10, classifier_activation=None
        )
        return keras.Model(network.input, layers.Softmax()(network.output))

    return Task(build, x, random.integers(0, 10, batch), "images/s", batch)


# Calls of `fit` in float16: the model, the mode and the number of steps.
CALLS = {
    "MLP of width 128, 20 steps": (functools.partial(mlp, 128), "graph", 20),
    "conv net of width 16, 20 steps": (functools.partial(convolutional, 16), "graph", 20),
    "conv net of width 16, 20 steps, XLA": (functools.partial(convolutional, 16), "XLA", 20),
    "segmentation of 288 x 288, 8 steps": (functools.partial(segmentation, 8), "graph", 8),
    "EfficientNetB0 on 96 x 96, 8 steps": (efficientnet, "graph", 8),
    "transformer block of width 128, 200 steps": (
        functools.partial(transformer, 128, 32),
        "graph",
        200,
    ),
}


def measure(is_quick):
    """Yields the time of calls, and of first and later epochs of each model in each mode."""
    for name in list(CALLS)[:1] if is_quick else CALLS:
        times = in_new_process(call_times, name, 1 if is_quick else 3)
        for clock, unit in enumerate(("CPU time", "wall time")):
            seconds = {
                variant: [both[clock] for both in rounds] for variant, rounds in times.items()
            }
            _, mode, _ = CALLS[name]
            yield comparison(f"call of `fit` in float16: {unit}", name, mode, seconds)
    yield from measure_epochs(is_quick)


def call_times(name, rounds):
    """Returns the CPU and wall seconds of calls of `fit`, for each variant and round.

    Call it in a new process, which frees the graphs.
    """
    warm_up, *_ = CALLS
    for variant in (OURS, WITH_CALLBACKS):  # what happens once per process
        timed_call(warm_up, variant)
    calls = {
        variant: functools.partial(timed_call, name, variant) for variant in (OURS, WITH_CALLBACKS)
    }
    return alternate(calls, rounds)


def timed_call(name, variant):
    """Returns the CPU and wall seconds of a call of `fit` of a new model."""
    make_task, mode, steps = CALLS[name]
    task = make_task()
    model = compiled_model(task, "mixed_float16", OURS, mode)
    data = tf.data.Dataset.from_tensors((task.x, task.y)).cache().repeat()
    extra = callbacks.defaults() if variant == WITH_CALLBACKS else []
    gc.collect()  # models of before have reference cycles
    begin = time.process_time(), time.perf_counter()
    model.fit(data, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=extra)
    return time.process_time() - begin[0], time.perf_counter() - begin[1]


def measure_epochs(is_quick):
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
