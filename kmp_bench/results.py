"""Prints what is measured as tables, and writes it as JSON."""

import logging
import os
import platform
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import keras
import tensorflow as tf
from rich.console import Console
from rich.table import Table

from kmp.enabling import gpus
from kmp.utils import atomic_files
from kmp.utils.version import __version__
from kmp_bench.measurement import Measurement
from kmp_bench.step_comparison import StepComparison


def run(
    console: Console, comparisons: Iterable[Sequence[Measurement]], json_file: Path | None = None
) -> None:
    """Prints a table of each comparison when it is measured.

    Args:
        console: Where to print.
        comparisons: Measures when it is iterated over.
        json_file: JSON file of the results, written again after each comparison. `None` for no
            file.
    """
    share_gpu()
    # It warns about frequent retracing, which is done on purpose.
    tf.get_logger().setLevel(logging.ERROR)
    machine = _printed_header(console)
    if json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)
    results: list[Measurement] = []
    for compared in comparisons:
        console.print(_table(compared))
        results += compared
        if json_file:
            written = [asdict(result) for result in results]
            atomic_files.write_json(json_file, {**machine, "results": written})


def run_model(
    console: Console, measure: Callable[[], StepComparison], json_file: Path | None = None
) -> None:
    """Prints the comparison of the steps of a model when it is measured.

    Args:
        console: Where to print.
        measure: Measures it.
        json_file: JSON file of the results; `None` for no file.
    """
    with console.status("Measuring each precision ..."):  # in a terminal only
        comparison = measure()
    machine = _printed_header(console)
    console.print("", comparison, sep="\n")
    if json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write_json(json_file, {**machine, **comparison.to_dict()})


def share_gpu() -> None:
    """Lets other processes use the memory of the GPU; call it before TensorFlow uses the GPU.

    By default TensorFlow reserves all of it for one process.
    """
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")


def _printed_header(console: Console) -> dict[str, str]:
    machine = header()
    for name, value in machine.items():
        console.print(f"{name}: {value}", highlight=False, markup=False)
    return machine


def header() -> dict[str, str]:
    """Returns the versions and the hardware that the results belong to."""
    processor = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())  # x86 only
    return {
        "kmp": __version__,
        "keras": keras.__version__,
        "tensorflow": tf.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": f"{processor[1] if processor else platform.machine()}, {os.cpu_count()} cores",
        "gpus": ", ".join(gpu.name for gpu in gpus()) or "none",
    }


def _table(compared: Sequence[Measurement]) -> Table:
    """Returns a table with the median of each variant, and its ratio to the first one."""
    first = compared[0]
    title = ", ".join(filter(None, (f"{first.section}: {first.case}", first.mode)))
    table = Table("", "median", "ratio (range)", title=title, title_justify="left")
    for result in compared:
        ratio = "" if result.ratio is None else f"{result.ratio:.2f}"
        if result.ratio_range is not None:
            ratio += f" ({result.ratio_range[0]:.2f}-{result.ratio_range[1]:.2f})"
        table.add_row(result.variant, _amount(result.value, result.unit), ratio)
    return table


def _amount(value: float, unit: str) -> str:
    if unit == "B":
        is_large = value >= 2**20 or not value
        return f"{value / 2**20:.0f} MiB" if is_large else f"{value / 2**10:.1f} KiB"
    if unit == "s":
        return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms"
    return f"{value:,.0f} {unit}"
