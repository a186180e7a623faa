"""What gradient sampling costs."""

import statistics as averages
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kmp.bench.optimizer_step import MODES, SETS, Shapes
from kmp.bench.timing import Measurement, comparison, measure_alternately, seconds_per_call
from kmp.callbacks import GradientHistogram
from kmp.gradients import NEVER, UpdateWatch, gradient_statistics
from kmp.optimizer import LossScaleOptimizer
from kmp.records import GradientSample, to_line

NOT_SAMPLED, SAMPLED = "not sampled", "sampled"
_TENSORS = 4


class Training(NamedTuple):
    """An optimizer, its compiled step, and the seconds of the first call."""

    optimizer: LossScaleOptimizer
    step: Callable[[], Any]
    first_call: float


class SampledTraining:
    """What a training that samples does, in parts that can be timed.

    Args:
        training: A training that is prepared for sampling.
    """

    def __init__(self, training: Training) -> None:
        self._optimizer, self.step = training.optimizer, training.step
        self._owner, self._watch = GradientHistogram(), UpdateWatch()
        self.updates_every, self.every_n_steps = self._owner.updates_every, self._owner.every_n_steps

    def sampled_step(self) -> None:
        """Runs a step that is sampled."""
        self._optimizer.start_sampling(self._owner, every_n_steps=NEVER)
        self.step()

    def record(self) -> str:
        """Returns the line of the log for the last sample."""
        return record_of(self.last_sample())

    def measure_update(self) -> GradientSample:
        """Returns the last sample with the update of the weights, as if it had been taken since."""
        self._watch.arm(self._optimizer.variables_by_path())
        return self._watch.measure(self.last_sample())

    def last_sample(self) -> GradientSample:
        """Reads the last sample from the device."""
        sample = self._optimizer.snapshot().sample
        assert sample is not None
        return sample


def record_of(sample: GradientSample) -> str:
    """Returns the line of the log for a sample."""
    return to_line({"step": sample.step, "grad_norm": sample.total_norm, "sample": sample})


def measure_cost(name: str, side: int, repeats: int, first_calls: int) -> Iterator[list[Measurement]]:
    """Measures what sampling adds at its default cadence, and yields each comparison when it is done.

    Args:
        name: A name in `SETS`: the variables of the Adam step whose gradients are sampled.
        side: Rows and columns of the matrices whose histogram is compared with `tf.summary.histogram`.
        repeats: Rounds of each comparison.
        first_calls: Number of first calls to measure, with sampling and without.
    """
    yield from _histograms(side, repeats)
    for mode in MODES:
        pairs = [
            [start_training(SETS[name](), mode, is_sampled) for is_sampled in (False, True)] for _ in range(first_calls)
        ]
        seconds = {
            variant: [pair[index].first_call for pair in pairs] for index, variant in enumerate((NOT_SAMPLED, SAMPLED))
        }
        yield comparison("sampling: first call", f"Adam, {name}", mode, seconds)
        yield comparison("sampling: step, on average", f"Adam, {name}", mode, _steps(pairs[-1], repeats))


def _histograms(side: int, repeats: int) -> Iterator[list[Measurement]]:
    gradients = [_gradient((side, side)) for _ in range(_TENSORS)]
    writer = tf.summary.create_file_writer(tempfile.mkdtemp())

    def summarize() -> None:
        with writer.as_default(step=0):
            for gradient in gradients:
                tf.summary.histogram("gradient", gradient)

    for mode, jit_compile in MODES.items():
        count = tf.function(lambda: gradient_statistics(gradients).counts, jit_compile=jit_compile)
        measure = tf.function(lambda: tuple(gradient_statistics(gradients)), jit_compile=jit_compile)
        variants = {"histogram": _fetching(count), "with amax and norm": _fetching(measure)}
        seconds = measure_alternately({"tf.summary.histogram": summarize} | variants, repeats)
        yield comparison("sampling: statistics", f"{_TENSORS} of {side}x{side}", mode, seconds)
    writer.close()


def _steps(pair: Sequence[Training], repeats: int) -> dict[str, Sequence[float]]:
    """Returns the seconds of a step: the median without sampling, and plus what sampling adds per step on average."""
    plain, sampled = pair[0], SampledTraining(pair[1])
    parts: dict[str, Callable[[], Any]] = {
        "step": plain.step,
        "between": sampled.step,
        "sample": sampled.sampled_step,
        "read": sampled.record,
        "update": sampled.measure_update,
    }
    median = {part: averages.median(seconds) for part, seconds in measure_alternately(parts, repeats).items()}
    added = median["sample"] - median["between"] + median["read"] + median["update"] / sampled.updates_every
    return {NOT_SAMPLED: [median["step"]], SAMPLED: [median["step"] + added / sampled.every_n_steps]}


def start_training(shapes: Shapes, mode: str, is_sampled: bool) -> Training:
    """Returns an Adam training of new variables, after its first step.

    Args:
        shapes: Shapes of the variables.
        mode: One of `MODES`.
        is_sampled: Whether to prepare the training for sampling.
    """
    gradients = [_gradient(shape) for shape in shapes]
    variables = [keras.Variable(np.full(gradient.shape, 0.05, np.float32)) for gradient in gradients]
    optimizer = LossScaleOptimizer(keras.optimizers.Adam())
    optimizer.build(variables)
    optimizer.scale_loss(1.0)
    if is_sampled:
        optimizer.prepare_sampling()
    step = tf.function(lambda: optimizer.apply(gradients, variables), jit_compile=MODES[mode], autograph=False)
    return Training(optimizer, step, seconds_per_call(step))


def _gradient(shape: Any) -> tf.Tensor:
    """Magnitudes over eight decades, a fifth of them zero, as in a network with ReLU."""
    random = np.random.default_rng(0)
    values = random.normal(size=shape) * 10.0 ** random.uniform(-8, 0, size=shape) * (random.random(shape) > 0.2)
    return tf.constant(values, tf.float32)


def _fetching(function: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: tf.nest.map_structure(lambda tensor: tensor.numpy(), function())
