"""Runs the parts of `kmp bench`, and prints and writes their results."""

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
from kmp.bench import optimizer_step, resnet_bert, sampling_cost, small_models, step_operations, tables_and_plots
from kmp.bench.optimizer_step import BARE, INNER, KERAS, MODES, OURS, SAMPLED
from kmp.bench.small_models import WITH_CALLBACKS
from kmp.bench.timing import Measurement, MeasurementError, comparison
from kmp.optimizer import supports_predicated_writes
from kmp.utils import __version__, atomic_files


@dataclass(frozen=True)
class Size:
    """What to measure, and how often.

    Args:
        sets: Names in `optimizer_step.SETS`: the sets of variables whose step is timed.
        inner: Names in `optimizer_step.INNER`: the inner optimizers whose step is timed.
        memory_sets: Names in `optimizer_step.SETS`: the sets whose memory is measured, each variant in its own process.
        modes: Modes of the slow parts: memory, training and the two networks.
        variants: As in `small_models.measure_scaling`.
        repeats: Rounds of optimizer steps.
        model_size: Factor for the width of the small models, at least 1.
        steps: Training steps per round. The callbacks of `WITH_CALLBACKS` read once in 250 steps.
        turns: Rounds of training.
        has_model_memory: Whether to measure the memory of each small model in each precision.
        sampled: A name in `optimizer_step.SETS`: the set whose gradients are sampled.
        side: As in `sampling_cost.measure_cost`.
        first_calls: As in `sampling_cost.measure_cost`.
        has_networks: Whether ResNet-50 and BERT are among the default parts on a GPU.
        network_steps: `steps` of `resnet_bert.compare`.
        network_turns: `turns` of `resnet_bert.compare`.
        batch: `batch` of `resnet_bert.compare`; `resnet_bert.default_batch` if `None`.
    """

    sets: tuple[str, ...]
    inner: tuple[str, ...]
    memory_sets: tuple[str, ...]
    modes: tuple[str, ...]
    variants: tuple[str, ...]
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
    variants=(BARE, KERAS, OURS, WITH_CALLBACKS),
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
    variants=(BARE, KERAS, OURS),
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
    console: Console, size: Size, only: Sequence[str] = (), json_file: Path | None = None, figure: Path | None = None
) -> list[Measurement]:
    """Runs the benchmark, prints each comparison when it is done, and prints tables at the end.

    Args:
        console: Where to print.
        size: What to measure, and how often.
        only: Names in `PARTS`; `parts_by_default` if empty.
        json_file: JSON file of the results, written again after each comparison. `None` for no file.
        figure: File to draw the ratios into, unless there are none. `None` for no file.

    Returns:
        All results.

    Raises:
        MeasurementError: If a measurement fails. Earlier results are still printed and written.
    """
    # Subprocesses share the GPU with this process. By default TensorFlow reserves all of its memory for one process.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    tf.get_logger().setLevel(logging.ERROR)  # it warns about frequent retracing, which the benchmark does on purpose
    machine = header()
    tables_and_plots.show_header(console, machine)
    results: list[Measurement] = []
    try:
        for name in only or parts_by_default(size):
            for compared in PARTS[name](size):
                console.print(tables_and_plots.in_words(compared), highlight=False, markup=False, soft_wrap=True)
                results += compared
                if json_file:
                    atomic_files.write_json(json_file, machine | {"results": [asdict(result) for result in results]})
    finally:
        tables_and_plots.show(console, results)
        if figure and any(result.ratio is not None for result in results):
            tables_and_plots.save_figure(results, figure)
    return results


def _speed(size: Size) -> Iterator[list[Measurement]]:
    yield from optimizer_step.measure_speed(size.sets, size.inner, size.repeats)


def _memory(size: Size) -> Iterator[list[Measurement]]:
    for name in size.memory_sets:
        for mode in size.modes:
            calls = {
                variant: f"optimizer_step.memory_of({variant!r}, 'Adam', {name!r}, {mode!r})"
                for variant in [*optimizer_step.variants(mode), SAMPLED]
            }
            yield _memory_comparison("peak memory", f"Adam, {name}", mode, calls)
    for name in small_models.TASKS if size.has_model_memory and "XLA" in size.modes else ():
        calls = {
            policy: f"small_models.memory_of({policy!r}, {name!r}, {size.model_size}, 'XLA')"
            for policy in small_models.POLICIES
        }
        yield _memory_comparison("training memory", name, "XLA", calls)


def _training(size: Size) -> Iterator[list[Measurement]]:
    yield from small_models.measure_scaling(size.model_size, size.modes, size.variants, size.steps, size.turns)


def _precision(size: Size) -> Iterator[list[Measurement]]:
    yield from small_models.measure_precisions(size.model_size, "XLA", size.steps, size.turns)


def _operations(size: Size) -> Iterator[list[Measurement]]:
    yield from step_operations.measure()


def _sampling(size: Size) -> Iterator[list[Measurement]]:
    yield from sampling_cost.measure_cost(size.sampled, size.side, size.repeats, size.first_calls)


def _network(name: str, size: Size) -> Iterator[list[Measurement]]:
    batch = size.batch or resnet_bert.default_batch(name, _run_in_subprocess)
    for mode in size.modes:
        yield from resnet_bert.compare(name, mode, batch, size.network_steps, size.network_turns, _run_in_subprocess)


def parts_by_default(size: Size) -> list[str]:
    """Returns the names in `PARTS`; without the large networks if there is no GPU, or if the size excludes them."""
    with_networks = size.has_networks and tf.config.list_physical_devices("GPU")
    return [name for name in PARTS if with_networks or name not in NETWORKS]


NETWORKS = ("resnet", "bert")
WITH_MODE = ("memory", "training", *NETWORKS)

# Each yields the results of one comparison at a time.
PARTS: dict[str, Callable[[Size], Iterator[list[Measurement]]]] = {
    "optimizer": _speed,
    "memory": _memory,
    "training": _training,
    "operations": _operations,
    "precision": _precision,
    "sampling": _sampling,
    "resnet": functools.partial(_network, "ResNet-50"),
    "bert": functools.partial(_network, "BERT-base"),
}


def _memory_comparison(section: str, case: str, mode: str, calls: Mapping[str, str]) -> list[Measurement]:
    peaks = {variant: [_run_in_subprocess(call)] for variant, call in calls.items()}
    return comparison(section, case, mode, peaks, "B")


_IMPORTS = (
    "from kmp.backend import tensorflow_internals; from kmp.bench import optimizer_step, resnet_bert, small_models"
)


def _run_in_subprocess(call: str) -> Any:
    """Evaluates a call of one of the imported functions in a new process.

    Args:
        call: A Python expression. Its value must be serializable as JSON.

    Returns:
        The value.

    Raises:
        MeasurementError: If the process fails.
    """
    same_path = f"import sys; sys.path[:] = {sys.path}"  # `-c` alone would import from the current folder
    code = f"{same_path}; import json; {_IMPORTS}; print('result', json.dumps({call}))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    lines = [line for line in process.stdout.splitlines() if line.startswith("result ")]
    if process.returncode or not lines:
        if process.returncode < 0:  # a killed process does not print the reason
            raise MeasurementError(f"The measurement {call} failed: {signal.strsignal(-process.returncode)}")
        raise MeasurementError(f"The measurement {call} failed:\n{process.stderr[-2000:]}")
    return json.loads(lines[-1].removeprefix("result "))


def header() -> dict[str, Any]:
    """Returns the versions and the hardware that the results belong to."""
    gpus = [gpu.name for gpu in hardware().gpus]
    return {
        "kmp": __version__,
        "keras": keras.__version__,
        "tensorflow": tf.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "gpus": gpus,
        "under XLA, a step is skipped by": skip_methods(),
    }


def skip_methods() -> dict[str, str]:
    """Returns how a step of each of Keras' optimizers is skipped under XLA: `"predicated write"` or `"branch"`."""
    classes = {name: value for name, value in vars(keras.optimizers).items() if isinstance(value, type)}
    return {
        name: "predicated write" if supports_predicated_writes(optimizer_class) else "branch"
        for name, optimizer_class in classes.items()
        if issubclass(optimizer_class, keras.Optimizer) and name not in ("Optimizer", "LossScaleOptimizer")
    }


def _processor() -> str:
    cores = os.cpu_count()
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return f"{names[0].partition(':')[2].strip() if names else platform.processor()}, {cores} cores"
