"""What does `kmp report` of a large log cost?

    python benchmarks/log_cost.py [MEGABYTES]

Prints the processor time to load and to report a log of 200, 2,000 and 20,000 variables, and its ratio to the row
above. Linear cost is a ratio of 10; Python's garbage collector, which scans a large log several times, adds up to a
factor of 2. Then prints time and peak memory of `kmp report` for logs of the given size (50 MB by default), each in a
process of its own: many samples, 200,000 variables in one sample, only counters, and samples of one variable.
"""

import contextlib
import functools
import io
import itertools
import os
import sys
import tempfile
import time
from operator import itemgetter
from pathlib import Path

os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

import kmp
from kmp import report
from kmp.bench.measurement import in_new_process, peak_memory
from kmp.records import BIN_COUNT, SCHEMA, GradientSample, LogEncoder
from kmp_cli import main as command

SETTINGS = {"compute_dtypes": ["float16"], "float32_variables": ["last/bias"]}
LOGS = {"200 variables in each sample": 200, "200,000 variables in each sample": 200_000}
LOGS |= {"counters only": 0, "1 variable in each sample": 1}


@functools.cache
def sample(variables):
    """Returns a sample of variables whose counts differ."""
    index = np.arange(variables)
    counts = np.zeros((variables, BIN_COUNT), np.int64)
    counts[:, 0] = index % 7
    for exponent in range(30):
        counts[index, 122 + index % 5 + exponent] = 1 + (index * 7919 + exponent * 104729) % 5000
    names = tuple(f"model/block_{number // 4}/layer_{number % 4}/kernel" for number in range(variables))
    columns = {"weight_norm": np.full(variables, 1.2), "update_norm": np.full(variables, 0.001)}
    columns |= {"updates": counts.sum(1), "lost_updates": index % 100}
    return GradientSample(1, 1024.0, names, counts, 2.0 ** (2 + index % 5), 0.1 + index, **columns)


def rows_of(variables):
    """Yields the counters of each step and, if there are variables, a sample."""
    for step in itertools.count(1):
        names = sample(variables).names if variables else ()
        yield {
            **{"step": step, "overflow_count": step // 2, "overflow_rate": 0.5, "loss_scale": 1024.0, "last_loss": 0.5},
            **{"nonfinite_loss_count": 0, "overflows_in_a_row": 0, "overflows_by_variable": dict.fromkeys(names, step)},
        }
        if variables:
            yield {"step": step, "grad_norm": 0.5, "sample": sample(variables)}


def write(folder, rows, megabytes=None):
    """Writes a log of the rows; with `megabytes`, of as many as reach that size."""
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


def print_ratios():
    """Prints how the costs grow with the number of variables."""
    print("variables   load (s)  ratio   report (s)  ratio")
    last = None
    for variables in (200, 2_000, 20_000):
        with tempfile.TemporaryDirectory() as folder:
            log = write(Path(folder), itertools.islice(rows_of(variables), 40))
            load_time, run = min((timed(kmp.load_run, log) for _ in range(3)), key=itemgetter(0))
        report_time = min(timed(report.html, {"run": run})[0] for _ in range(3))
        times = load_time, report_time
        ratios = [now / before for now, before in zip(times, last or times, strict=True)]
        print(f"{variables:9,}{load_time:11.3f}{ratios[0]:7.1f}{report_time:13.3f}{ratios[1]:7.1f}", flush=True)
        last = times


def cost(name, megabytes):
    """Reports a log in this process, a new one, and returns what it cost."""
    with tempfile.TemporaryDirectory() as folder:
        log = write(Path(folder), rows_of(LOGS[name]), megabytes)
        size = (log / "kmp.jsonl").stat().st_size / 1e6
        before = peak_memory()
        with contextlib.redirect_stdout(io.StringIO()):
            seconds, status = timed(command, ["report", str(log)])
        page = (log / "report.html").stat().st_size / 1e6
    peak = (peak_memory() - before) / 1e6
    times = f"({peak / size:.1f} times the file)"
    return f"{size:.0f} MB, status {status}, {seconds:.1f} s, {peak:.0f} MB of memory {times}, a page of {page:.1f} MB"


if __name__ == "__main__":
    print_ratios()
    for name in LOGS:
        print(f"{name}: {in_new_process(cost, name, int(sys.argv[1]) if len(sys.argv) > 1 else 50)}", flush=True)
