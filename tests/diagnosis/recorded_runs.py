"""Recorded runs of programs, which `record_runs.py` writes.

Of `benchmarks/float16_faults`: NAME.repair is the run of a program with a fault, as it is written;
NAME.norepair that without repairs, stored only if it differs; NAME.healthy that of a program
without a fault. NAME.rare is the run of a program in `rare_programs.py`.
"""

import functools
import lzma
import tempfile
from pathlib import Path

from kmp.records import Run, load_run

FOLDER = Path(__file__).parent / "recorded"
SUFFIX = ".jsonl.xz"
REPAIR, NO_REPAIR, HEALTHY, RARE_RUN = ".repair", ".norepair", ".healthy", ".rare"


def log_of(name: str) -> bytes:
    """Returns the log of a run, as it was written."""
    return lzma.decompress((FOLDER / f"{name}{SUFFIX}").read_bytes())


@functools.cache
def recorded_runs() -> dict[str, Run]:
    """Returns all recorded runs by name. Nobody may change them."""
    files = sorted(FOLDER.glob(f"*{SUFFIX}"))
    names = [file.name.removesuffix(SUFFIX) for file in files]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "kmp.jsonl")
        runs = {}
        for name in names:
            log.write_bytes(log_of(name))
            runs[name] = load_run(log)
    return runs


def repairing_run(program: str) -> Run:
    """Returns the run of a program with a fault, as it is written."""
    return recorded_runs()[f"{program}{REPAIR}"]


def unrepaired_run(program: str) -> Run:
    """Returns the run of a program with a fault, without repairs."""
    runs = recorded_runs()
    return runs.get(f"{program}{NO_REPAIR}", runs[f"{program}{REPAIR}"])


def prefix_of(run: Run, length: int) -> Run:
    """Returns a run as it was when it had so many records."""
    return Run(run.rows[:length], run.header)


def prefixes_of(run: Run) -> list[Run]:
    """Returns a run as it was after each of its records, and before the first."""
    return [prefix_of(run, length) for length in range(len(run.rows) + 1)]


def replay_lengths(run: Run) -> list[int]:
    """Returns the numbers of records with which a run ended in a replay."""
    return [length for length, row in enumerate(run.rows, 1) if row.replay]
