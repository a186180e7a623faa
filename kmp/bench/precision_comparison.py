"""Each precision on this machine in under a minute: a matrix product, a convolution and a small training step."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from kmp.backend import hardware, tensor_float_32, xla
from kmp.bench import small_models
from kmp.bench.optimizer_step import MODES
from kmp.bench.timing import Measurement, alternate, comparison, seconds_per_call

_REPEATS = 3
_STEPS = 4
_FASTER = 1.1  # a smaller gain is not worth another number format, or a compilation
_STEP = "training step"
_WITHOUT_TF32 = "float32 without TF32"
_DTYPES = {"float32": tf.float32, _WITHOUT_TF32: tf.float32, "float16": tf.float16, "bfloat16": tf.bfloat16}
_POLICIES = {"float32": "float32", _WITHOUT_TF32: "float32", "float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}


@dataclass(frozen=True)
class Recommendation:
    """What trains fastest on this machine.

    Args:
        policy: The dtype policy: `"float32"` unless another is at least 1.1 times as fast.
        jit_compile: Whether to compile the training step with XLA.
        speedup: The throughput divided by that of float32 in its faster mode.
    """

    policy: str
    jit_compile: bool
    speedup: float


def measure() -> Iterator[list[Measurement]]:
    """Measures on the first GPU, or on the CPU if there is none. Each comparison has a throughput for each format.

    On a GPU, TensorFlow computes matrix products and convolutions of float32 in TF32 if it can, and this is what the
    others are compared with.
    """
    on_gpu = bool(hardware().gpus)
    formats = [name for name in _DTYPES if on_gpu or name != _WITHOUT_TF32]
    size, batch, side, channels = (4096, 64, 56, 256) if on_gpu else (512, 8, 32, 32)
    calls = 20 if on_gpu else 3
    matrix = tf.random.normal((size, size))
    product = functools.partial(_operation, tf.matmul, (matrix, matrix), 2 * size**3, calls)
    yield _compare("operations", f"matrix product, {size} x {size}", "graph", formats, product, "GFLOP/s")
    images, filters = tf.random.normal((batch, side, side, channels)), tf.random.normal((3, 3, channels, channels))
    operations = 2 * 9 * images.shape.num_elements() * channels
    convolution = functools.partial(_operation, _convolve, (images, filters), operations, calls)
    case = f"convolution, {batch} x {side} x {side} x {channels}"
    yield _compare("operations", case, "graph", formats, convolution, "GFLOP/s")
    task = small_models.TASKS["transformer block"](8 if on_gpu else 1)
    for mode in MODES if xla.error() is None else ["graph"]:
        step = functools.partial(_training_step, task, mode)
        yield _compare(_STEP, "transformer block", mode, formats, step, task.unit)


def recommend(results: Sequence[Measurement]) -> Recommendation:
    """Returns the policy and mode to train with, from the results of `measure`.

    bfloat16 is preferred where float16 is less than 1.1 times as fast, because it needs no loss scale.
    """
    rates = {(result.variant, MODES[result.mode]): result.value for result in results if result.section == _STEP}
    best = {name: max(rate for (variant, _), rate in rates.items() if variant == name) for name, _ in rates}
    name = "float32"
    for candidate in ("bfloat16", "float16"):
        if best[candidate] >= _FASTER * best[name]:
            name = candidate
    jit_compile = rates.get((name, True), 0) >= _FASTER * rates[name, False]
    return Recommendation(_POLICIES[name], jit_compile, rates[name, jit_compile] / best["float32"])


def _compare(
    section: str, case: str, mode: str, formats: Sequence[str], make: Callable[[str], Callable[[], float]], unit: str
) -> list[Measurement]:
    rates: Mapping[str, list[float]] = alternate({name: make(name) for name in formats}, _REPEATS)
    return comparison(section, case, mode, rates, unit)


def _operation(
    function: Callable[..., Any], inputs: Sequence[Any], operations: int, calls: int, name: str
) -> Callable[[], float]:
    """Returns a function that measures an operation's throughput in a format."""
    arguments = [tf.cast(tensor, _DTYPES[name]) for tensor in inputs]
    compiled = tf.function(function, autograph=False)

    def repeat() -> None:
        for _ in range(calls):
            result = compiled(*arguments)
        result.numpy()  # a GPU has finished only then

    def rate() -> float:
        with tensor_float_32(name != _WITHOUT_TF32):
            return calls * operations / seconds_per_call(repeat) / 1e9

    return rate


def _training_step(task: small_models.Task, mode: str, name: str) -> Callable[[], float]:
    policy = _POLICIES[name]
    train = small_models.trainer(task, policy, small_models.variant_for(policy), mode, _STEPS)

    def rate() -> float:
        with tensor_float_32(name != _WITHOUT_TF32):
            return task.units / train()

    return rate


def _convolve(images: tf.Tensor, filters: tf.Tensor) -> tf.Tensor:
    return tf.nn.conv2d(images, filters, 1, "SAME")
