"""Runs what is to be measured, and shows the results as text, as JSON and as a figure."""

import logging
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import keras
import tensorflow as tf
from rich.console import Console
from rich.table import Table

from kmp.bench.measurement import Measurement
from kmp.policy import gpus
from kmp.utils import __version__, atomic_files

_TIMES = "\N{MULTIPLICATION SIGN}"


def run(
    console: Console, comparisons: Iterable[Sequence[Measurement]], json_file: Path | None = None
) -> list[Measurement]:
    """Prints each comparison when it is measured, and tables at the end, also after an error.

    Args:
        console: Where to print.
        comparisons: Measures when it is iterated over.
        json_file: JSON file of the results, written again after each comparison. `None` for no file.
    """
    # Other processes share the GPU with this one. By default TensorFlow reserves all of its memory for one process.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    tf.get_logger().setLevel(logging.ERROR)  # it warns about frequent retracing, which is done on purpose
    machine = header()
    for name, value in machine.items():
        console.print(f"{name}: {value}", highlight=False, markup=False)
    results: list[Measurement] = []
    if json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)
    try:
        for compared in comparisons:
            first = compared[0]
            name = ", ".join(filter(None, (first.section, first.case, first.mode)))
            values = "; ".join(f"{result.variant} {_cell(result)}" for result in compared)
            console.print(f"{name}: {values}", highlight=False, markup=False, soft_wrap=True)
            results += compared
            if json_file:
                atomic_files.write_json(json_file, machine | {"results": [asdict(result) for result in results]})
    finally:
        for table in tables(results):
            console.print(table)
    return results


def header() -> dict[str, str]:
    """Returns the versions and the hardware that the results belong to."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    processor = names[0].partition(":")[2].strip() if names else platform.processor()
    return {
        "kmp": __version__,
        "keras": keras.__version__,
        "tensorflow": tf.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": f"{processor}, {os.cpu_count()} cores",
        "gpus": ", ".join(gpu.name for gpu in gpus()) or "none",
    }


def tables(results: Sequence[Measurement]) -> Iterator[Table]:
    """Yields a table for each case of a section: a row for each variant, a column for each mode."""
    cases: dict[str, list[Measurement]] = {}
    for result in results:
        cases.setdefault(f"{result.section}: {result.case}", []).append(result)
    for title, of_case in cases.items():
        modes = list(dict.fromkeys(result.mode for result in of_case))
        table = Table("", *modes, title=title, title_justify="left")
        for column in table.columns[1:]:
            column.justify = "right"
        for variant in dict.fromkeys(result.variant for result in of_case):
            cells = {result.mode: _cell(result) for result in of_case if result.variant == variant}
            table.add_row(variant, *(cells.get(mode, "") for mode in modes))
        yield table


def _cell(result: Measurement) -> str:
    """Returns the value, and the ratio with its range, such as "20.00 ms x1.60 (1.55-1.71)"."""
    if result.unit == "B":
        is_large = result.value >= 2**20 or not result.value
        amount = f"{result.value / 2**20:.0f} MiB" if is_large else f"{result.value / 2**10:.1f} KiB"
    elif result.unit == "s":
        amount = f"{result.value:.2f} s" if result.value >= 1 else f"{result.value * 1e3:.2f} ms"
    else:
        amount = f"{result.value:,.0f} {result.unit}"
    ratio = "" if result.ratio is None else f" {_TIMES}{result.ratio:.2f}"
    spread = "" if result.ratio_range is None else f" ({result.ratio_range[0]:.2f}-{result.ratio_range[1]:.2f})"
    return f"{amount}{ratio}{spread}"
