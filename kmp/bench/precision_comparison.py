"""Each precision on this machine in under a minute: a matrix product, a convolution and a small training step."""

import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from kmp.bench import small_models
from kmp.bench.optimizer_step import MODES
from kmp.bench.timing import Measurement, alternate, comparison, seconds_per_call
from kmp.policy import Hardware, hardware, xla_error
from kmp.replay import tensor_float_32

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
    machine = Hardware(hardware().gpus[:1])
    on_gpu, formats = bool(machine.gpus), formats_on(machine)
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
    for mode in MODES if xla_error() is None else ["graph"]:
        yield _compare_training(mode, formats, _sizes_of_step(machine))


def formats_on(machine: Hardware) -> list[str]:
    """Returns the formats to compare.

    On a GPU with TF32, TensorFlow computes matrix products and convolutions of float32 in TF32, and this is what the
    others are compared with. A GPU without bfloat16 has no TF32 either: both came with compute capability 8.0.
    """
    if machine.bfloat16:
        return list(_DTYPES)
    return ["float32", "float16"] if machine.gpus else ["float32", "float16", "bfloat16"]


def _sizes_of_step(machine: Hardware) -> list[tuple[int, int]]:
    """Returns width and batch size of the transformer block; the later ones if the memory is not enough.

    On a GPU the arithmetic takes longer than the launches of the kernels: 2.6 TFLOP a step from compute capability 8.0,
    1.3 TFLOP below, about 3 GB.
    """
    if not machine.gpus:
        return [(1, 8)]
    return [(32, 128 if machine.bfloat16 else 64), (16, 64), (8, 32)]


def _compare_training(mode: str, formats: Sequence[str], sizes: Sequence[tuple[int, int]]) -> list[Measurement]:
    *larger, smallest = sizes
    for size in larger:
        try:
            return _compare_step_of(size, mode, formats)
        except tf.errors.ResourceExhaustedError:
            gc.collect()  # Keras' models are reference cycles
    return _compare_step_of(smallest, mode, formats)


def _compare_step_of(size: tuple[int, int], mode: str, formats: Sequence[str]) -> list[Measurement]:
    width, batch = size
    task = small_models.transformer(width, batch)
    step = functools.partial(_training_step, task, mode)
    compared = _compare(_STEP, f"transformer block, {batch} x 64 x {64 * width}", mode, formats, step, task.unit)
    gc.collect()  # the models of the next comparison need the memory
    return compared


def recommend(results: Sequence[Measurement]) -> Recommendation | None:
    """Returns the policy and mode to train with: the simplest of which the fastest is less than 1.1 times as fast.

    float32 is simpler than bfloat16, bfloat16 than float16, which needs a loss scale, and each is simpler without XLA.
    A format of 16 bits is at least 1.1 times as fast as float32 in its faster mode. Without a measured training step,
    returns `None`.

    Args:
        results: The results of `measure`.
    """
    rates = {
        (result.variant, MODES[result.mode]): result.value
        for result in results
        if result.section == _STEP and result.variant in _SIMPLEST_FIRST
    }
    if not rates:
        return None
    in_float32 = max(rate for (variant, _), rate in rates.items() if variant == "float32")
    worthwhile = [key for key, rate in rates.items() if key[0] == "float32" or rate >= _FASTER * in_float32]
    fastest = max(rates.values())
    simplest_first = sorted(worthwhile, key=lambda key: (_SIMPLEST_FIRST.index(key[0]), key[1]))
    name, jit_compile = next(key for key in simplest_first if _FASTER * rates[key] > fastest)
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
