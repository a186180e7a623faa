"""What is trained in a second, and in what memory, in each precision: ResNet-50 and an encoder of BERT's shape."""

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
from kmp.bench.small_models import TASKS, WITH_CALLBACKS, Task, compiled, timed
from kmp.bench.timing import Measured, MeasurementError, compared, forget_peak, peak_memory

CADENCES = (1, 10, 100)
InProcess = Callable[[str], Any]


@dataclass(frozen=True)
class Way:
    """How a network is trained.

    Args:
        policy: The dtype policy of its layers.
        scaled: As in `_bench_models.compiled`.
        tensor_float_32: Whether products of float32 may be computed in TF32, as TensorFlow does by default.
        callbacks: Makes those of each training that is timed, by the name of its row; each with fewest steps to take.
    """

    policy: str
    scaled: str = BARE
    tensor_float_32: bool = True
    callbacks: Mapping[str, tuple[Callable[[], list[Any]], int]] | None = None


def _histogram(cadence: int) -> Callable[[], list[Any]]:
    return lambda: [callbacks.GradientHistogram(every_n_steps=cadence)]


# Throughput and memory are compared with the first, loss scaling with the first in float16.
WAYS = {
    "float32": Way("float32", tensor_float_32=False),
    "float32 with TF32": Way("float32"),
    "mixed_float16, unscaled": Way("mixed_float16"),
    "mixed_float16, Keras": Way("mixed_float16", KERAS),
    "mixed_float16, kmp": Way("mixed_float16", OURS),
    "mixed_float16, kmp + callbacks": Way(
        "mixed_float16",
        WITH_CALLBACKS,
        callbacks={"mixed_float16, kmp + callbacks": (lambda: callbacks.defaults(tempfile.mkdtemp()), 250)}
        | {f"histogram every {n}": (_histogram(n), n) for n in CADENCES},
    ),
    "mixed_bfloat16": Way("mixed_bfloat16"),
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
    """12 blocks of width 768 with 12 heads, and a classifier of the first token; without dropout."""
    length, words, width = (32 if is_small else 128), 30522, 768
    random = np.random.default_rng(0)

    def block(hidden: Any) -> Any:
        attended = keras.layers.MultiHeadAttention(12, width // 12)(hidden, hidden)
        hidden = keras.layers.LayerNormalization(epsilon=1e-6)(hidden + attended)
        wide = keras.layers.Dense(4 * width, activation="gelu")(hidden)
        return keras.layers.LayerNormalization(epsilon=1e-6)(hidden + keras.layers.Dense(width)(wide))

    def build() -> keras.Model:
        tokens = keras.Input((length,), dtype="int32")
        places = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
        hidden = keras.layers.Embedding(words, width)(tokens) + keras.layers.Embedding(length, width)(places)
        hidden = keras.layers.LayerNormalization(epsilon=1e-6)(hidden)
        for _ in range(12):
            hidden = block(hidden)
        pooled = keras.layers.Dense(width, activation="tanh")(hidden[:, 0])
        return keras.Model(tokens, keras.layers.Softmax(dtype="float32")(keras.layers.Dense(2)(pooled)))

    return Task(build, random.integers(0, words, (batch, length)), np.arange(batch) % 2, "tokens/s", batch * length)


NETWORKS: dict[str, Callable[[int, bool], Task]] = {"ResNet-50": _resnet50, "BERT-base": _bert}


def compare(
    name: str, mode: str, batch: int, steps: int, turns: int, in_process: InProcess
) -> Iterator[list[Measured]]:
    """Trains a network each way, in a process of its own, and yields throughput, memory, and the time of a step.

    The processes come one after another, so what else the machine does may slow one and not another.

    Args:
        name: One of `NETWORKS`; of small inputs where there is no GPU.
        mode: One of `MODES`.
        batch: Examples in a batch.
        steps: How many steps are timed together, at least.
        turns: How often.
        in_process: Evaluates a call of a function of this module in a process of its own.
    """
    has_gpu = bool(tf.config.list_physical_devices("GPU"))
    ways = [way for way in WAYS if has_gpu or way != "float32 with TF32"]
    task = NETWORKS[name](batch, not has_gpu)
    case = f"{name}, {batch} of {'x'.join(map(str, task.x.shape[1:]))}"
    rest = f"{name!r}, {mode!r}, {batch}, {steps}, {turns}"
    found = {way: in_process(f"resnet_bert.measure({way!r}, {rest})") for way in ways}
    seconds = {row: times for way in ways for row, times in found[way]["seconds"].items()}
    rates = {way: [task.units / each for each in seconds[way]] for way in ways}
    yield compared("network throughput", case, mode, rates, task.unit)
    yield compared("network memory", case, mode, {way: [found[way]["bytes"]] for way in ways}, "B")
    in_float16 = [row for row in seconds if row.startswith(("mixed_float16", "histogram"))]
    yield compared("network step in mixed_float16", case, mode, {row: seconds[row] for row in in_float16})


def measure(way: str, name: str, mode: str, batch: int, steps: int, turns: int) -> dict[str, Any]:
    """Returns the seconds of a step, turn by turn, for each row; and the bytes that the first adds to what is held.

    Meant for a fresh process: TF32 is set for all of it, and on the host memory is what it has ever held. On a GPU it
    is what steps hold after the first ones, in which algorithms are tried that need more.
    """
    how = WAYS[way]
    tf.config.experimental.enable_tensor_float_32_execution(how.tensor_float_32)
    timed(compiled(TASKS["MLP"](1), "float32", BARE, mode), TASKS["MLP"](1), 1)()
    forget_peak()
    before = peak_memory()
    task = NETWORKS[name](batch, not tf.config.list_physical_devices("GPU"))
    model = compiled(task, how.policy, how.scaled, mode)
    seconds: dict[str, Sequence[float]] = {}
    held: list[int] = []
    for row, (make, fewest) in (how.callbacks or {way: (list, 1)}).items():
        train = timed(model, task, max(steps, fewest), make())
        train()
        forget_peak()
        seconds[row] = [train() for _ in range(turns)]
        held.append(peak_memory())
    return {"seconds": seconds, "bytes": held[0] - before}


def default_batch(name: str, in_process: InProcess) -> int:
    """Returns how many examples fill a quarter of the GPU in float32, in eights, or 8 without one.

    Raises:
        MeasurementError: If more examples take no more memory.
    """
    if not tf.config.list_physical_devices("GPU"):
        return 8
    few, more = 16, 48
    low, high = (
        in_process(f"resnet_bert.measure('float32', {name!r}, 'graph', {batch}, 1, 1)")["bytes"]
        for batch in (few, more)
    )
    if high <= low:
        raise MeasurementError(f"{more} examples of {name} took no more memory than {few}. Choose with --batch.")
    wanted = in_process("tensorflow_internals.memory_limit_of_gpu()") / 4
    return max(8, 8 * math.floor((few + (wanted - low) * (more - few) / (high - low)) / 8))
