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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from rich.console import Console

from kmp.bench import (
    fit_time,
    growth,
    optimizer_step,
    replay_cost,
    resnet_bert,
    sampling_cost,
    small_models,
    step_operations,
    tables_and_plots,
)
from kmp.bench.optimizer_step import SAMPLED
from kmp.bench.sizes import Size
from kmp.bench.timing import Measurement, MeasurementError, comparison, over_processes
from kmp.optimizer import PREDICABLE_OPTIMIZERS
from kmp.policy import hardware
from kmp.utils import __version__, atomic_files


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
    if size.processes == 1:
        yield from optimizer_step.measure_speed(size.sets, size.inner, size.repeats)
        return
    rounds = max(1, size.repeats // size.processes)
    for name in size.sets:
        measure = f"optimizer_step.measure_speed([{name!r}], {size.inner}, {rounds})"
        call = f"[[asdict(result) for result in compared] for compared in {measure}]"
        processes = [_run_in_subprocess(call) for _ in range(size.processes)]
        for same in zip(*processes, strict=True):
            yield over_processes([[Measurement(**result) for result in compared] for compared in same])


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


def _fit(size: Size) -> Iterator[list[Measurement]]:
    yield from fit_time.measure(size.fit_tasks, size.modes, size.fit_steps, size.turns, _run_in_subprocess)


def _precision(size: Size) -> Iterator[list[Measurement]]:
    yield from small_models.measure_precisions(size.model_size, "XLA", size.steps, size.turns)


def _operations(size: Size) -> Iterator[list[Measurement]]:
    yield from step_operations.measure()


def _sampling(size: Size) -> Iterator[list[Measurement]]:
    yield from sampling_cost.measure_cost(size.sampled, size.side, size.repeats, size.first_calls)


def _replay(size: Size) -> Iterator[list[Measurement]]:
    yield from replay_cost.measure(size.model_size, size.turns, _run_in_subprocess)


def _growth(size: Size) -> Iterator[list[Measurement]]:
    yield from growth.measure_variables(size.counts, size.repeats, size.turns)
    yield from growth.measure_replicas(size.replicas, size.repeats, _run_in_subprocess)


def _network(name: str, size: Size) -> Iterator[list[Measurement]]:
    batch = size.batch or resnet_bert.default_batch(name, _run_in_subprocess)
    for mode in size.modes:
        yield from resnet_bert.compare(name, mode, batch, size.network_steps, size.network_turns, _run_in_subprocess)


def parts_by_default(size: Size) -> list[str]:
    """Returns the names in `PARTS`; without the large networks if there is no GPU, or if the size excludes them."""
    with_networks = size.has_networks and tf.config.list_physical_devices("GPU")
    return [name for name in PARTS if with_networks or name not in NETWORKS]


NETWORKS = ("resnet", "bert")
WITH_MODE = ("memory", "fit", *NETWORKS)

# Each yields the results of one comparison at a time.
PARTS: dict[str, Callable[[Size], Iterator[list[Measurement]]]] = {
    "optimizer": _speed,
    "memory": _memory,
    "fit": _fit,
    "operations": _operations,
    "precision": _precision,
    "sampling": _sampling,
    "replay": _replay,
    "growth": _growth,
    "resnet": functools.partial(_network, "ResNet-50"),
    "bert": functools.partial(_network, "BERT-base"),
}


def _memory_comparison(section: str, case: str, mode: str, calls: Mapping[str, str]) -> list[Measurement]:
    peaks = {variant: [_run_in_subprocess(call)] for variant, call in calls.items()}
    return comparison(section, case, mode, peaks, "B")


_IMPORTS = (
    "from dataclasses import asdict; from kmp.backend import tensorflow_internals; "
    "from kmp.bench import fit_time, growth, optimizer_step, replay_cost, resnet_bert, small_models"
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
        name: "predicated write" if name in PREDICABLE_OPTIMIZERS else "branch"
        for name, optimizer_class in classes.items()
        if issubclass(optimizer_class, keras.Optimizer) and name not in ("Optimizer", "LossScaleOptimizer")
    }


def _processor() -> str:
    cores = os.cpu_count()
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return f"{names[0].partition(':')[2].strip() if names else platform.processor()}, {cores} cores"
