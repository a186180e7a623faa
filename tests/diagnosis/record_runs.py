"""Records the runs in `recorded` again, of `benchmarks/float16_faults` and of `rare_programs.py`.

Run with `PYTHONPATH=benchmarks python tests/diagnosis/record_runs.py`, from the root. All take an
hour, or hours on a CPU that is slow in float16; `--since` continues where it stopped.
"""

import argparse
import contextlib
import datetime
import inspect
import json
import lzma
import multiprocessing
import subprocess
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import rare_programs
from float16_faults.programs import PROGRAMS
from float16_faults.running import source_of, train
from float16_faults.truth import FAULTS
from float16_faults.truth import HEALTHY as HEALTHY_PROGRAMS
from rare_programs import RARE
from recorded_runs import FOLDER, HEALTHY, NO_REPAIR, RARE_RUN, REPAIR, SUFFIX, log_of

import kmp
from kmp.records.run import log_file

PROGRAMS.update({name: vars(rare_programs)[name] for name in RARE})


def main() -> None:
    """Runs programs and stores their logs."""
    parser = argparse.ArgumentParser(description="Records the runs of programs again.")
    parser.add_argument("programs", nargs="*", help="their names; all if there are none")
    parser.add_argument("--processes", type=int, default=1, help="how many run at once")
    parser.add_argument("--since", help="a commit: programs recorded after it are left out")
    arguments = parser.parse_args()
    programs = arguments.programs or [*FAULTS, *HEALTHY_PROGRAMS, *RARE]
    if arguments.since:
        commit = _time_of_commit(arguments.since)
        programs = [program for program in programs if _recorded_at(program) < commit]
    # Forked processes cannot use TensorFlow.
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for count, _ in enumerate(pool.imap_unordered(_record, programs), 1):
            print(f"{count} of {len(programs)}", flush=True)


def _time_of_commit(commit: str) -> datetime.datetime:
    command = ["git", "log", "-1", "--format=%cI", commit]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return datetime.datetime.fromisoformat(text.strip())


def _recorded_at(program: str) -> datetime.datetime:
    """Returns when the run of a program began, as it is written."""
    name = program + _suffix_of(program)
    if not _file(name).exists():
        return datetime.datetime.min.replace(tzinfo=datetime.UTC)
    header = json.loads(log_of(name).partition(b"\n")[0])
    return datetime.datetime.fromisoformat(header["started"])


def _suffix_of(program: str) -> str:
    if program in RARE:
        return RARE_RUN
    return REPAIR if program in FAULTS else HEALTHY


def _record(program: str) -> None:
    warnings.simplefilter("ignore")  # of the faults
    repairing = _log_of(program, repair=True)
    if program not in FAULTS:
        _store(program + _suffix_of(program), repairing)
        return
    unrepaired = _log_of(program, repair=False)
    _store(program + REPAIR, repairing)
    if _records(unrepaired) == _records(repairing):
        _file(program + NO_REPAIR).unlink(missing_ok=True)
    else:
        _store(program + NO_REPAIR, unrepaired)


def _log_of(program: str, repair: bool) -> bytes:
    # By a clock that stands still replays take no time: on each machine, however busy, as many
    # batches are replayed, and none stops early.
    clock = mock.patch("time.monotonic", return_value=0.0)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        callbacks = kmp.callbacks.defaults(str(place / "run"), repair=repair)
        with clock, contextlib.suppress(kmp.callbacks.StuckError):
            train(program, _source_of(program), place, callbacks)
        return log_file(place / "run").read_bytes()


def _source_of(program: str) -> str:
    # Those of the rare ones have classes in their module, whose lines a log names.
    return inspect.getsource(rare_programs) if program in RARE else source_of(program)


def _records(log: bytes) -> bytes:
    """Returns a log without its header, which has the time."""
    return log.partition(b"\n")[2]


def _file(name: str) -> Path:
    return FOLDER / f"{name}{SUFFIX}"


def _store(name: str, log: bytes) -> None:
    _file(name).write_bytes(lzma.compress(log, preset=9 | lzma.PRESET_EXTREME))
    print(name, flush=True)


if __name__ == "__main__":
    main()
