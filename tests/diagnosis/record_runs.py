"""Records the runs in `recorded` again, from the programs in `benchmarks/float16_faults`.

Run with `PYTHONPATH=benchmarks python tests/diagnosis/record_runs.py`, from the root, and with the
names of the programs if not all are wanted. All take half an hour, or hours on a CPU that is slow
in float16.
"""

import contextlib
import lzma
import sys
import tempfile
import warnings
from pathlib import Path

from float16_faults.running import source_of, train
from float16_faults.truth import FAULTS
from float16_faults.truth import HEALTHY as HEALTHY_PROGRAMS
from recorded_runs import FOLDER, HEALTHY, NO_REPAIR, REPAIR, SUFFIX

import kmp
from kmp.records.run import log_file


def main(programs: list[str]) -> None:
    """Runs programs and stores their logs."""
    warnings.simplefilter("ignore")  # of the faults
    for program in programs or [*FAULTS, *HEALTHY_PROGRAMS]:
        if program in FAULTS:
            _record_fault(program)
        else:
            _store(program + HEALTHY, _log_of(program, repair=True))


def _record_fault(program: str) -> None:
    repairing = _log_of(program, repair=True)
    unrepaired = _log_of(program, repair=False)
    _store(program + REPAIR, repairing)
    if _records(unrepaired) == _records(repairing):
        _file(program + NO_REPAIR).unlink(missing_ok=True)
    else:
        _store(program + NO_REPAIR, unrepaired)


def _log_of(program: str, repair: bool) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        callbacks = kmp.callbacks.defaults(str(place / "run"), repair=repair)
        with contextlib.suppress(kmp.callbacks.StuckError):
            train(program, source_of(program), place, callbacks)
        return log_file(place / "run").read_bytes()


def _records(log: bytes) -> bytes:
    """Returns a log without its header, which has the time."""
    return log.partition(b"\n")[2]


def _file(name: str) -> Path:
    return FOLDER / f"{name}{SUFFIX}"


def _store(name: str, log: bytes) -> None:
    _file(name).write_bytes(lzma.compress(log, preset=9 | lzma.PRESET_EXTREME))
    print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
