"""What loss scaling adds to an optimizer's step, to its first call, and to its memory."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmp.bench.timing import Measured, compared, peak_memory, seconds_of, take_turns
from kmp.gradients import UpdateWatch
from kmp.optimizer import LossScaleOptimizer

BARE, KERAS, OURS, COMPILED = "bare", "Keras", "kmp", "kmp, jit_compile"
SAMPLED = "kmp, sampled"
MODES = {"graph": False, "XLA": True}
Shapes = Sequence[tuple[int, ...]]


def resnet50() -> Shapes:
    """The 214 trained variables of ResNet-50."""
    return [tuple(variable.shape) for variable in keras.applications.ResNet50(weights=None).trainable_variables]


def many_small(count: int) -> Shapes:
    """So many variables, of 4096 and 64 elements in turn."""
    return [(64, 64), (64,)] * (count // 2)


def few_large(side: int) -> Shapes:
    """8 square matrices."""
    return [(side, side)] * 8


SETS: dict[str, Callable[[], Shapes]] = {
    "ResNet-50": resnet50,
    "600 small": lambda: many_small(600),
    "60 small": lambda: many_small(60),
    "8 of 2048x2048": lambda: few_large(2048),
    "8 of 512x512": lambda: few_large(512),
}
INNER: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "Adam": lambda: keras.optimizers.Adam(1e-4),
    "SGD momentum": lambda: keras.optimizers.SGD(1e-4, momentum=0.9),
}
_WRAPPED: dict[str, Callable[[keras.optimizers.Optimizer], keras.optimizers.Optimizer]] = {
    BARE: lambda inner: inner,
    KERAS: keras.optimizers.LossScaleOptimizer,
    OURS: LossScaleOptimizer,
    COMPILED: lambda inner: LossScaleOptimizer(inner, jit_compile=True),
}


def ways(mode: str) -> list[str]:
    """Returns the ways to compare; under XLA everything is compiled as it is."""
    return [BARE, KERAS, OURS] if MODES[mode] else [BARE, KERAS, OURS, COMPILED]


def step_of(way: str, inner: str, shapes: Shapes, mode: str) -> Callable[[], Any]:
    """Returns an optimizer's step on variables of its own; the first call of it traces and compiles.

    Args:
        way: One of `ways`.
        inner: One of `INNER`.
        shapes: Those of the variables.
        mode: One of `MODES`.
    """
    return _step_and_optimizer(way, inner, shapes, mode)[0]


def _step_and_optimizer(way: str, inner: str, shapes: Shapes, mode: str) -> tuple[Callable[[], Any], Any]:
    random = np.random.default_rng(0)
    variables = [keras.Variable(random.normal(size=shape).astype("float32")) for shape in shapes]
    gradients = [tf.constant(random.normal(size=shape), tf.float32) for shape in shapes]
    optimizer = _WRAPPED[way](INNER[inner]())
    optimizer.build(variables)
    optimizer.scale_loss(1.0)

    @tf.function(jit_compile=MODES[mode], autograph=False)
    def step(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        optimizer.apply(gradients, variables)
        return tf.identity(optimizer.iterations.value)  # as a training step returns its logs

    return lambda: step(gradients).numpy(), optimizer


def speed(sets: Sequence[str], inner: Sequence[str], repeats: int) -> Iterator[list[Measured]]:
    """Measures step and first call; yields them as they come.

    Args:
        sets: Names of `SETS`.
        inner: Names of `INNER`.
        repeats: Turns that each way gets.
    """
    for name in sets:
        shapes = SETS[name]()
        for optimizer in inner:
            for mode in MODES:
                case = f"{optimizer}, {name}"
                for way in ways(mode):
                    step_of(way, optimizer, shapes[:2], mode)()  # what is done once in a process
                steps = {way: step_of(way, optimizer, shapes, mode) for way in ways(mode)}
                first = {way: [seconds_of(step)] for way, step in steps.items()}
                yield compared("first call", case, mode, first)
                yield compared("optimizer step", case, mode, take_turns(steps, repeats, _three_calls))


def _three_calls(step: Callable[[], Any]) -> float:
    return seconds_of(step, calls=3)


def memory_of(way: str, inner: str, name: str, mode: str) -> int:
    """Returns the bytes that variables, gradients and steps added to this process' peak; meant for a fresh process.

    A step that is `SAMPLED` has its update measured too, as `GradientHistogram` does with every tenth.
    """
    shapes = SETS[name]()
    step_of(BARE, inner, [(2,)], mode)()
    before = peak_memory()
    step = sampled_step(inner, shapes, mode) if way == SAMPLED else step_of(way, inner, shapes, mode)
    for _ in range(4):
        step()
    return peak_memory() - before


def sampled_step(inner: str, shapes: Shapes, mode: str) -> Callable[[], Any]:
    """Returns a step as `step_of` does, whose gradients and update are measured."""
    step, optimizer = _step_and_optimizer(OURS, inner, shapes, mode)
    watch = UpdateWatch()
    optimizer.start_sampling(watch, every_n_steps=1)

    def sampled() -> Any:
        watch.arm(optimizer.variables_by_path())
        step()
        found = optimizer.snapshot().sample
        assert found is not None
        return watch.measure(found)

    return sampled
