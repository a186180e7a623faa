"""`kmp bench`: what loss scaling, callbacks and lower precision cost and gain on this machine."""

import functools
import json
import logging
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from rich.console import Console

from kmp.backend import hardware
from kmp.bench import optimizer_step, resnet_bert, sampling_cost, small_models, tables_and_plots
from kmp.bench.optimizer_step import BARE, INNER, KERAS, MODES, OURS, SAMPLED
from kmp.bench.small_models import WITH_CALLBACKS
from kmp.bench.timing import Measured, MeasurementError, compared
from kmp.optimizer import has_predicable_writes
from kmp.utils import __version__, atomic_files


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Args:
        sets: Names of `_bench_optimizers.SETS`, whose speed is measured.
        inner: Names of `_bench_optimizers.INNER`.
        memory_sets: Names of the sets whose memory is measured, each in processes of its own.
        modes: Of what takes long: memory, training and the two networks.
        ways: Of `_bench_models.scaling`.
        repeats: Turns of optimizer steps.
        model_size: How wide the models are, from 1.
        steps: Training steps in a turn; callbacks read once in 250.
        turns: Turns of training.
        has_model_memory: Whether the memory of each model in each precision is measured.
        sampled: The set whose gradients are sampled.
        side: See `_bench_sampling.cost`.
        first_calls: See `_bench_sampling.cost`.
        has_networks: Whether ResNet-50 and BERT are trained on a GPU without being asked for.
        network_steps: See `_bench_networks.compare`.
        network_turns: See `_bench_networks.compare`.
        batch: See `_bench_networks.compare`; that of `_bench_networks.default_batch` by default.
    """

    sets: tuple[str, ...]
    inner: tuple[str, ...]
    memory_sets: tuple[str, ...]
    modes: tuple[str, ...]
    ways: tuple[str, ...]
    repeats: int
    model_size: int
    steps: int
    turns: int
    has_model_memory: bool
    sampled: str
    side: int
    first_calls: int
    has_networks: bool
    network_steps: int
    network_turns: int
    batch: int | None = None


FULL = Size(
    sets=("8 of 2048x2048", "ResNet-50", "600 small"),
    inner=tuple(INNER),
    memory_sets=("8 of 2048x2048", "ResNet-50"),
    modes=tuple(MODES),
    ways=(BARE, KERAS, OURS, WITH_CALLBACKS),
    repeats=25,
    model_size=2,
    steps=250,
    turns=5,
    has_model_memory=True,
    sampled="ResNet-50",
    side=2048,
    first_calls=5,
    has_networks=True,
    network_steps=20,
    network_turns=3,
)
QUICK = Size(
    sets=("8 of 512x512", "60 small"),
    inner=("Adam",),
    memory_sets=("8 of 2048x2048",),
    modes=("XLA",),
    ways=(BARE, KERAS, OURS),
    repeats=9,
    model_size=1,
    steps=20,
    turns=2,
    has_model_memory=False,
    sampled="8 of 512x512",
    side=512,
    first_calls=1,
    has_networks=False,
    network_steps=2,
    network_turns=1,
)


def run(
    console: Console, size: Size, only: Sequence[str] = (), json_file: Path | None = None, picture: Path | None = None
) -> list[Measured]:
    """Measures, says how it goes, and shows tables.

    Args:
        console: Where to.
        size: How much to measure.
        only: Names of `PARTS`; by default `parts_by_default`.
        json_file: Where the figures go as JSON, or `None`; written anew after each comparison.
        picture: Where they go as a picture, or `None`; there is none where nothing was compared.

    Raises:
        MeasurementError: If something could not be measured; figures from before that are shown and written.
    """
    # Processes of the benchmark share a GPU, which TensorFlow would take whole for the first.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    tf.get_logger().setLevel(logging.ERROR)  # it warns of functions that are traced often, which is what is measured
    found_on = header()
    tables_and_plots.show_header(console, found_on)
    results: list[Measured] = []
    try:
        for name in only or parts_by_default(size):
            for figures in PARTS[name](size):
                console.print(tables_and_plots.in_words(figures), highlight=False, markup=False, soft_wrap=True)
                results += figures
                if json_file:
                    atomic_files.write_json(json_file, found_on | {"results": [asdict(result) for result in results]})
    finally:
        tables_and_plots.show(console, results)
        if picture and any(result.ratio is not None for result in results):
            tables_and_plots.save_picture(results, picture)
    return results


def _speed(size: Size) -> Iterator[list[Measured]]:
    yield from optimizer_step.speed(size.sets, size.inner, size.repeats)


def _memory(size: Size) -> Iterator[list[Measured]]:
    for name in size.memory_sets:
        for mode in size.modes:
            calls = {
                way: f"optimizer_step.memory_of({way!r}, 'Adam', {name!r}, {mode!r})"
                for way in [*optimizer_step.ways(mode), SAMPLED]
            }
            yield _memory_of("peak memory", f"Adam, {name}", mode, calls)
    for name in small_models.TASKS if size.has_model_memory and "XLA" in size.modes else ():
        calls = {
            policy: f"small_models.memory_of({policy!r}, {name!r}, {size.model_size}, 'XLA')"
            for policy in small_models.POLICIES
        }
        yield _memory_of("training memory", name, "XLA", calls)


def _training(size: Size) -> Iterator[list[Measured]]:
    yield from small_models.scaling(size.model_size, size.modes, size.ways, size.steps, size.turns)


def _precision(size: Size) -> Iterator[list[Measured]]:
    yield from small_models.formats(size.model_size, "XLA", size.steps, size.turns)


def _sampling(size: Size) -> Iterator[list[Measured]]:
    yield from sampling_cost.cost(size.sampled, size.side, size.repeats, size.first_calls)


def _network(name: str, size: Size) -> Iterator[list[Measured]]:
    batch = size.batch or resnet_bert.default_batch(name, _in_a_process)
    for mode in size.modes:
        yield from resnet_bert.compare(name, mode, batch, size.network_steps, size.network_turns, _in_a_process)


def parts_by_default(size: Size) -> list[str]:
    """Returns all parts; without a GPU, or in little time, all but the large networks."""
    with_networks = size.has_networks and tf.config.list_physical_devices("GPU")
    return [name for name in PARTS if with_networks or name not in NETWORKS]


NETWORKS = ("resnet", "bert")
WITH_MODE = ("memory", "training", *NETWORKS)

# Each yields its figures as they come, those that are compared together.
PARTS: dict[str, Callable[[Size], Iterator[list[Measured]]]] = {
    "optimizer": _speed,
    "memory": _memory,
    "training": _training,
    "precision": _precision,
    "sampling": _sampling,
    "resnet": functools.partial(_network, "ResNet-50"),
    "bert": functools.partial(_network, "BERT-base"),
}


def _memory_of(section: str, case: str, mode: str, calls: Mapping[str, str]) -> list[Measured]:
    return compared(section, case, mode, {way: [_in_a_process(call)] for way, call in calls.items()}, "B")


_MODULES = (
    "from kmp.backend import tensorflow_internals; from kmp.bench import optimizer_step, resnet_bert, small_models"
)


def _in_a_process(call: str) -> Any:
    """Returns what a call of a function of the benchmark's gives in a process of its own: numbers, lists and dicts."""
    same_path = f"import sys; sys.path[:] = {sys.path}"  # not the folder that the benchmark was started in
    code = f"{same_path}; import json; {_MODULES}; print('found', json.dumps({call}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    if done.returncode or not lines:
        if done.returncode < 0:  # what it wrote before says nothing of that
            raise MeasurementError(f"The measurement {call} failed: {signal.strsignal(-done.returncode)}")
        raise MeasurementError(f"The measurement {call} failed:\n{done.stderr[-2000:]}")
    return json.loads(lines[-1].removeprefix("found "))


def header() -> dict[str, Any]:
    """Returns what was measured on: versions and hardware."""
    gpus = [gpu.name for gpu in hardware().gpus]
    return {
        "kmp": __version__,
        "keras": keras.__version__,
        "tensorflow": tf.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "gpus": gpus,
        "under XLA, a step is skipped by": ways_to_skip(),
    }


def ways_to_skip() -> dict[str, str]:
    """Returns how each of Keras' optimizers skips a step under XLA: by a gate or a branch."""
    kinds = {name: kind for name, kind in vars(keras.optimizers).items() if isinstance(kind, type)}
    found = {name: kind for name, kind in kinds.items() if issubclass(kind, keras.Optimizer)}
    return {
        name: "gate" if has_predicable_writes(kind) else "branch"
        for name, kind in found.items()
        if name not in ("Optimizer", "LossScaleOptimizer")
    }


def _processor() -> str:
    cores = os.cpu_count()
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return f"{names[0].partition(':')[2].strip() if names else platform.processor()}, {cores} cores"
