"""Training throughput and memory in each precision: ResNet-50, and an encoder with the dimensions of BERT-base."""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmp import callbacks
from kmp.bench.optimizer_step import BARE, KERAS, OURS
from kmp.bench.small_models import TASKS, WITH_CALLBACKS, Task, compiled_model, timed_training
from kmp.bench.timing import Measurement, MeasurementError, comparison, peak_memory, reset_peak_memory

CADENCES = (1, 10, 100)
SubprocessCall = Callable[[str], Any]


@dataclass(frozen=True)
class Variant:
    """How a network is trained.

    Args:
        policy: The dtype policy of its layers.
        scaled: `variant` of `small_models.compiled_model`.
        tensor_float_32: Whether float32 products may use TF32, as TensorFlow does by default.
        callbacks: Row name to a pair: a function that returns the row's callbacks, and the fewest steps to time, so
            that the callbacks read at least once. One row without callbacks if `None`.
    """

    policy: str
    scaled: str = BARE
    tensor_float_32: bool = True
    callbacks: Mapping[str, tuple[Callable[[], list[Any]], int]] | None = None


def _histogram(cadence: int) -> Callable[[], list[Any]]:
    return lambda: [callbacks.GradientHistogram(every_n_steps=cadence)]


# Throughput and memory are compared with the first variant, step times with the first in mixed_float16.
VARIANTS = {
    "float32": Variant("float32", tensor_float_32=False),
    "float32 with TF32": Variant("float32"),
    "mixed_float16, unscaled": Variant("mixed_float16"),
    "mixed_float16, Keras": Variant("mixed_float16", KERAS),
    "mixed_float16, kmp": Variant("mixed_float16", OURS),
    "mixed_float16, kmp + callbacks": Variant(
        "mixed_float16",
        WITH_CALLBACKS,
        callbacks={"mixed_float16, kmp + callbacks": (lambda: callbacks.defaults(tempfile.mkdtemp()), 250)}
        | {f"histogram every {n}": (_histogram(n), n) for n in CADENCES},
    ),
    "mixed_bfloat16": Variant("mixed_bfloat16"),
}


def _resnet50(batch: int, is_small: bool) -> Task:
    side = 64 if is_small else 224
    random = np.random.default_rng(0)

    def build() -> keras.Model:
        images = keras.Input((side, side, 3))
        scaled = keras.layers.Rescaling(1 / 127.5, offset=-1.0)(images)
        logits = keras.applications.ResNet50(weights=None, input_tensor=scaled, classifier_activation=None).output
        return keras.Model(images, keras.layers.Softmax(dtype="float32")(logits))

    x = random.integers(0, 256, (batch, side, side, 3), dtype="uint8")
    return Task(build, x, random.integers(0, 1000, batch), "images/s", batch)


def _bert(batch: int, is_small: bool) -> Task:
    """12 blocks of width 768 with 12 heads, and a classifier on the first token; no dropout."""
    length, vocabulary, width = (32 if is_small else 128), 30522, 768
    random = np.random.default_rng(0)

    def block(hidden: Any) -> Any:
        attended = keras.layers.MultiHeadAttention(12, width // 12)(hidden, hidden)
        hidden = keras.layers.LayerNormalization(epsilon=1e-6)(hidden + attended)
        expanded = keras.layers.Dense(4 * width, activation="gelu")(hidden)
        return keras.layers.LayerNormalization(epsilon=1e-6)(hidden + keras.layers.Dense(width)(expanded))

    def build() -> keras.Model:
        tokens = keras.Input((length,), dtype="int32")
        positions = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
        hidden = keras.layers.Embedding(vocabulary, width)(tokens) + keras.layers.Embedding(length, width)(positions)
        hidden = keras.layers.LayerNormalization(epsilon=1e-6)(hidden)
        for _ in range(12):
            hidden = block(hidden)
        pooled = keras.layers.Dense(width, activation="tanh")(hidden[:, 0])
        return keras.Model(tokens, keras.layers.Softmax(dtype="float32")(keras.layers.Dense(2)(pooled)))

    tokens = random.integers(0, vocabulary, (batch, length))
    return Task(build, tokens, np.arange(batch) % 2, "tokens/s", batch * length)


NETWORKS: dict[str, Callable[[int, bool], Task]] = {"ResNet-50": _resnet50, "BERT-base": _bert}


def compare(
    name: str, mode: str, batch: int, steps: int, turns: int, run_in_subprocess: SubprocessCall
) -> Iterator[list[Measurement]]:
    """Trains each variant of a network in its own process and yields throughput, memory, and step times.

    The processes run one after another, so other load on the machine may slow only some of them.

    Args:
        name: A name in `NETWORKS`. Its inputs are small if there is no GPU.
        mode: One of `MODES`.
        batch: Examples per batch.
        steps: The fewest steps to time together.
        turns: Timed repetitions.
        run_in_subprocess: Evaluates an expression in a new process and returns its value.
    """
    has_gpu = bool(tf.config.list_physical_devices("GPU"))
    variants = [variant for variant in VARIANTS if has_gpu or variant != "float32 with TF32"]
    task = NETWORKS[name](batch, not has_gpu)
    case = f"{name}, {batch} of {'x'.join(map(str, task.x.shape[1:]))}"
    arguments = f"{name!r}, {mode!r}, {batch}, {steps}, {turns}"
    measured = {variant: run_in_subprocess(f"resnet_bert.measure({variant!r}, {arguments})") for variant in variants}
    seconds = {row: times for variant in variants for row, times in measured[variant]["seconds"].items()}
    rates = {variant: [task.units / step for step in seconds[variant]] for variant in variants}
    yield comparison("network throughput", case, mode, rates, task.unit)
    peaks = {variant: [measured[variant]["bytes"]] for variant in variants}
    yield comparison("network memory", case, mode, peaks, "B")
    in_float16 = [row for row in seconds if row.startswith(("mixed_float16", "histogram"))]
    yield comparison("network step in mixed_float16", case, mode, {row: seconds[row] for row in in_float16})


def measure(variant: str, name: str, mode: str, batch: int, steps: int, turns: int) -> dict[str, Any]:
    """Returns the seconds of a step for each row and repetition, and the bytes that the first row adds to peak memory.

    Call it in a new process: it sets TF32 for the whole process, and on the host the peak covers all that the process
    has held. On a GPU the peak starts after the first steps, which try algorithms that need more memory.
    """
    options = VARIANTS[variant]
    tf.config.experimental.enable_tensor_float_32_execution(options.tensor_float_32)
    timed_training(compiled_model(TASKS["MLP"](1), "float32", BARE, mode), TASKS["MLP"](1), 1)()
    reset_peak_memory()
    before = peak_memory()
    task = NETWORKS[name](batch, not tf.config.list_physical_devices("GPU"))
    model = compiled_model(task, options.policy, options.scaled, mode)
    seconds: dict[str, Sequence[float]] = {}
    peaks: list[int] = []
    for row, (make_callbacks, fewest_steps) in (options.callbacks or {variant: (list, 1)}).items():
        train = timed_training(model, task, max(steps, fewest_steps), make_callbacks())
        train()
        reset_peak_memory()
        seconds[row] = [train() for _ in range(turns)]
        peaks.append(peak_memory())
    return {"seconds": seconds, "bytes": peaks[0] - before}


def default_batch(name: str, run_in_subprocess: SubprocessCall) -> int:
    """Returns the batch size that fills a quarter of the GPU in float32, as a multiple of 8. Without a GPU it is 8.

    Raises:
        MeasurementError: If a larger batch takes no more memory.
    """
    if not tf.config.list_physical_devices("GPU"):
        return 8
    small, large = 16, 48
    low, high = (
        run_in_subprocess(f"resnet_bert.measure('float32', {name!r}, 'graph', {batch}, 1, 1)")["bytes"]
        for batch in (small, large)
    )
    if high <= low:
        raise MeasurementError(
            f"The memory of {name} does not grow from a batch of {small} to one of {large}, so no batch size can be "
            "derived from it. Pass one with --batch."
        )
    wanted = run_in_subprocess("tensorflow_internals.memory_limit_of_gpu()") / 4
    return max(8, 8 * math.floor((small + (wanted - low) * (large - small) / (high - low)) / 8))
