"""What the benchmarks share: a command line, and optimizer steps on given variables."""

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Its float16 is many times slower on newer CPUs.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console

from kmp import LossScaleOptimizer
from kmp.callbacks import GradientHistogram
from kmp.gradients.gradient_sampler import copies_of, with_updates
from kmp.gradients.sampling_clock import NEVER
from kmp.records import GradientSample, Record
from kmp.records.jsonl import to_line
from kmp_bench import results
from kmp_bench.measurement import MODES, Measurement, comparison, seconds_per_call
from kmp_bench.models import BARE, KERAS, OURS

tf.get_logger().setLevel("ERROR")  # it warns about frequent retracing, which is done on purpose

COMPILED = "kmp, jit_compile"
WITH_CALLBACKS = "kmp + callbacks"
Shapes = Sequence[tuple[int, ...]]

_WRAPPERS = {
    BARE: lambda inner: inner,
    KERAS: keras.optimizers.LossScaleOptimizer,
    OURS: LossScaleOptimizer,
    COMPILED: lambda inner: LossScaleOptimizer(inner, jit_compile=True),
}
_INNER = {
    "Adam": lambda: keras.optimizers.Adam(1e-4),
    "SGD momentum": lambda: keras.optimizers.SGD(1e-4, momentum=0.9),
}


def main(measure: Callable[[bool], Iterator[list[Measurement]]], description: str | None) -> None:
    """Runs a benchmark and prints its results.

    Parses `--quick`, which `measure` gets, and `--json FILE`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="measure little, in graph mode, to try the benchmark out",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the results to a JSON file"
    )
    parsed = parser.parse_args()
    results.run(Console(), measure(parsed.quick), parsed.json)


def modes_of(is_quick: bool) -> dict[str, bool]:
    """Returns the `MODES` to measure: graph mode alone in a short run."""
    return {"graph": MODES["graph"]} if is_quick else MODES


def shapes_of(name: str) -> Shapes:
    """Returns the shapes of variables by their name.

    Names are `"ResNet-50"`, `"600 small"` (4,096 and 64 elements) and `"8 of 2048x2048"`.
    """
    if name == "ResNet-50":
        return [
            tuple(v.shape) for v in keras.applications.ResNet50(weights=None).trainable_variables
        ]
    count, of = name.split(maxsplit=1)
    if of == "small":
        return [(64, 64), (64,)] * (int(count) // 2)
    side = int(of.rpartition("x")[2])
    return [(side, side)] * int(count)


def per_unit(
    unit: str, case: str, mode: str, values: Mapping[int, Sequence[float]], value_unit: str = "s"
) -> list[Measurement]:
    """Returns a comparison of the costs per variable, or per replica."""
    own = {
        f"{n:,} {unit}{'s' * (n > 1)}": [value / n for value in rounds]
        for n, rounds in values.items()
    }
    return comparison(f"cost per {unit}", case, mode, own, value_unit)


def variants_in(mode: str) -> list[str]:
    """Returns the variants of an optimizer to compare.

    Without `COMPILED` under XLA, which compiles every variant.
    """
    return [BARE, KERAS, OURS] if MODES[mode] else [BARE, KERAS, OURS, COMPILED]


class Step:
    """An optimizer step on new variables. Its first call traces and compiles.

    Args:
        variant: `BARE`, `KERAS`, `OURS` or `COMPILED`.
        shapes: Shapes of the variables.
        mode: One of `MODES`.
        inner: `"Adam"` or `"SGD momentum"`.
        run: Calls a function with a tuple of arguments, such as the `run` of a distribution
            strategy.
    """

    def __init__(
        self,
        variant: str,
        shapes: Shapes,
        mode: str,
        inner: str = "Adam",
        run: Callable[..., Any] = lambda function, arguments: function(*arguments),
    ) -> None:
        random = np.random.default_rng(0)
        variables = [keras.Variable(np.full(shape, 0.05, "float32")) for shape in shapes]
        gradients = []
        # Magnitudes over eight decades, a fifth of them zero, as in a network with ReLU.
        for shape in shapes:
            values = random.normal(size=shape) * 10.0 ** random.uniform(-8, 0, size=shape)
            gradients.append(tf.constant(values * (random.random(shape) > 0.2), tf.float32))
        self.optimizer = _WRAPPERS[variant](_INNER[inner]())
        self.optimizer.build(variables)
        self.optimizer.scale_loss(1.0)

        @tf.function(jit_compile=MODES[mode], autograph=False)
        def step(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
            run(lambda *values: self.optimizer.apply(list(values), variables), tuple(gradients))
            # As a training step returns its logs.
            return tf.identity(self.optimizer.iterations.value)

        self._step = lambda: step(gradients).numpy()

    def __call__(self) -> Any:
        """Takes the step, and returns the number of steps taken."""
        return self._step()

    def seconds(self, calls: int = 1) -> float:
        """Returns the mean seconds of a step."""
        return seconds_per_call(self, calls)


class SampledStep(Step):
    """A step of kmp's Adam that is prepared for sampling, and the parts of a sample."""

    def __init__(self, shapes: Shapes, mode: str) -> None:
        super().__init__(OURS, shapes, mode)
        self.owner, self._before = GradientHistogram(), {}
        self.optimizer.sampler.start(self.owner, NEVER)

    def sampled(self) -> None:
        """Takes a step that is sampled."""
        self.optimizer.sampler.start(
            self.owner, NEVER, first=self.optimizer.counters.read_counts().step + 1
        )
        self()

    def last_sample(self) -> GradientSample:
        """Reads the last sample from the device."""
        return self.optimizer.snapshot().sample

    def record(self) -> str:
        """Returns the line of the log for the last sample."""
        sample = self.last_sample()
        record = Record(step=sample.step, grad_norm=sample.total_norm, sample=sample)
        return to_line(record)

    def arm(self) -> None:
        """Copies the weights, so that the update can be measured."""
        self._before = copies_of(self.optimizer.variables_by_path())

    def measure_update(self) -> GradientSample:
        """Returns the last sample with the update of the weights since `arm`."""
        return with_updates(self.last_sample(), self._before, self.optimizer.variables_by_path())
