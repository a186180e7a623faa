"""Training throughput and memory in each precision: ResNet-50, and an encoder with the dimensions of BERT-base."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kmp import callbacks
from kmp.bench.measurement import Measurement, comparison, in_new_process, peak_memory, reset_peak_memory
from kmp.bench.models import BARE, KERAS, OURS, Task, bert, compiled_model, mlp, resnet50, timed_training
from kmp.bench.precision import WITHOUT_TF32, formats_on
from kmp.policy import Hardware, hardware
from kmp.replay import tensor_float_32

NETWORKS = ("ResNet-50", "BERT-base")


class Variant(NamedTuple):
    """How a network is trained.

    Args:
        policy: The dtype policy of its layers.
        scaling: As in `compiled_model`.
        tensor_float_32: Whether float32 products may use TF32, as TensorFlow does by default.
        has_callbacks: Whether it is trained with `kmp.callbacks.defaults()` and a log.
        histogram_every: Steps between two histograms of the gradients; 0 for none.
    """

    policy: str
    scaling: str = BARE
    tensor_float_32: bool = True
    has_callbacks: bool = False
    histogram_every: int = 0


# The others are compared with the first. A GPU without bfloat16 has no TF32 either.
VARIANTS = {
    "float32": Variant("float32"),
    WITHOUT_TF32: Variant("float32", tensor_float_32=False),
    "mixed_float16, unscaled": Variant("mixed_float16"),
    "mixed_float16, Keras": Variant("mixed_float16", KERAS),
    "mixed_float16, kmp": Variant("mixed_float16", OURS),
    "mixed_float16, kmp + callbacks": Variant("mixed_float16", OURS, has_callbacks=True),
    "mixed_bfloat16": Variant("mixed_bfloat16"),
}


def task_of(name: str, batch: int | None = None) -> Task:
    """Returns the task of a network in `NETWORKS`, by default with a batch that fits 16 GB; a small one on a CPU."""
    if hardware().gpus:
        return resnet50(batch or 64, side=224) if name == "ResNet-50" else bert(batch or 32, length=128)
    return resnet50(batch or 8, side=64) if name == "ResNet-50" else bert(batch or 8, length=32)


def compare(
    name: str, mode: str, batch: int | None, steps: int, rounds: int, variants: Mapping[str, Variant] = VARIANTS
) -> Iterator[list[Measurement]]:
    """Trains each variant of a network in its own process and yields throughput, memory, and step times in float16.

    The processes run one after another, so other load on the machine may slow only some of them.

    Args:
        name: A name in `NETWORKS`.
        mode: One of `MODES`.
        batch: Examples per batch; `None` for the default of `task_of`.
        steps: The fewest steps to time together.
        rounds: Timed repetitions.
        variants: What to compare, with the first.
    """
    formats = formats_on(Hardware(hardware().gpus[:1]))
    task = task_of(name, batch)
    case = f"{name}, {len(task.x)} of {'x'.join(map(str, task.x.shape[1:]))}"
    seconds: dict[str, Sequence[float]] = {}
    peaks: dict[str, Sequence[float]] = {}
    for label, variant in variants.items():
        if (variant.tensor_float_32 or WITHOUT_TF32 in formats) and (
            variant.policy != "mixed_bfloat16" or "bfloat16" in formats
        ):
            seconds[label], peak = in_new_process(measure, variant, name, mode, batch, steps, rounds)
            peaks[label] = [peak]
    rates = {label: [task.units / step for step in own] for label, own in seconds.items()}
    yield comparison("network throughput", case, mode, rates, task.unit)
    yield comparison("network memory", case, mode, peaks, "B")
    in_float16 = {label: own for label, own in seconds.items() if variants[label].policy == "mixed_float16"}
    if in_float16:
        yield comparison("network step in mixed_float16", case, mode, in_float16)


def measure(
    variant: Variant, name: str, mode: str, batch: int | None, steps: int, rounds: int
) -> tuple[list[float], int]:
    """Returns the seconds of a step for each round, and the bytes that the training adds to the peak memory.

    Call it in a new process: on the host the peak covers all that the process has held. On a GPU the peak starts after
    the first steps, which try algorithms that need more memory.
    """
    with tensor_float_32(variant.tensor_float_32), tempfile.TemporaryDirectory() as folder:
        warm_up = mlp(256)  # excludes what happens once per process
        timed_training(compiled_model(warm_up, "float32", BARE, mode), warm_up, 1)()
        reset_peak_memory()
        before = peak_memory()
        task = task_of(name, batch)
        model = compiled_model(task, variant.policy, variant.scaling, mode)
        extra: list[Any] = callbacks.defaults(folder) if variant.has_callbacks else []
        if variant.histogram_every:
            extra = [callbacks.GradientHistogram(every_n_steps=variant.histogram_every)]
        steps = max(steps, variant.histogram_every, 250 * variant.has_callbacks)  # the callbacks read at least once
        train = timed_training(model, task, steps, extra)
        train()
        reset_peak_memory()
        return [train() for _ in range(rounds)], peak_memory() - before
