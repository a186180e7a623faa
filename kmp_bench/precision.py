"""What each precision gains here: in operations, small models and large networks."""

import gc
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from kmp import callbacks
from kmp.enabling import Gpu, gpus
from kmp.replay import tensor_float_32
from kmp_bench import models
from kmp_bench.measurement import (
    MODES,
    Measurement,
    alternate,
    comparison,
    in_new_process,
    peak_memory,
    reset_peak_memory,
    seconds_per_call,
    xla_error,
)
from kmp_bench.models import BARE, KERAS, OURS, Task, compiled_model, timed_training

PARTS = ("precision", "resnet", "bert")
NETWORKS = {"resnet": "ResNet-50", "bert": "BERT-base"}
TRAINING = "training"
_INTERVAL = 250  # steps after which the callbacks record by default
_FASTER = 1.1  # a smaller gain is not worth another number format, or a compilation


class Variant(NamedTuple):
    """How a model is trained.

    Args:
        policy: The dtype policy of its layers.
        scaling: As in `compiled_model`.
        tensor_float_32: Whether float32 products may use TF32, as TensorFlow does by default.
        has_callbacks: Whether `kmp.callbacks.defaults` record the training in a log.
    """

    policy: str
    scaling: str = BARE
    tensor_float_32: bool = True
    has_callbacks: bool = False


# Of each table, the others are compared with the first.
FORMATS = {
    "float32": Variant("float32"),
    "float16": Variant("mixed_float16", OURS),
    "bfloat16": Variant("mixed_bfloat16"),
}
VARIANTS = {
    "float32": FORMATS["float32"],
    "float32 without TF32": Variant("float32", tensor_float_32=False),
    "mixed_float16, Keras": Variant("mixed_float16", KERAS),
    "mixed_float16, kmp": Variant("mixed_float16", OURS),
    "mixed_float16, kmp + callbacks": Variant("mixed_float16", OURS, has_callbacks=True),
    "mixed_bfloat16": FORMATS["bfloat16"],
}


def first_gpu() -> Gpu | None:
    """Returns the GPU on which everything is measured; `None` for the CPU."""
    return next(iter(gpus()), None)


def usable(variants: Mapping[str, Variant]) -> dict[str, Variant]:
    """Returns the variants that differ here.

    A GPU without bfloat16 has no TF32: both came with compute capability 8.0.
    """
    gpu = first_gpu()
    has_tf32 = gpu is not None and gpu.bfloat16
    has_bfloat16 = gpu is None or gpu.bfloat16
    found = dict(variants)
    for name, variant in variants.items():
        needs_tf32 = not variant.tensor_float_32
        needs_bfloat16 = variant.policy == "mixed_bfloat16"
        if (needs_tf32 and not has_tf32) or (needs_bfloat16 and not has_bfloat16):
            del found[name]
    return found


def measure(
    only: Sequence[str] = (), is_quick: bool = False, batch: int | None = None
) -> Iterator[list[Measurement]]:
    """Measures what each precision gains here, and yields each comparison when it is done.

    Args:
        only: Names in `PARTS`; all of them on a GPU if empty, and `"precision"` on a CPU or if it
            has to be quick.
        is_quick: Whether to measure fewer steps and rounds, and under XLA only.
        batch: Batch size of the large networks; `None` for their defaults.
    """
    modes = ["XLA"] if is_quick else list(MODES)
    for part in parts_of(only, is_quick):
        if part == "precision":
            steps, rounds = (20, 2) if is_quick else (250, 5)
            yield from measure_operations()
            yield from measure_small_models(modes, steps, rounds)
            continue
        steps, rounds = (2, 1) if is_quick else (20, 3)
        for mode in modes:
            yield from measure_network(NETWORKS[part], mode, batch, steps, rounds)


def parts_of(only: Sequence[str], is_quick: bool) -> Sequence[str]:
    """Returns the parts that `measure` measures."""
    return only or (PARTS if gpus() and not is_quick else PARTS[:1])


def measure_machine() -> Iterator[list[Measurement]]:
    """Measures both operations and the training of a transformer block, in less than a minute."""
    yield from measure_operations()
    gpu = first_gpu()
    width, batch = 64, 8
    if gpu:
        # The arithmetic takes longer than the launches of the kernels: 2.6 TFLOP a step from
        # compute capability 8.0, 1.3 TFLOP below, about 3 GB.
        width, batch = 2048, 128 if gpu.bfloat16 else 64
    for mode in MODES if xla_error() is None else ["graph"]:
        case = f"transformer block, {batch} x 64 x {width}"
        yield measure_training(case, models.transformer(width, batch), mode, 4, 3)


def measure_small_models(
    modes: Sequence[str], steps: int, rounds: int
) -> Iterator[list[Measurement]]:
    """Measures the training of a dense network, a convolutional one and a transformer block."""
    scale, more = (16, 8) if gpus() else (2, 1)
    tasks = {
        "MLP": models.mlp(scale * 256, more * 128),
        "conv net": models.convolutional(scale * 16, more * 32),
        "transformer block": models.transformer(scale * 64, more * 8),
    }
    for name, task in tasks.items():
        for mode in modes:
            yield measure_training(name, task, mode, steps, rounds)


def measure_operations() -> Iterator[list[Measurement]]:
    """Measures the throughput of a matrix product and a convolution in each format."""
    size, batch, side, channels, calls = (4096, 64, 56, 256, 50) if gpus() else (512, 8, 32, 32, 3)
    operations = {
        f"matrix product, {size} x {size}": (tf.matmul, (size, size), (size, size)),
        f"convolution, {batch} x {side} x {side} x {channels}": (
            lambda images, kernel: tf.nn.conv2d(images, kernel, 1, "SAME"),
            (batch, side, side, channels),
            (3, 3, channels, channels),
        ),
    }
    for case, operation in operations.items():
        functions = {name: _throughput(*operation, name, calls) for name in usable(FORMATS)}
        yield comparison("operations", case, "graph", alternate(functions, 3), "GFLOP/s")


def _throughput(
    function: Callable[[Any, Any], Any],
    x_shape: Sequence[int],
    weights_shape: Sequence[int],
    dtype: str,
    calls: int,
) -> Callable[[], float]:
    """Returns a function that runs an operation several times and returns the GFLOP/s."""
    scale = math.prod(weights_shape[:-1]) ** -0.5  # keeps the magnitude of `x`
    x = tf.cast(tf.random.normal(x_shape), dtype)
    weights = tf.cast(tf.random.normal(weights_shape) * scale, dtype)
    # Each row or pixel meets all weights.
    operations = 2 * calls * math.prod(x_shape[:-1]) * math.prod(weights_shape)

    # One call runs all of them, each on the result of the one before: a call from Python takes
    # longer than a product on a fast GPU, and TensorFlow would compute equal products only once.
    @tf.function(autograph=False)
    def repeat(x: Any, weights: Any) -> Any:
        for _ in range(calls):
            x = function(x, weights)
        return x

    def run() -> None:
        repeat(x, weights)
        tf.test.experimental.sync_devices()  # a GPU runs asynchronously

    return lambda: operations / seconds_per_call(run) / 1e9


def measure_training(
    case: str, task: Task, mode: str, steps: int, rounds: int
) -> list[Measurement]:
    """Measures the training of a task's model in each format."""
    gc.collect()  # Keras' models are reference cycles, and the next ones need the memory
    functions = {}
    for name, variant in usable(FORMATS).items():
        model = compiled_model(task, variant.policy, variant.scaling, mode)
        functions[name] = timed_training(model, task, steps)
    rates = {}
    for name, seconds in alternate(functions, rounds).items():
        rates[name] = [task.units / step for step in seconds]
    return comparison(TRAINING, case, mode, rates, task.unit)


def task_of(name: str, batch: int | None = None) -> Task:
    """Returns the task of a network in `NETWORKS`, a small one on a CPU.

    The default batch on a GPU fits 16 GB.
    """
    has_gpu = bool(gpus())
    if name == "ResNet-50":
        images, side = (64, 224) if has_gpu else (8, 64)
        return models.resnet50(batch or images, side)
    sequences, length = (32, 128) if has_gpu else (8, 32)
    return models.bert(batch or sequences, length)


def measure_network(
    name: str, mode: str, batch: int | None, steps: int, rounds: int
) -> Iterator[list[Measurement]]:
    """Trains each variant of a network in its own process and yields throughput and memory.

    The processes run one after another, so other load on the machine may slow only some of them.
    """
    task = task_of(name, batch)
    case = f"{name}, {len(task.x)} of {'x'.join(map(str, task.x.shape[1:]))}"
    rates: dict[str, Sequence[float]] = {}
    peaks: dict[str, Sequence[float]] = {}
    for label, variant in usable(VARIANTS).items():
        seconds, peak = in_new_process(train_network, variant, name, mode, batch, steps, rounds)
        rates[label], peaks[label] = [task.units / step for step in seconds], [peak]
    yield comparison("network throughput", case, mode, rates, task.unit)
    yield comparison("network memory", case, mode, peaks, "B")


def train_network(
    variant: Variant, name: str, mode: str, batch: int | None, steps: int, rounds: int
) -> tuple[list[float], int]:
    """Returns the seconds of a step for each round, and the bytes that the training takes.

    These are what it adds to the peak memory of the process. Call it in a new process: on the host
    the peak covers all that the process has held. On a GPU the peak starts after the first steps,
    which try algorithms that need more memory.
    """
    with tensor_float_32(variant.tensor_float_32), tempfile.TemporaryDirectory() as folder:
        warm_up = models.mlp(256)  # excludes what happens once per process
        timed_training(compiled_model(warm_up, "float32", BARE, mode), warm_up, 1)()
        reset_peak_memory()
        before = peak_memory()
        task = task_of(name, batch)
        model = compiled_model(task, variant.policy, variant.scaling, mode)
        loggers = []
        if variant.has_callbacks:
            loggers, steps = callbacks.defaults(folder), max(steps, _INTERVAL)
        train = timed_training(model, task, steps, loggers)
        train()
        reset_peak_memory()
        return [train() for _ in range(rounds)], peak_memory() - before


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


def recommend(results: Sequence[Measurement]) -> Recommendation | None:
    """Returns the simplest policy and mode of which the fastest is less than 1.1 times as fast.

    float32 is simpler than bfloat16, bfloat16 than float16, which needs a loss scale, and each is
    simpler without XLA. A format of 16 bits is at least 1.1 times as fast as float32 in its faster
    mode. Without a measured training step, returns `None`.
    """
    trainings = [result for result in results if result.section == TRAINING]
    if not trainings:
        return None
    fastest = max(result.value for result in trainings)
    in_float32 = max(result.value for result in trainings if result.variant == "float32")
    candidates = [result for result in trainings if _FASTER * result.value > fastest]
    for best in sorted(candidates, key=_complexity):
        speedup = best.value / in_float32
        if best.variant == "float32" or speedup >= _FASTER:
            return Recommendation(FORMATS[best.variant].policy, MODES[best.mode], speedup)
    return None


def _complexity(result: Measurement) -> tuple[int, bool]:
    simplest_first = ("float32", "bfloat16", "float16")
    return simplest_first.index(result.variant), MODES[result.mode]
