"""Measures what `kmp report` of a large log costs. Run `python tests/log_cost.py [MEGABYTES]` (50 by default).

Prints the processor time to load and to report a log of 200, 2,000 and 20,000 variables, and its ratio to the row
above. Linear cost is a ratio of 10; Python's garbage collector, which scans a large log several times, adds up to a
factor of 2. Then prints time and peak memory of `kmp report` for logs of the given size, each in a process of its own
(Linux only): many samples, 200,000 variables in one sample, only counters, and samples of one variable.
"""

import contextlib
import functools
import io
import itertools
import os
import subprocess
import sys
import tempfile
import time
from operator import itemgetter
from pathlib import Path

SETTINGS = {"compute_dtypes": ["float16"], "float32_variables": ["last/bias"]}


@functools.cache
def sample(variables):
    """Returns a sample of variables whose counts differ."""
    import numpy as np

    from kmp.records import BIN_COUNT, BinCounts, GradientSample

    index = np.arange(variables)
    counts = np.zeros((variables, BIN_COUNT), np.int64)
    counts[:, 0] = index % 7
    for exponent in range(30):
        counts[index, 122 + index % 5 + exponent] = 1 + (index * 7919 + exponent * 104729) % 5000
    names = tuple(f"model/block_{number // 4}/layer_{number % 4}/kernel" for number in range(variables))
    columns = {"weight_norm": np.full(variables, 1.2), "update_norm": np.full(variables, 0.001)}
    columns |= {"updates": counts.sum(1), "lost_updates": index % 100}
    return GradientSample(1, 1024.0, names, BinCounts.of(counts), 2.0 ** (2 + index % 5), 0.1 + index, **columns)


def sample_row(step, variables):
    return {"step": step, "grad_norm": 0.5, "sample": sample(variables)}


def counter_row(step, variables=0):
    counts = {f"model/block_{index // 4}/layer_{index % 4}/kernel": step for index in range(variables)}
    return {
        **{"step": step, "overflow_count": step // 2, "overflow_rate": 0.5, "loss_scale": 1024.0, "last_loss": 0.5},
        **{"nonfinite_loss_count": 0, "overflows_in_a_row": 0, "overflows_by_variable": counts},
    }


def rows_of(variables, samples):
    for step in range(1, samples + 1):
        yield from (counter_row(step, variables), sample_row(step, variables))


LOGS = {
    "200 variables in each sample": lambda: rows_of(200, sys.maxsize - 1),
    "200,000 variables in each sample": lambda: rows_of(200_000, sys.maxsize - 1),
    "counters only": lambda: map(counter_row, itertools.count(1)),
    "1 variable in each sample": lambda: rows_of(1, sys.maxsize - 1),
}


def write(folder, rows, megabytes=None):
    """Writes a log of the rows; with `megabytes`, of as many as reach that size."""
    from kmp.records import SCHEMA, LogEncoder

    encoder = LogEncoder()
    with (folder / "kmp.jsonl").open("w") as log:
        log.write(encoder.line({"schema": SCHEMA, "kind": "header", "settings": SETTINGS}))
        for row in rows:
            log.write(encoder.line(row))
            if megabytes and log.tell() >= megabytes * 1e6:
                break
    return folder


def timed(function, *arguments):
    """Returns the processor time, which other programs on the machine do not change, and the result."""
    begin = time.process_time()
    result = function(*arguments)
    return time.process_time() - begin, result


def peak_memory():
    """Returns the largest amount of memory of this process so far, in MB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def print_ratios():
    import kmp
    from kmp import report

    print("variables   load (s)  ratio   report (s)  ratio")
    last = None
    for variables in (200, 2_000, 20_000):
        with tempfile.TemporaryDirectory() as folder:
            log = write(Path(folder), rows_of(variables, samples=20))
            load_time, run = min((timed(kmp.load_run, log) for _ in range(3)), key=itemgetter(0))
        report_time = min(timed(report.html, {"run": run})[0] for _ in range(3))
        ratios = [
            now / before for now, before in zip((load_time, report_time), last or (load_time, report_time), strict=True)
        ]
        print(f"{variables:9,}{load_time:11.3f}{ratios[0]:7.1f}{report_time:13.3f}{ratios[1]:7.1f}", flush=True)
        last = load_time, report_time


def print_cost(name, megabytes):
    """Reports a log in this process."""
    from kmp.__main__ import main

    with tempfile.TemporaryDirectory() as folder:
        log = write(Path(folder), LOGS[name](), megabytes)
        size = (log / "kmp.jsonl").stat().st_size / 1e6
        before = peak_memory()
        with contextlib.redirect_stdout(io.StringIO()):
            seconds, status = timed(main, ["report", str(log)])
        page = (log / "report.html").stat().st_size / 1e6
        peak = peak_memory() - before
        print(
            f"{name}: {size:.0f} MB, status {status}, {seconds:.1f} s, {peak:.0f} MB of memory "
            f"({peak / size:.1f} times the file), a page of {page:.1f} MB",
            flush=True,
        )


if __name__ == "__main__":
    os.environ.setdefault("MPLBACKEND", "agg")
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    if len(sys.argv) > 2:
        print_cost(sys.argv[2], megabytes)
    else:
        print_ratios()
        for name in LOGS:
            subprocess.run([sys.executable, __file__, str(megabytes), name], check=True)
