"""Writes docs/thresholds.md: which verdicts on the recorded runs depend on each threshold.

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

from kmp.advice import advise
from kmp.diagnosis import cure_of, thresholds
from kmp.records import Run

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "thresholds.md"
FACTORS = (0.5, 0.8, 1.2, 2.0)
NOT_SEEN = "not seen"
ONLY_TEXT = "only in the text"
BY_THE_REPLAY = "applied by the replay"
BY_THE_REPORT = "applied by the report"

# The packages that read thresholds, as the page calls them. The verdict and its sentences stand in
# `advice`; `replay` and `callbacks` apply thresholds before a record is written, and `report`
# compares runs.
_READERS = {
    "diagnosis": "diagnosis",
    "advice": "advice",
    "replay": "replay",
    "callbacks": "replay",
    "report": "report",
}

_INTRODUCTION = """# How the diagnosis depends on its thresholds

`kmp/diagnosis/thresholds.py` has all thresholds of the diagnosis, each with its reason. This
table shows what each of them decides on {runs} recorded runs of the [programs with and without a
fault](advice.md). Each threshold is multiplied by four factors, one threshold at a time, and
every run is diagnosed at its end and after each of its replays, {points} times in all. A number
is how many of the runs then have another verdict: another cause, severity or location of the
first problem, another class of the verdict (16 bits do not hurt, it is not known, or neither),
or other layers that a repair would set to float32. An integer is rounded, and is at least 1; "-"
stands where that leaves it as it is, or where no diagnosis reads it.

The last column names a run that changes, at the smallest change that shows one. In its place it
has

- "{by_the_replay}" for a threshold that no diagnosis reads: the records hold what the replay
  found with it. Where the replay and the diagnosis both read a threshold, the numbers are about
  the diagnosis;
- "{by_the_report}" for a threshold by which the report finds where two runs differ;
- "{only_text}" for a threshold on which a sentence or a proposed change depends, and no verdict;
- "{not_seen}" for a threshold whose reason is an argument, given beside it, because no run
  measures it within a factor of two.

`python tests/diagnosis/threshold_table.py` writes this page from the runs in
`tests/diagnosis/recorded`, and a test compares it with them.

| threshold | value | read by | times 0.5 | 0.8 | 1.2 | 2 | seen in |
| --- | --- | --- | --- | --- | --- | --- | --- |
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


class Effect(NamedTuple):
    """The names of the runs that change with a threshold: their verdicts, or only the text."""

    verdicts: list[str]
    texts: list[str]


class Row(NamedTuple):
    """A threshold and its effects by factor; `None` where nothing can change.

    That is where rounding leaves the value as it is, or where no diagnosis reads it.
    """

    name: str
    effects: dict[float, Effect | None]


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
    advice, cure = advise(run), cure_of(run)
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
    effects: dict[float, Effect | None] = {}
    for factor in FACTORS:
        changed = scaled(value, factor)
        effects[factor] = None
        if readers and changed != value:
            effects[factor] = _effect(name, changed, readers)
    return Row(name, effects)


def scaled(value: float, factor: float) -> float:
    """Returns a threshold times a factor."""
    if isinstance(value, int):
        return max(1, round(value * factor))
    return value * factor


def _effect(name: str, value: float, readers: list[tuple[Point, Judgement]]) -> Effect:
    verdicts: dict[str, None] = {}
    texts: dict[str, None] = {}
    with mock.patch.object(thresholds, name, value):
        for point, before in readers:
            if point.name in verdicts:
                continue
            after = judged(point.run)
            if after.verdict != before.verdict:
                verdicts[point.name] = None
            elif after.text != before.text:
                texts[point.name] = None
    return Effect(list(verdicts), list(texts))


def page() -> str:
    """Returns the page."""
    introduction = _INTRODUCTION.format(
        runs=len(recorded_runs()),
        points=len(points()),
        by_the_replay=BY_THE_REPLAY,
        by_the_report=BY_THE_REPORT,
        only_text=ONLY_TEXT,
        not_seen=NOT_SEEN,
    )
    values, readers = all_thresholds(), _readers()
    lines = []
    for row in rows():
        counts = [_count(row.effects[factor]) for factor in FACTORS]
        packages = ", ".join(readers[row.name])
        value = f"{values[row.name]:g}"
        seen = _seen(row, readers[row.name])
        cells = [f"`{row.name}`", value, packages, *counts, seen]
        lines.append(f"| {' | '.join(cells)} |\n")
    return introduction + "".join(lines)


def _readers() -> dict[str, list[str]]:
    """Returns the packages that read each threshold."""
    found: dict[str, dict[str, None]] = {name: {} for name in all_thresholds()}
    for folder, package in _READERS.items():
        for file in sorted((ROOT / "kmp" / folder).glob("*.py")):
            source = file.read_text(encoding="utf-8")
            for name in re.findall(r"\bthresholds\.([A-Z0-9_]+)", source):
                found[name][package] = None
    return {name: list(packages) for name, packages in found.items()}


def _count(effect: Effect | None) -> str:
    return "-" if effect is None else str(len(effect.verdicts))


def _seen(row: Row, readers: list[str]) -> str:
    """Returns a run that changes with a threshold, or why there is none."""
    by_size = sorted(row.effects.items(), key=lambda pair: max(pair[0], 1 / pair[0]))
    effects = [effect for _, effect in by_size if effect is not None]
    for effect in effects:
        if effect.verdicts:
            return f"`{effect.verdicts[0]}`"
    if any(effect.texts for effect in effects):
        return ONLY_TEXT
    alone = {"replay": BY_THE_REPLAY, "report": BY_THE_REPORT}
    return alone.get(readers[0], NOT_SEEN) if len(readers) == 1 else NOT_SEEN


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
