"""The throughput of each number format: of a matrix product, a convolution, and the training of small models."""

import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from kmp.bench.measurement import MODES, Measurement, alternate, comparison, seconds_per_call
from kmp.bench.models import BARE, OURS, Task, compiled_model, convolutional, mlp, timed_training, transformer
from kmp.policy import Hardware, hardware, xla_error
from kmp.replay import tensor_float_32

WITHOUT_TF32 = "float32 without TF32"
TRAINING = "training"

_POLICIES = {"float32": "float32", WITHOUT_TF32: "float32", "float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}
_SIMPLEST_FIRST = ("float32", "bfloat16", "float16")
_FASTER = 1.1  # a smaller gain is not worth another number format, or a compilation


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


def formats_on(machine: Hardware) -> list[str]:
    """Returns the formats to compare.

    On a GPU with TF32, TensorFlow computes matrix products and convolutions of float32 in TF32, and this is what the
    others are compared with. A GPU without bfloat16 has no TF32 either: both came with compute capability 8.0.
    """
    if machine.bfloat16:
        return list(_POLICIES)
    return ["float32", "float16"] if machine.gpus else ["float32", "float16", "bfloat16"]


def measure_machine() -> Iterator[list[Measurement]]:
    """Measures both operations and the training of a transformer block, in less than a minute."""
    yield from measure_operations()
    machine = Hardware(hardware().gpus[:1])
    # On a GPU the arithmetic takes longer than the launches of the kernels: 2.6 TFLOP a step from compute capability
    # 8.0, 1.3 TFLOP below, about 3 GB. The next sizes are for a GPU whose memory is in use.
    sizes = [(2048, 128 if machine.bfloat16 else 64), (1024, 64), (512, 32)] if machine.gpus else [(64, 8)]
    for mode in MODES if xla_error() is None else ["graph"]:
        for width, batch in sizes:
            try:
                case = f"transformer block, {batch} x 64 x {width}"
                yield measure_training(case, functools.partial(transformer, width), batch, mode, 4, 3)
                break
            except tf.errors.ResourceExhaustedError:
                if (width, batch) == sizes[-1]:
                    raise


def measure_small_models(modes: Sequence[str], steps: int, rounds: int) -> Iterator[list[Measurement]]:
    """Measures the training of a dense network, a convolutional one and a transformer block."""
    scale, more = (16, 8) if hardware().gpus else (2, 1)
    models: dict[str, tuple[Callable[[int], Task], int]] = {
        "MLP": (functools.partial(mlp, 256 * scale), 128 * more),
        "conv net": (functools.partial(convolutional, 16 * scale), 32 * more),
        "transformer block": (functools.partial(transformer, 64 * scale), 8 * more),
    }
    for name, (make_task, batch) in models.items():
        for mode in modes:
            yield measure_training(name, make_task, batch, mode, steps, rounds)


def measure_operations() -> Iterator[list[Measurement]]:
    """Measures a matrix product and a convolution on the first GPU, or on the CPU if there is none."""
    machine = Hardware(hardware().gpus[:1])
    size, batch, side, channels, calls = (4096, 64, 56, 256, 20) if machine.gpus else (512, 8, 32, 32, 3)

    def throughput(name: str, function: Callable[..., Any], shapes: Sequence[Any], operations: int) -> Any:
        dtype = tf.dtypes.as_dtype("float32" if name == WITHOUT_TF32 else name)
        inputs = [tf.cast(tf.random.normal(shape), dtype) for shape in shapes]
        compiled = tf.function(function, autograph=False)

        def repeat() -> None:
            for _ in range(calls):
                compiled(*inputs)
            tf.test.experimental.sync_devices()  # a GPU runs asynchronously

        return lambda: calls * operations / seconds_per_call(repeat) / 1e9

    def product(name: str) -> Callable[[], float]:
        return throughput(name, tf.matmul, [(size, size)] * 2, 2 * size**3)

    def convolution(name: str) -> Callable[[], float]:
        own_batch = _batch_for(name, batch)
        shapes = (own_batch, side, side, channels), (3, 3, channels, channels)
        return throughput(
            name, lambda x, y: tf.nn.conv2d(x, y, 1, "SAME"), shapes, 18 * own_batch * (side * channels) ** 2
        )

    cases = {
        f"matrix product, {size} x {size}": product,
        f"convolution, {batch} x {side} x {side} x {channels}": convolution,
    }
    for case, make in cases.items():
        yield _compare("operations", case, "graph", {name: make(name) for name in formats_on(machine)}, 3, "GFLOP/s")


def measure_training(
    case: str, make_task: Callable[[int], Task], batch: int, mode: str, steps: int, rounds: int
) -> list[Measurement]:
    """Measures the training of a model in each format, with kmp's loss scaling in float16.

    Args:
        case: Name of the model.
        make_task: Returns the task for a batch size.
        batch: The batch size.
        mode: One of `MODES`.
        steps: Training steps of each round.
        rounds: Number of rounds.
    """

    def throughput(name: str) -> Callable[[], float]:
        task, policy = make_task(_batch_for(name, batch)), _POLICIES[name]
        model = compiled_model(task, policy, OURS if policy == "mixed_float16" else BARE, mode)
        train = timed_training(model, task, steps)
        return lambda: task.units / train()

    functions = {name: throughput(name) for name in formats_on(Hardware(hardware().gpus[:1]))}
    try:
        return _compare(TRAINING, case, mode, functions, rounds, make_task(1).unit)
    finally:
        functions.clear()
        gc.collect()  # Keras' models are reference cycles, and the next ones need the memory


def recommend(results: Sequence[Measurement]) -> Recommendation | None:
    """Returns the policy and mode to train with: the simplest of which the fastest is less than 1.1 times as fast.

    float32 is simpler than bfloat16, bfloat16 than float16, which needs a loss scale, and each is simpler without XLA.
    A format of 16 bits is at least 1.1 times as fast as float32 in its faster mode. Without a measured training step,
    returns `None`.

    Args:
        results: The results of `measure_machine`.
    """
    rates = {
        (result.variant, MODES[result.mode]): result.value
        for result in results
        if result.section == TRAINING and result.variant in _SIMPLEST_FIRST
    }
    if not rates:
        return None
    in_float32 = max(rate for (variant, _), rate in rates.items() if variant == "float32")
    worthwhile = [key for key, rate in rates.items() if key[0] == "float32" or rate >= _FASTER * in_float32]
    simplest_first = sorted(worthwhile, key=lambda key: (_SIMPLEST_FIRST.index(key[0]), key[1]))
    name, jit_compile = next(key for key in simplest_first if _FASTER * rates[key] > max(rates.values()))
    return Recommendation(_POLICIES[name], jit_compile, rates[name, jit_compile] / in_float32)


def _batch_for(name: str, batch: int) -> int:
    """Returns the batch size: TensorFlow reuses the algorithm that it found fastest for a shape, with TF32 or not."""
    return batch - (name == WITHOUT_TF32)


def _compare(
    section: str, case: str, mode: str, functions: Mapping[str, Callable[[], float]], rounds: int, unit: str
) -> list[Measurement]:
    def in_format(name: str) -> float:
        with tensor_float_32(name != WITHOUT_TF32):
            return functions[name]()

    rates = alternate({name: functools.partial(in_format, name) for name in functions}, rounds)
    return comparison(section, case, mode, rates, unit)
