"""What loss scaling adds to an optimizer's step, to its first call, and to its memory."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmp.bench.timing import Measurement, comparison, measure_alternately, peak_memory, seconds_per_call
from kmp.gradients import UpdateWatch
from kmp.optimizer import LossScaleOptimizer

BARE, KERAS, OURS, COMPILED = "bare", "Keras", "kmp", "kmp, jit_compile"
SAMPLED = "kmp, sampled"
MODES = {"graph": False, "XLA": True}
Shapes = Sequence[tuple[int, ...]]


def resnet50() -> Shapes:
    """Returns the shapes of ResNet-50's 214 trainable variables."""
    return [tuple(variable.shape) for variable in keras.applications.ResNet50(weights=None).trainable_variables]


def many_small(count: int) -> Shapes:
    """Returns `count` shapes, alternately of 4096 and of 64 elements."""
    return [(64, 64), (64,)] * (count // 2)


def few_large(side: int) -> Shapes:
    """Returns the shapes of 8 square matrices."""
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
_WRAPPERS: dict[str, Callable[[keras.optimizers.Optimizer], keras.optimizers.Optimizer]] = {
    BARE: lambda inner: inner,
    KERAS: keras.optimizers.LossScaleOptimizer,
    OURS: LossScaleOptimizer,
    COMPILED: lambda inner: LossScaleOptimizer(inner, jit_compile=True),
}


def variants(mode: str) -> list[str]:
    """Returns the variants to compare. Without `COMPILED` under XLA, which compiles every variant."""
    return [BARE, KERAS, OURS] if MODES[mode] else [BARE, KERAS, OURS, COMPILED]


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(*arguments)


def make_step(
    variant: str, inner: str, shapes: Shapes, mode: str, run: Callable[..., Any] = _call
) -> Callable[[], Any]:
    """Returns an optimizer step on new variables. Its first call traces and compiles.

    Args:
        variant: One of `variants`.
        inner: A name in `INNER`.
        shapes: Shapes of the variables.
        mode: One of `MODES`.
        run: Calls a function with a tuple of arguments, such as the `run` of a distribution strategy.
    """
    return _step_and_optimizer(variant, inner, shapes, mode, run)[0]


def _step_and_optimizer(
    variant: str, inner: str, shapes: Shapes, mode: str, run: Callable[..., Any] = _call
) -> tuple[Callable[[], Any], Any]:
    random = np.random.default_rng(0)
    variables = [keras.Variable(random.normal(size=shape).astype("float32")) for shape in shapes]
    gradients = [tf.constant(random.normal(size=shape), tf.float32) for shape in shapes]
    optimizer = _WRAPPERS[variant](INNER[inner]())
    optimizer.build(variables)
    optimizer.scale_loss(1.0)

    @tf.function(jit_compile=MODES[mode], autograph=False)
    def step(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        run(lambda *values: optimizer.apply(list(values), variables), tuple(gradients))
        return tf.identity(optimizer.iterations.value)  # as a training step returns its logs

    return lambda: step(gradients).numpy(), optimizer


def measure_speed(sets: Sequence[str], inner: Sequence[str], repeats: int) -> Iterator[list[Measurement]]:
    """Measures the first call and the step, and yields each comparison when it is done.

    Args:
        sets: Names in `SETS`.
        inner: Names in `INNER`.
        repeats: Rounds of steps.
    """
    for name in sets:
        shapes = SETS[name]()
        for optimizer in inner:
            for mode in MODES:
                case = f"{optimizer}, {name}"
                for variant in variants(mode):
                    make_step(variant, optimizer, shapes[:2], mode)()  # excludes what happens once per process
                steps = {variant: make_step(variant, optimizer, shapes, mode) for variant in variants(mode)}
                first_calls = {variant: [seconds_per_call(step)] for variant, step in steps.items()}
                yield comparison("first call", case, mode, first_calls)
                yield comparison("optimizer step", case, mode, measure_alternately(steps, repeats, _three_calls))


def _three_calls(step: Callable[[], Any]) -> float:
    return seconds_per_call(step, calls=3)


def memory_of(variant: str, inner: str, name: str, mode: str) -> int:
    """Returns the bytes that variables, gradients and steps add to the peak memory of this process.

    Call it in a new process. `SAMPLED` also measures the update of every step; `GradientHistogram` does so with every
    tenth sample.
    """
    shapes = SETS[name]()
    make_step(BARE, inner, [(2,)], mode)()
    before = peak_memory()
    step = sampled_step(inner, shapes, mode) if variant == SAMPLED else make_step(variant, inner, shapes, mode)
    for _ in range(4):
        step()
    return peak_memory() - before


def sampled_step(inner: str, shapes: Shapes, mode: str) -> Callable[[], Any]:
    """Returns a step as `make_step` does, with its gradients sampled and its update measured."""
    step, optimizer = _step_and_optimizer(OURS, inner, shapes, mode)
    watch = UpdateWatch()
    optimizer.start_sampling(watch, every_n_steps=1)

    def sampled() -> Any:
        watch.arm(optimizer.variables_by_path())
        step()
        sample = optimizer.snapshot().sample
        assert sample is not None
        return watch.measure(sample)

    return sampled
