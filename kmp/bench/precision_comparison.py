"""Each precision on this machine in under a minute: a matrix product, a convolution and a small training step."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from kmp.backend import Hardware, hardware, tensor_float_32, xla
from kmp.bench import small_models
from kmp.bench.optimizer_step import MODES
from kmp.bench.timing import Measurement, alternate, comparison, seconds_per_call

_REPEATS = 3
_STEPS = 4
_FASTER = 1.1  # a smaller gain is not worth another number format, or a compilation
_STEP = "training step"
_WITHOUT_TF32 = "float32 without TF32"
_DTYPES = {"float32": tf.float32, _WITHOUT_TF32: tf.float32, "float16": tf.float16, "bfloat16": tf.bfloat16}
_SIMPLEST_FIRST = ("float32", "bfloat16", "float16")
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
    """Measures on the first GPU, or on the CPU if there is none. Each comparison has a throughput for each format."""
    on_gpu, formats = bool(hardware().gpus), formats_on(hardware())
    size, batch, side, channels = (4096, 64, 56, 256) if on_gpu else (512, 8, 32, 32)
    calls = 20 if on_gpu else 3

    def product(name: str) -> Callable[[], float]:
        matrix = tf.random.normal((size, size))
        return _throughput(name, tf.matmul, (matrix, matrix), 2 * size**3, calls)

    def convolution(name: str) -> Callable[[], float]:
        # TensorFlow reuses the fastest algorithm that it found for a shape and a dtype, with TF32 or not.
        own_batch = batch - (name == _WITHOUT_TF32)
        images = tf.random.normal((own_batch, side, side, channels))
        filters = tf.random.normal((3, 3, channels, channels))
        return _throughput(name, _convolve, (images, filters), 2 * 9 * own_batch * (side * channels) ** 2, calls)

    yield _compare("operations", f"matrix product, {size} x {size}", "graph", formats, product, "GFLOP/s")
    case = f"convolution, {batch} x {side} x {side} x {channels}"
    yield _compare("operations", case, "graph", formats, convolution, "GFLOP/s")
    # On a GPU 1.3 TFLOP a step, so that the arithmetic takes longer than the launches of the kernels.
    task = small_models.transformer(32, batch=64) if on_gpu else small_models.transformer(1)
    for mode in MODES if xla.error() is None else ["graph"]:
        step = functools.partial(_training_step, task, mode)
        yield _compare(_STEP, "transformer block", mode, formats, step, task.unit)


def formats_on(machine: Hardware) -> list[str]:
    """Returns the formats to compare.

    On a GPU with TF32, TensorFlow computes matrix products and convolutions of float32 in TF32, and this is what the
    others are compared with. A GPU without bfloat16 has no TF32 either: both came with compute capability 8.0.
    """
    if machine.bfloat16:
        return list(_DTYPES)
    return ["float32", "float16"] if machine.gpus else ["float32", "float16", "bfloat16"]


def recommend(results: Sequence[Measurement]) -> Recommendation:
    """Returns the policy and mode to train with: the simplest of which the fastest is less than 1.1 times as fast.

    float32 is simpler than bfloat16, bfloat16 than float16, which needs a loss scale, and each is simpler without XLA.

    Args:
        results: The results of `measure`.
    """
    rates = {
        (result.variant, MODES[result.mode]): result.value
        for result in results
        if result.section == _STEP and result.variant in _SIMPLEST_FIRST
    }
    simplest_first = sorted(rates, key=lambda key: (_SIMPLEST_FIRST.index(key[0]), key[1]))
    fastest = max(rates.values())
    name, jit_compile = next(key for key in simplest_first if _FASTER * rates[key] > fastest)
    in_float32 = max(rate for (variant, _), rate in rates.items() if variant == "float32")
    return Recommendation(_POLICIES[name], jit_compile, rates[name, jit_compile] / in_float32)


def _compare(
    section: str, case: str, mode: str, formats: Sequence[str], make: Callable[[str], Callable[[], float]], unit: str
) -> list[Measurement]:
    rates: Mapping[str, list[float]] = alternate({name: make(name) for name in formats}, _REPEATS)
    return comparison(section, case, mode, rates, unit)


def _throughput(
    name: str, function: Callable[..., Any], inputs: Sequence[Any], operations: int, calls: int
) -> Callable[[], float]:
    """Returns a function that measures an operation's throughput in a format, in GFLOP/s."""
    arguments = [tf.cast(tensor, _DTYPES[name]) for tensor in inputs]
    compiled = tf.function(function, autograph=False)

    def repeat() -> None:
        for _ in range(calls):
            compiled(*arguments)
        tf.test.experimental.sync_devices()  # a GPU runs asynchronously

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
