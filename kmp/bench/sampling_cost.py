"""What sampling gradients costs."""

import statistics as averages
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kmp.bench.optimizer_step import MODES, SETS
from kmp.bench.timing import Measured, compared, seconds_of, take_turns
from kmp.callbacks import GradientHistogram
from kmp.gradients import UpdateWatch, tensor_statistics
from kmp.optimizer import LossScaleOptimizer
from kmp.records import to_line

PLAIN, SAMPLED = "not sampled", "sampled"
_TENSORS = 4


class Training(NamedTuple):
    """An optimizer, its compiled step, and how long the first call took."""

    optimizer: LossScaleOptimizer
    step: Callable[[], Any]
    first_call: float


def cost(name: str, side: int, repeats: int, first_calls: int) -> Iterator[list[Measured]]:
    """Measures what sampling adds at its default cadence; yields figures as they come.

    Args:
        name: One of `SETS`, whose gradients an Adam step samples.
        side: The matrices whose histogram is compared with `tf.summary.histogram` have so many rows and columns.
        repeats: Turns that each way gets.
        first_calls: Pairs of first calls.
    """
    yield from _histograms(side, repeats)
    for mode in MODES:
        pairs = [[_training(name, mode, is_sampled) for is_sampled in (False, True)] for _ in range(first_calls)]
        calls = {way: [pair[place].first_call for pair in pairs] for place, way in enumerate((PLAIN, SAMPLED))}
        yield compared("sampling: first call", f"Adam, {name}", mode, calls)
        yield compared("sampling: step, on average", f"Adam, {name}", mode, _steps(pairs[-1], repeats))


def _histograms(side: int, repeats: int) -> Iterator[list[Measured]]:
    gradients = [_gradient((side, side)) for _ in range(_TENSORS)]
    writer = tf.summary.create_file_writer(tempfile.mkdtemp())

    def summarize() -> None:
        with writer.as_default(step=0):
            for gradient in gradients:
                tf.summary.histogram("gradient", gradient)

    for mode, jit_compile in MODES.items():
        count = tf.function(lambda: tensor_statistics.of_gradients(gradients).counts, jit_compile=jit_compile)
        measure = tf.function(lambda: tuple(tensor_statistics.of_gradients(gradients)), jit_compile=jit_compile)
        ways = {"histogram": _fetching(count), "with amax and norm": _fetching(measure)}
        found = take_turns({"tf.summary.histogram": summarize} | ways, repeats)
        yield compared("sampling: statistics", f"{_TENSORS} of {side}x{side}", mode, found)
    writer.close()


def _steps(pair: Sequence[Training], repeats: int) -> dict[str, Sequence[float]]:
    """Returns seconds of a step turn by turn: without samples, and with their share of one at the default cadence."""
    (plain, sampled), owner, watch = pair, GradientHistogram(), UpdateWatch()

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

    ways = {"step": plain.step, "between": sampled.step, "sample": sample, "read": read, "update": update}
    median = {way: averages.median(seconds) for way, seconds in take_turns(ways, repeats).items()}
    added = median["sample"] - median["between"] + median["read"] + median["update"] / owner.updates_every
    return {PLAIN: [median["step"]], SAMPLED: [median["step"] + added / owner.every_n_steps]}


def _training(name: str, mode: str, sampled: bool) -> Training:
    gradients = [_gradient(shape) for shape in SETS[name]()]
    variables = [keras.Variable(np.full(gradient.shape, 0.05, np.float32)) for gradient in gradients]
    optimizer = LossScaleOptimizer(keras.optimizers.Adam())
    optimizer.build(variables)
    optimizer.scale_loss(1.0)
    if sampled:
        optimizer.prepare_sampling()
    step = tf.function(lambda: optimizer.apply(gradients, variables), jit_compile=MODES[mode], autograph=False)
    return Training(optimizer, step, seconds_of(step))


def _gradient(shape: Any) -> tf.Tensor:
    """Magnitudes over eight decades, a fifth of them zero, as a ReLU network has."""
    random = np.random.default_rng(0)
    values = random.normal(size=shape) * 10.0 ** random.uniform(-8, 0, size=shape) * (random.random(shape) > 0.2)
    return tf.constant(values, tf.float32)


def _fetching(function: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: tf.nest.map_structure(lambda tensor: tensor.numpy(), function())
