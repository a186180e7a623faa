"""Writes the tables of docs/advice.md: what is advised for each program, and what it achieves.

Run with `python tests/advice/faults/table.py`.
"""

import inspect
import itertools
import math
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from cases import CASES, HEALTHY, HELD_OUT
from programs import PROGRAMS
from running import is_cured, is_named, outcome_of, run_program

import kmp

# The causes of float16 that layers in float32 cure.
CURED_BY_FLOAT32 = (
    "backward_overflow",
    "constant",
    "forward_overflow",
    "forward_underflow",
    "loss_overflow",
    "precision_loss",
    "rounding",
)
PAGE = Path(__file__).parents[3] / "docs" / "advice.md"

_COLUMNS = """
| fault | first finding | score | with the change | with the fallback | sound |
| --- | --- | --- | --- | --- | --- |
"""
_FAULTS = "## Programs with a fault\n\n"
_HELD_OUT = "\n## Programs with a fault, held out\n\n"
_HEALTHY = """
## Programs without a fault

{summary}

| program | verdict |
| --- | --- |
"""


class Row(NamedTuple):
    """A program with a fault: what is advised, and what it achieves."""

    cells: list[str]
    has_cause: bool
    has_place: bool
    is_cured: bool
    is_of_float16: bool
    is_repaired: bool


def main():
    """Runs all programs, prints the table and writes the page."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool,
    ):
        rows = dict(zip(CASES, pool.map(_row, CASES, itertools.repeat(folder)), strict=True))
        advices, have_fallback = zip(
            *pool.map(_healthy, HEALTHY, itertools.repeat(folder)), strict=True
        )
    touched = sum(have_fallback)
    alarms = sum(bool(advice.problems) for advice in advices)
    clean = sum("does not hurt" in advice.verdict for advice in advices)
    healthy = _HEALTHY.format(
        summary=(
            f"Of {len(HEALTHY)} programs, {alarms} have a problem by kmp, and {clean} get the"
            f" verdict that their 16-bit format does not hurt them; a repair touches {touched}. One"
            " computes in float32."
        )
    )
    text = (
        _FAULTS
        + _table([row for name, row in rows.items() if name not in HELD_OUT])
        + _HELD_OUT
        + "A fifth of the programs, by a seeded draw of 2026-11-25: no rule is written for one of"
        " them; a new "
        + "rule that broke one was narrowed. "
        + _table([rows[name] for name in HELD_OUT])
        + healthy
        + _lines(
            [[_fault(name), advice.verdict] for name, advice in zip(HEALTHY, advices, strict=True)]
        )
    )
    introduction = PAGE.read_text(encoding="utf-8").partition(_FAULTS)[0]
    PAGE.write_text(introduction + text, encoding="utf-8")


def _healthy(name, folder):
    _, run = run_program(name, Path(folder, name))
    return kmp.advise(run), run.last("fallback") is not None


def _row(name, folder):
    folder = Path(folder, name)
    case, outcome = CASES[name], outcome_of(name, folder)
    finding = next(iter(outcome.advice.problems), None)
    repaired_score, _ = run_program(name, folder / "repaired")
    title = (
        f"`{finding.cause}`: {finding.title} `{finding.change.partition(chr(10))[0]}`"
        if finding
        else "none"
    )
    scores = [_score(score) for score in (outcome.score, outcome.cured_score, repaired_score)]
    is_of_float16 = case.cause in CURED_BY_FLOAT32
    row = Row(
        [_fault(name), title, *scores, f"{case.sound:g}"],
        has_cause=finding is not None and finding.cause == case.cause,
        has_place=finding is not None and is_named(case.at, finding),
        is_cured=is_cured(outcome.cured_score, case.sound),
        is_of_float16=is_of_float16,
        is_repaired=is_of_float16 and is_cured(repaired_score, case.sound),
    )
    print(*row.cells, row[1:], sep=" | ", flush=True)
    return row


def _table(rows):
    causes, places, cured, of_float16, repaired = (
        sum(column) for column in zip(*(row[1:] for row in rows), strict=True)
    )
    summary = (
        f"Of {len(rows)} programs, kmp names the right cause for {causes} and the right place for"
        f" {places}, and the change cures {cured}. Of {of_float16} that float16 alone causes,"
        f" kmp repairs {repaired} without a change.\n"
    )
    print(summary)
    return summary + _COLUMNS + _lines([row.cells for row in rows])


def _fault(name):
    return " ".join(inspect.getdoc(PROGRAMS[name]).split())


def _score(score):
    return "stuck" if math.isnan(score) else f"{score:.3g}"


def _lines(rows):
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in rows
    )


if __name__ == "__main__":
    main()
