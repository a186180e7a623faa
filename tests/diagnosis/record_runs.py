"""Records the runs in `recorded` again, from the programs in `tests/advice/faults`.

Run with `PYTHONPATH=tests/advice/faults python tests/diagnosis/record_runs.py`, from the root, and
with the names of the programs if not all are wanted.
"""

import lzma
import sys
import tempfile
import warnings
from pathlib import Path

from cases import CASES, HEALTHY
from recorded_runs import FOLDER, NO_REPAIR, REPAIR, SUFFIX
from recorded_runs import HEALTHY as WITHOUT_FAULT
from running import edited, run_program, source_of

from kmp.advice import SetArguments
from kmp.records.run import log_file

_WITHOUT_REPAIR = SetArguments("kmp.callbacks.defaults", {"repair": "False"})


def main(programs: list[str]) -> None:
    """Runs programs and stores their logs."""
    warnings.simplefilter("ignore")  # of the faults
    for program in programs or [*HEALTHY, *CASES]:
        if program in HEALTHY:
            _store(program + WITHOUT_FAULT, _log_of(program, source_of(program)))
        else:
            _record_fault(program)


def _record_fault(program: str) -> None:
    source = source_of(program)
    repairing = _log_of(program, source)
    unrepaired = _log_of(program, edited(source, [_WITHOUT_REPAIR]))
    _store(program + REPAIR, repairing)
    if _records(unrepaired) == _records(repairing):
        _file(program + NO_REPAIR).unlink(missing_ok=True)
    else:
        _store(program + NO_REPAIR, unrepaired)


def _log_of(program: str, source: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "program")
        run_program(program, place, source)
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
