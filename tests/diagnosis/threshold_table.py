"""Writes docs/thresholds.md: which verdicts on the recorded runs depend on each threshold.

And which runs have each cause.

Run with `python tests/diagnosis/threshold_table.py`.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest import mock

from recorded_runs import prefix_of, recorded_runs, replay_lengths

from kmp.advice.diagnose import advice_of
from kmp.diagnosis import Cause, Observations, causes_of, cure_of, thresholds
from kmp.records import Run

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "thresholds.md"
FARTHEST = 10.0  # the factor by which a threshold is moved at most, down or up
STEPS = 6  # of the search for the factor at which a verdict changes
NOT_SEEN = "no run within a factor of ten: its reason is an argument, beside it"
ONLY_TEXT = "only a text of these runs: its reason is beside it"
BY_THE_REPLAY = "applied by the replay"
BY_THE_REPORT = "applied by the report"

# The packages that read thresholds, as the page calls them: `replay` and `callbacks` apply them
# before a record is written, and `report` compares runs.
_READERS = {
    "diagnosis": "diagnosis",
    "replay": "replay",
    "callbacks": "replay",
    "report": "report",
}

_INTRODUCTION = """# How the diagnosis depends on its thresholds

`kmp/diagnosis/thresholds.py` has all thresholds of the diagnosis, each with its reason. This
table shows how far each can be moved on {runs} recorded runs of the [programs with and without a
fault](advice.md). One threshold at a time is moved, and every run is diagnosed at its end and
after each of its replays, {points} times in all, until a run has another verdict: another cause,
severity or location of the first problem, another class of the verdict (16 bits do not hurt, it
is not known, or neither), or other layers that a repair would set to float32. "From" and "to"
are the values in between no verdict was seen to change, found by bisection up to a factor of
ten; an empty cell is beyond that.

"Limited by" names a run that changes at each end. In its place it has

- "{by_the_replay}" for a threshold that no diagnosis reads: the records hold what the replay
  found with it. Where the replay and the diagnosis both read a threshold, the numbers are about
  the diagnosis;
- "{by_the_report}" for a threshold by which the report finds where two runs differ;
- "{only_text}" for a threshold that changes a sentence or a
  proposed change within a factor of ten, and no verdict on one of these runs;
- "{not_seen}".

`python tests/diagnosis/threshold_table.py` writes this page from the runs in
`tests/diagnosis/recorded`, and an exhaustive test compares it with them.

| threshold | from | value | to | read by | limited by |
| --- | --- | --- | --- | --- | --- |
"""


_CAUSES = """
## The programs with each cause

Each class in `kmp/diagnosis/causes` is needed by these programs: one of their recorded runs has it,
among others where it has several. Those that begin with `rare` stand in
`tests/diagnosis/rare_programs.py`, the others in the benchmark.

| cause | programs |
| --- | --- |
"""


class Verdict(NamedTuple):
    """What a diagnosis decides."""

    problem: tuple[str, str, str] | None
    headline: str
    layers: tuple[str, ...]


class Judgement(NamedTuple):
    """A verdict, and all that a diagnosis says."""

    verdict: Verdict
    text: str


class Point(NamedTuple):
    """A recorded run at its end, or as it was after a replay."""

    name: str
    run: Run


class Limit(NamedTuple):
    """How far a threshold can be moved in one direction.

    Attributes:
        value: The last value without another verdict; `None` if it can be moved by `FARTHEST`.
        run: The name of a run that has another verdict beyond it; empty if none has.
        has_other_text: Whether a text changes at the farthest value.
    """

    value: float | None
    run: str
    has_other_text: bool


class Row(NamedTuple):
    """A threshold, and how far it can be moved down and up."""

    name: str
    down: Limit
    up: Limit


def all_thresholds() -> dict[str, float]:
    """Returns the thresholds by name, in the order of the module."""
    return {name: value for name, value in vars(thresholds).items() if name.isupper()}


def points() -> list[Point]:
    """Returns all recorded runs at their ends and after their replays."""
    found = []
    for name, run in recorded_runs().items():
        lengths = {*replay_lengths(run), len(run.rows)}
        found += [Point(name, prefix_of(run, length)) for length in sorted(lengths)]
    return found


def judged(run: Run) -> Judgement:
    """Returns the diagnosis of a run."""
    seen = Observations(run)
    advice, cure = advice_of(seen), cure_of(seen)
    first = next(iter(advice.problems), None)
    problem = (first.cause, first.severity, first.location) if first else None
    layers = cure.layers if cure else ()
    verdict = Verdict(problem, _headline(advice.verdict), layers)
    return Judgement(verdict, str(advice))


def _headline(verdict: str) -> str:
    """Returns the class of a verdict."""
    for headline in ("does not hurt", "It is not known"):
        if headline in verdict:
            return headline
    return ""


class _Watched(ModuleType):
    """A module that notes which of its names are read."""

    def __getattribute__(self, name):
        _read.add(name)
        return super().__getattribute__(name)


_read: set[str] = set()


@contextlib.contextmanager
def _watched_thresholds() -> Iterator[set[str]]:
    """Yields the names of the thresholds that are read in its context, as they are read."""
    _read.clear()
    thresholds.__class__ = _Watched
    try:
        yield _read
    finally:
        thresholds.__class__ = ModuleType


def rows() -> list[Row]:
    """Diagnoses all points with each threshold changed."""
    known = []
    for point in points():
        with _watched_thresholds() as read:
            judgement = judged(point.run)
        known.append((point, judgement, frozenset(read)))
    return [_row(name, value, known) for name, value in all_thresholds().items()]


def _row(name: str, value: float, known: list[tuple[Point, Judgement, frozenset[str]]]) -> Row:
    # A diagnosis that never reads a threshold does not depend on it.
    readers = [(point, judgement) for point, judgement, read in known if name in read]
    down, up = (_limit(name, value, factor, readers) for factor in (1 / FARTHEST, FARTHEST))
    return Row(name, down, up)


def _limit(name: str, value: float, factor: float, readers: list[tuple[Point, Judgement]]) -> Limit:
    """Returns how far a threshold can be moved towards a factor."""
    run, has_other_text = _changed(name, value * factor, readers)
    if not run:
        return Limit(None, "", has_other_text)
    low, high = 0.0, 1.0  # exponents of the factor: without, and with another verdict
    for _ in range(STEPS):
        middle = (low + high) / 2
        changed, _ = _changed(name, value * factor**middle, readers)
        low, high = (low, middle) if changed else (middle, high)
        run = changed or run
    return Limit(_as_type_of(value, value * factor**low), run, has_other_text)


def _as_type_of(value: float, changed: float) -> float:
    return max(1, round(changed)) if isinstance(value, int) else changed


def _changed(name: str, value: float, readers: list[tuple[Point, Judgement]]) -> tuple[str, bool]:
    """Returns the name of a run with another verdict, or whether one has another text."""
    has_other_text = False
    with mock.patch.object(thresholds, name, _as_type_of(getattr(thresholds, name), value)):
        for point, before in readers:
            after = judged(point.run)
            if after.verdict != before.verdict:
                return point.name, True
            has_other_text |= after.text != before.text
    return "", has_other_text


def introduction() -> str:
    """Returns what stands before the table of thresholds."""
    return _INTRODUCTION.format(
        runs=len(recorded_runs()),
        points=len(points()),
        by_the_replay=BY_THE_REPLAY,
        by_the_report=BY_THE_REPORT,
        only_text=ONLY_TEXT,
        not_seen=NOT_SEEN,
    )


def causes() -> str:
    """Returns the table of the causes, with the programs in whose runs each is found."""
    found: dict[type[Cause], dict[str, None]] = {kind: {} for kind in Cause.__subclasses__()}
    for name, run in recorded_runs().items():
        for cause in causes_of(Observations(run)):
            found[type(cause)][name.partition(".")[0]] = None
    rows = (
        f"| `{kind.__name__}` | {', '.join(f'`{name}`' for name in programs)} |\n"
        for kind, programs in sorted(found.items(), key=lambda item: item[0].__name__)
    )
    return _CAUSES + "".join(rows)


def page() -> str:
    """Returns the page."""
    values, readers = all_thresholds(), _readers()
    lines = []
    for row in rows():
        ends = ["" if end.value is None else f"{end.value:.3g}" for end in (row.down, row.up)]
        value, packages = f"{values[row.name]:g}", ", ".join(readers[row.name])
        cells = [f"`{row.name}`", ends[0], value, ends[1], packages]
        lines.append(f"| {' | '.join([*cells, _limited_by(row, readers[row.name])])} |\n")
    return introduction() + "".join(lines) + causes()


def _readers() -> dict[str, list[str]]:
    """Returns the packages that read each threshold."""
    found: dict[str, dict[str, None]] = {name: {} for name in all_thresholds()}
    for folder, package in _READERS.items():
        for file in sorted((ROOT / "kmp" / folder).rglob("*.py")):
            source = file.read_text(encoding="utf-8")
            for name in re.findall(r"\bthresholds\.([A-Z0-9_]+)", source):
                found[name][package] = None
    return {name: list(packages) for name, packages in found.items()}


def _limited_by(row: Row, readers: list[str]) -> str:
    """Returns the runs that limit a threshold, or why there are none."""
    runs = [f"`{end.run}`" for end in (row.down, row.up) if end.run]
    if runs:
        return ", ".join(dict.fromkeys(runs))
    if row.down.has_other_text or row.up.has_other_text:
        return ONLY_TEXT
    alone = {"replay": BY_THE_REPLAY, "report": BY_THE_REPORT}
    return alone.get(readers[0], NOT_SEEN) if len(readers) == 1 else NOT_SEEN


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
