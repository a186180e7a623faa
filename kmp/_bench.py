"""What sampling gradients costs, as ratios within one run: anyone can measure it again."""

import statistics as averages
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

from kmp import statistics
from kmp._updates import UpdateWatch
from kmp.callbacks import GradientHistogram
from kmp.optimizer import LossScaleOptimizer
from kmp.records import to_line

_REPEATS = 7
_FIRST_CALLS = 5
_SIDE = 2048
_TENSORS = 4


class Row(NamedTuple):
    """One measurement: what it is, under graph mode and under XLA."""

    name: str
    graph: str
    xla: str


class Training(NamedTuple):
    """An optimizer, its compiled step, and how long the first call took."""

    optimizer: LossScaleOptimizer
    step: Callable[[], Any]
    first_call: float


def run(console: Console) -> list[Row]:
    """Measures, and shows a table as it goes."""
    table = Table(title="Sampling gradients: cost, medians within one run", title_justify="left")
    table.add_column("what")
    for name in ("graph mode", "XLA"):
        table.add_column(name, justify="right")
    rows = []
    for row in _rows():
        console.print(f"{row.name}: {row.graph} in graph mode, {row.xla} under XLA", highlight=False, soft_wrap=True)
        rows.append(row)
        table.add_row(*row)
    console.print(table)
    return rows


def _rows() -> Iterator[Row]:
    summary, by_mode = _per_element()
    for name, place in (("histogram", 0), ("histogram, amax and norm", 1)):
        cells = [f"{summary / times[place]:.0f} times" for times in by_mode]
        yield Row(f"{name} of {_TENSORS} tensors of {_SIDE}x{_SIDE}: cheaper than tf.summary.histogram", *cells)
    found = [_training_cost(jit_compile) for jit_compile in (False, True)]
    yield Row("added to an Adam step of ResNet-50's variables, at the default cadence", *(f"{c:.2%}" for c, _ in found))
    yield Row("added to its first call", *(f"{first:+.0%}" for _, first in found))


def _per_element() -> tuple[float, list[list[float]]]:
    """Returns seconds of tf.summary.histogram; and in graph mode and under XLA those of one histogram, and of all."""
    gradients = [_gradient((_SIDE, _SIDE)) for _ in range(_TENSORS)]
    writer = tf.summary.create_file_writer(tempfile.mkdtemp())

    def summarize() -> None:
        with writer.as_default(step=0):
            for gradient in gradients:
                tf.summary.histogram("gradient", gradient)

    ways: list[Callable[[], Any]] = [summarize]
    for jit_compile in (False, True):
        count = tf.function(lambda: statistics.of_gradients(gradients).counts, jit_compile=jit_compile)
        measure = tf.function(lambda: tuple(statistics.of_gradients(gradients)), jit_compile=jit_compile)
        ways += [_fetching(count), _fetching(measure)]
    summary, *ours = _medians(ways)
    writer.close()
    return summary, [ours[:2], ours[2:]]


def _training_cost(jit_compile: bool) -> tuple[float, float]:
    """Returns what sampling adds to a step at the default cadence, and to the first call, as parts of each."""
    shapes = [variable.shape for variable in keras.applications.ResNet50(weights=None).trainable_variables]
    gradients = [_gradient(shape) for shape in shapes]
    pairs = [[_training(gradients, jit_compile, sampled) for sampled in (False, True)] for _ in range(_FIRST_CALLS)]
    first_calls = averages.median(sampled.first_call / plain.first_call for plain, sampled in pairs)
    plain, sampled = pairs[-1]
    owner = GradientHistogram()
    every, updates_every = owner.every_n_steps, owner.updates_every
    watch = UpdateWatch()

    def sample() -> None:
        sampled.optimizer.start_sampling(owner, every_n_steps=2**62)
        sampled.step()

    def read() -> None:
        found = sampled.optimizer.snapshot().sample
        assert found is not None
        to_line({"step": found.step, "grad_norm": found.total_norm, "sample": found.to_dict()})

    def update() -> None:
        watch.arm(sampled.optimizer.variables_by_path())
        found = sampled.optimizer.snapshot().sample
        assert found is not None
        watch.measure(found)

    step, between, at_sample, reading, updating = _medians([plain.step, sampled.step, sample, read, update])
    added = at_sample - between + reading + updating / updates_every
    return added / every / step, first_calls - 1.0


def _training(gradients: list[tf.Tensor], jit_compile: bool, sampled: bool) -> Training:
    variables = [keras.Variable(np.full(gradient.shape, 0.05, np.float32)) for gradient in gradients]
    optimizer = LossScaleOptimizer(keras.optimizers.Adam())
    optimizer.build(variables)
    optimizer.scale_loss(1.0)
    if sampled:
        optimizer.prepare_sampling()
    step = tf.function(lambda: optimizer.apply(gradients, variables), jit_compile=jit_compile, autograph=False)
    begin = time.perf_counter()
    step()
    return Training(optimizer, step, time.perf_counter() - begin)


def _gradient(shape: Any) -> tf.Tensor:
    """Magnitudes over eight decades, a fifth of them zero, as a ReLU network has."""
    random = np.random.default_rng(0)
    values = random.normal(size=shape) * 10.0 ** random.uniform(-8, 0, size=shape) * (random.random(shape) > 0.2)
    return tf.constant(values, tf.float32)


def _fetching(function: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: tf.nest.map_structure(lambda tensor: tensor.numpy(), function())


def _medians(ways: list[Callable[[], Any]]) -> list[float]:
    """Returns the median seconds of each way, all taking turns, so that a busy machine slows all alike."""
    for way in ways:
        way()
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(_REPEATS):
        for way, taken in zip(ways, seconds, strict=True):
            begin = time.perf_counter()
            way()
            taken.append(time.perf_counter() - begin)
    return [averages.median(taken) for taken in seconds]
