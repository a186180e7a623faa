"""What it takes to replay a batch, which the callbacks do at most three times in a run for each reason."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras

from kmp.bench.optimizer_step import OURS
from kmp.bench.small_models import TASKS, compiled_model, timed_training
from kmp.bench.timing import Measurement, comparison, measure_alternately, peak_memory
from kmp.replay import replay

STEP, FINITE, OVERFLOWING = "training step", "replay", "replay of an overflow"
_EXAMPLES = 32
_STEPS = 10
_LARGE = 1e4  # times the inputs, with which a product exceeds 65504


def measure(size: int, repeats: int, run_in_subprocess: Callable[[str], Any]) -> Iterator[list[Measurement]]:
    """Measures the time and the peak memory of a replay of 32 examples, and yields each comparison when it is done.

    Args:
        size: Factor for the width of the models.
        repeats: Rounds of each comparison.
        run_in_subprocess: Evaluates an expression in a new process and returns its value.
    """
    for name in TASKS:
        yield comparison("replay: time", name, "graph", _seconds(name, size, repeats))
        peaks = {
            variant: [run_in_subprocess(f"replay_cost.memory_of({name!r}, {size}, {variant!r})")]
            for variant in (STEP, FINITE)
        }
        yield comparison("replay: peak memory", name, "graph", peaks, "B")


def memory_of(name: str, size: int, variant: str) -> int:
    """Returns the bytes that training and a replay add to the peak memory of this process. Call it in a new process."""
    before = peak_memory()
    model, batch = _trained(name, size)
    if variant == FINITE:
        _replay(model, batch)
    return peak_memory() - before


def _seconds(name: str, size: int, repeats: int) -> Mapping[str, Sequence[float]]:
    model, batch = _trained(name, size)
    train = timed_training(model, TASKS[name](size), _STEPS)
    variants: dict[str, Callable[[], Any]] = {FINITE: lambda: _replay(model, batch)}
    if batch[0].dtype.kind == "f":
        variants[OVERFLOWING] = lambda: _replay(model, (batch[0] * _LARGE, batch[1]))
    seconds = measure_alternately(variants, repeats)
    return {STEP: [train() for _ in range(repeats)], **seconds}


def _trained(name: str, size: int) -> tuple[keras.Model, tuple[Any, Any]]:
    task = TASKS[name](size)
    model = compiled_model(task, "mixed_float16", OURS, "graph")
    timed_training(model, task, 1)()
    return model, (task.x[:_EXAMPLES], task.y[:_EXAMPLES])


def _replay(model: keras.Model, batch: tuple[Any, Any]) -> None:
    variables = {variable.path: variable for variable in model.trainable_variables}
    replay(model, batch, variables, step=1, loss_scale=2.0**15)
