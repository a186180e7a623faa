"""What do the callbacks of `defaults()` add to a whole training?

    python benchmarks/training_cost.py [--quick] [--json FILE]

A model trains in float16 for 10, 60 and 300 seconds. The same number of steps is then trained
without and with `kmp.callbacks.defaults(log_dir)`, each in a new process: CPU time of all threads
and wall time of `fit`, its start and end included. A fixed number of seconds is a smaller share of
a longer training.
"""

import tempfile
import time

import keras
import tensorflow as tf
from measuring import WITH_CALLBACKS, main

from kmp import callbacks
from kmp.bench.measurement import comparison, in_new_process
from kmp.bench.models import OURS, compiled_model, convolutional, mlp, transformer

MODELS = {
    "MLP": (mlp, 128),
    "conv net": (convolutional, 32),
    "transformer block": (transformer, 128),
}
SECONDS = (10, 60, 300)
EPOCHS = 5


def measure(is_quick):
    """Yields CPU time and wall time of trainings of each length."""
    lengths, rounds = ((1,), 1) if is_quick else (SECONDS, 2)
    for name in list(MODELS)[: 1 if is_quick else None]:
        rate = in_new_process(steps_per_second, name, 1 if is_quick else 5)
        for seconds in lengths:
            steps = max(1, round(rate * seconds / EPOCHS))
            times = {OURS: [], WITH_CALLBACKS: []}
            for _ in range(rounds):
                for variant, own in times.items():
                    own.append(in_new_process(seconds_of_training, name, steps, variant))
            case = f"{name}, {seconds} s"
            for index, section in enumerate(("training: CPU time", "training: wall time")):
                values = {variant: [each[index] for each in own] for variant, own in times.items()}
                yield comparison(section, case, "graph", values)


def steps_per_second(name, seconds):
    """Returns how many steps of a model run in a second, without the first ones."""
    model, data = trained_model(name)
    model.fit(data, steps_per_epoch=5, shuffle=False, verbose=0)
    steps, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        model.fit(data, steps_per_epoch=20, shuffle=False, verbose=0)
        steps += 20
    return steps / (time.perf_counter() - began)


def seconds_of_training(name, steps, variant):
    """Returns the CPU time and the wall time of a training. Call it in a new process."""
    model, data = trained_model(name)
    with tempfile.TemporaryDirectory() as folder:
        own = callbacks.defaults(folder) if variant == WITH_CALLBACKS else []
        cpu, wall = time.process_time(), time.perf_counter()
        model.fit(
            data, steps_per_epoch=steps, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=own
        )
        return time.process_time() - cpu, time.perf_counter() - wall


def trained_model(name):
    """Returns a compiled model and its batches."""
    keras.utils.set_random_seed(0)
    make_task, width = MODELS[name]
    task = make_task(width)
    model = compiled_model(task, "mixed_float16", OURS, "graph")
    return model, tf.data.Dataset.from_tensors((task.x, task.y)).cache().repeat()


if __name__ == "__main__":
    main(measure, __doc__)
