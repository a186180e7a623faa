"""What loss scaling and callbacks add to `fit`: to an epoch, and to the first epoch, which traces and compiles."""

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import keras

from kmp import callbacks
from kmp.bench.optimizer_step import BARE, KERAS, OURS
from kmp.bench.small_models import WITH_CALLBACKS, Task, batches, compiled_model, convolutional, mlp
from kmp.bench.timing import Measurement, alternate, comparison

# The others are compared with Keras' loss scaling.
VARIANTS = (KERAS, OURS, WITH_CALLBACKS, BARE)
# On two CPU cores, a step without loss scaling takes 2 ms and 11 to 14 ms.
TASKS: dict[str, Callable[[], Task]] = {
    "MLP of width 128": lambda: mlp(128),
    "conv net of width 40": lambda: convolutional(40),
}


@dataclass(frozen=True)
class Usage:
    """What a call of `fit` took.

    Args:
        cpu: CPU seconds of all threads of the process.
        wall: Seconds of real time.
    """

    cpu: float
    wall: float


def measure(
    names: Sequence[str], modes: Sequence[str], steps: int, turns: int, run_in_subprocess: Callable[[str], Any]
) -> Iterator[list[Measurement]]:
    """Measures epochs of float32 training, where the variants differ in nothing else, and yields each comparison.

    A first epoch is a call of `fit`, its start and end included. A later one is the second epoch of a call.

    Args:
        names: Names in `TASKS`.
        modes: Names in `MODES`.
        steps: Steps of an epoch.
        turns: Rounds of epochs. A round trains each variant for one epoch. Each round of first epochs is a new process.
        run_in_subprocess: Evaluates an expression in a new process and returns its value.
    """
    for name in names:
        for mode in modes:
            case, call = f"{name}, {steps} steps", f"fit_time.first_epochs({name!r}, {mode!r}, {steps})"
            rounds = [run_in_subprocess(call) for _ in range(turns)]
            first = {variant: [Usage(*seconds[variant]) for seconds in rounds] for variant in VARIANTS}
            yield from _comparisons("first epoch", case, mode, first, 1)
            later = _later_epochs(TASKS[name](), mode, steps, turns)
            yield from _comparisons("step of `fit`", case, mode, later, steps)


def first_epochs(name: str, mode: str, steps: int) -> dict[str, tuple[float, ...]]:
    """Trains a new model of each variant for an epoch and returns the CPU seconds and the wall seconds.

    Call it in a new process, which frees the models: TensorFlow never frees the graph of a custom gradient.
    """
    task = TASKS[name]()
    for variant in VARIANTS:
        first_epoch(task, variant, mode, 2)  # excludes what happens once per process
    return {variant: astuple(first_epoch(task, variant, mode, steps)) for variant in VARIANTS}


def _later_epochs(task: Task, mode: str, steps: int, turns: int) -> dict[str, list[Usage]]:
    with tempfile.TemporaryDirectory() as folder:
        models = {variant: compiled_model(task, "float32", variant, mode) for variant in VARIANTS}
        epochs = {
            variant: _later_epoch(model, task, steps, _callbacks(variant, folder)) for variant, model in models.items()
        }
        return alternate(epochs, turns)


def _later_epoch(model: keras.Model, task: Task, steps: int, extra_callbacks: Sequence[Any]) -> Callable[[], Usage]:
    """Returns a function that continues the training for two epochs and returns what the second one took."""
    timer = EpochTimer()
    train = epoch(model, task, steps, [*extra_callbacks, timer], epochs=2)

    def timed() -> Usage:
        train()
        return timer.usage

    return timed


class EpochTimer(keras.callbacks.Callback):
    """Measures the last epoch of a training; to be the last callback."""

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._begin = _now()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.usage = _since(self._begin)


def first_epoch(task: Task, variant: str, mode: str, steps: int) -> Usage:
    """Trains a new model for an epoch, deletes it, and returns what `fit` took."""
    with tempfile.TemporaryDirectory() as folder:
        model = compiled_model(task, "float32", variant, mode)
        usage = epoch(model, task, steps, _callbacks(variant, folder))()
    del model
    gc.collect()  # models have reference cycles
    return usage


def epoch(
    model: keras.Model, task: Task, steps: int, extra_callbacks: Sequence[Any] = (), epochs: int = 1
) -> Callable[[], Usage]:
    """Returns a function that continues the training and returns what `fit` took.

    Args:
        model: A compiled model of the task.
        task: The task.
        steps: Steps of an epoch.
        extra_callbacks: Callbacks of the training.
        epochs: Number of epochs.
    """
    data, options = batches(task), {"shuffle": False, "verbose": 0, "callbacks": list(extra_callbacks)}

    def train() -> Usage:
        begin = _now()
        model.fit(data, epochs=epochs, steps_per_epoch=steps, **options)
        return _since(begin)

    return train


def _now() -> Usage:
    return Usage(time.process_time(), time.perf_counter())


def _since(begin: Usage) -> Usage:
    now = _now()
    return Usage(now.cpu - begin.cpu, now.wall - begin.wall)


def _callbacks(variant: str, folder: str) -> list[Any]:
    return callbacks.defaults(folder) if variant == WITH_CALLBACKS else []


def _comparisons(
    section: str, case: str, mode: str, usage: Mapping[str, Sequence[Usage]], per: int
) -> Iterator[list[Measurement]]:
    cpu = {variant: [one.cpu / per for one in rounds] for variant, rounds in usage.items()}
    yield comparison(f"{section}: CPU time", case, mode, cpu)
    wall = {variant: [one.wall / per for one in rounds] for variant, rounds in usage.items()}
    yield comparison(f"{section}: wall time", case, mode, wall)
