"""What do the callbacks of `defaults()` add to a whole training?

    python benchmarks/training_cost.py [--quick] [--json FILE]

A model trains in float16 for 10 and 60 seconds, without and with `kmp.callbacks.defaults(log_dir)`:
CPU time of all threads and wall time of `fit`, its start and end included. A fixed number of
seconds is a smaller share of a longer training.

Other programs on the machine change the time of a step by more than the callbacks do. So the two
trainings of a round run in one process and take turns of a few steps: what slows one slows the
other. Each round is a new process, after a short training without callbacks, so that neither of the
two pays for what TensorFlow does once. The ratio is the median over the rounds, with the smallest
and the largest. It is an upper bound: comparisons may take a share of the time since the training
began, in which both trainings run.
"""

import tempfile
import threading
import time

import keras
import tensorflow as tf
from measuring import WITH_CALLBACKS, main

from kmp import callbacks
from kmp_bench.measurement import comparison, in_new_process
from kmp_bench.models import OURS, compiled_model, convolutional, mlp, transformer

MODELS = {
    "MLP": (mlp, 128),
    "conv net": (convolutional, 32),
    "transformer block": (transformer, 128),
}
ROUNDS = {10: 5, 60: 3}  # by the seconds of a training
EPOCHS = 5
TURN = 0.1  # seconds


def measure(is_quick):
    """Yields CPU time and wall time of trainings of each length."""
    names, rounds = list(MODELS), ROUNDS
    if is_quick:
        names, rounds = names[:1], {1: 1}
    for name in names:
        rate = in_new_process(steps_per_second, name, 1 if is_quick else 5)
        for seconds, count in rounds.items():
            steps = max(1, round(rate * seconds / EPOCHS))
            turn = max(1, round(rate * TURN))
            times = {OURS: [], WITH_CALLBACKS: []}
            for _ in range(count):
                found = in_new_process(seconds_of_trainings, name, steps, turn)
                for variant, own in times.items():
                    own.append(found[variant])
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


def seconds_of_trainings(name, steps, turn):
    """Returns the CPU time and the wall time of a training, by variant.

    Call it in a new process.

    Args:
        name: One of `MODELS`.
        steps: The steps of an epoch.
        turn: The steps after which the other training goes on.
    """
    model, data = trained_model(name)
    model.fit(data, steps_per_epoch=5, shuffle=False, verbose=0)
    turns = Turns([OURS, WITH_CALLBACKS])
    with tempfile.TemporaryDirectory() as folder:
        threads = [
            threading.Thread(target=train, args=(name, steps, turn, turns, OURS, [])),
            threading.Thread(
                target=train,
                args=(name, steps, turn, turns, WITH_CALLBACKS, callbacks.defaults(folder)),
            ),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return turns.seconds


def train(name, steps, turn, turns, variant, own):
    """Trains a new model in turns with another thread. The time of building it does not count."""
    turns.begin(variant)
    model, data = trained_model(name)
    turns.restart(variant)
    try:
        model.fit(
            data,
            steps_per_epoch=steps,
            epochs=EPOCHS,
            shuffle=False,
            verbose=0,
            callbacks=[TakesTurns(turns, variant, turn), *own],
        )
    finally:
        turns.end(variant)


class Turns:
    """Lets one of several threads run at a time, and measures the time of each.

    Attributes:
        seconds: The CPU time and the wall time of each thread, by its name.
    """

    def __init__(self, names):
        self.seconds = dict.fromkeys(names, (0.0, 0.0))
        self._waiting = list(names)  # the first one has its turn
        self._changed = threading.Condition()

    def begin(self, name):
        """Waits for the first turn of a thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting[0] == name)
        self.restart(name)

    def restart(self, name):
        """Forgets the time of a thread whose turn it is."""
        self.seconds[name] = (0.0, 0.0)
        self._began = _clocks()

    def pass_on(self, name):
        """Ends the turn of a thread, and waits for its next one."""
        self._add(name)
        with self._changed:
            self._waiting.append(self._waiting.pop(0))
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting[0] == name)
        self._began = _clocks()

    def end(self, name):
        """Ends the last turn of a thread."""
        self._add(name)
        with self._changed:
            self._waiting.remove(name)
            self._changed.notify_all()

    def _add(self, name):
        pairs = zip(self.seconds[name], self._began, _clocks(), strict=True)
        self.seconds[name] = tuple(total + end - begin for total, begin, end in pairs)


def _clocks():
    return time.process_time(), time.perf_counter()


class TakesTurns(keras.callbacks.Callback):
    """Passes the turn on after each few steps."""

    def __init__(self, turns, name, steps):
        super().__init__()
        self._turns, self._name, self._steps = turns, name, steps

    def on_train_batch_begin(self, batch, logs=None):
        if batch and batch % self._steps == 0:
            self._turns.pass_on(self._name)


def trained_model(name):
    """Returns a compiled model and its batches."""
    keras.utils.set_random_seed(0)
    make_task, width = MODELS[name]
    task = make_task(width)
    model = compiled_model(task, "mixed_float16", OURS, "graph")
    return model, tf.data.Dataset.from_tensors((task.x, task.y)).cache().repeat()


if __name__ == "__main__":
    main(measure, __doc__)
