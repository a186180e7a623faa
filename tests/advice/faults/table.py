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
from truth import BFLOAT16, FLOAT32, SUSPICIOUS, TRUTHS

import kmp

ALL_CASES = CASES | {name: truth.case for name, truth in TRUTHS.items()}

# The causes of 16 bits that layers in float32 cure.
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
_BFLOAT16 = "\n## Programs with a fault in bfloat16\n\n"
_FLOAT32 = "\n## Programs with a fault in float32\n\n"
_HEALTHY = """
## Programs without a fault

{summary}

| program | verdict |
| --- | --- |
"""
_SUSPICIOUS = """
## Programs without a fault in bfloat16 and float32

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
    is_of_16_bits: bool
    is_repaired: bool


def main():
    """Runs all programs, prints the table and writes the page."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool,
    ):
        rows = dict(
            zip(ALL_CASES, pool.map(_row, ALL_CASES, itertools.repeat(folder)), strict=True)
        )
        names = [*HEALTHY, *SUSPICIOUS]
        healthy = dict(zip(names, pool.map(_healthy, names, itertools.repeat(folder)), strict=True))
    text = (
        _FAULTS
        + _table([rows[name] for name in CASES if name not in HELD_OUT], "float16")
        + _HELD_OUT
        + "A fifth of the programs, by a seeded draw of 2026-11-25: no rule is written for one of"
        " them; a new "
        + "rule that broke one was narrowed. "
        + _table([rows[name] for name in HELD_OUT], "float16")
        + _BFLOAT16
        + _table([rows[name] for name in BFLOAT16], "bfloat16")
        + _FLOAT32
        + _table([rows[name] for name in FLOAT32], "float32")
        + _healthy_table(_HEALTHY, {name: healthy[name] for name in HEALTHY})
        + _healthy_table(_SUSPICIOUS, {name: healthy[name] for name in SUSPICIOUS})
    )
    introduction = PAGE.read_text(encoding="utf-8").partition(_FAULTS)[0]
    PAGE.write_text(introduction + text, encoding="utf-8")


class Healthy(NamedTuple):
    """A program without a fault: what is advised, and whether a repair touched it."""

    advice: kmp.advice.Advice
    is_touched: bool


def _healthy_table(heading, programs):
    alarms = sum(bool(program.advice.problems) for program in programs.values())
    clean = sum("does not hurt" in program.advice.verdict for program in programs.values())
    touched = sum(program.is_touched for program in programs.values())
    summary = (
        f"Of {len(programs)} programs, {alarms} have a problem by kmp, and {clean} get the"
        f" verdict that their format does not hurt them; a repair touches {touched}."
    )
    lines = [[_fault(name), program.advice.verdict] for name, program in programs.items()]
    return heading.format(summary=summary) + _lines(lines)


def _healthy(name, folder):
    _, run = run_program(name, Path(folder, name))
    return Healthy(kmp.advise(run), is_touched=run.last("fallback") is not None)


def _row(name, folder):
    folder = Path(folder, name)
    case, outcome = ALL_CASES[name], outcome_of(name, folder)
    finding = next(iter(outcome.advice.problems), None)
    repaired_score, _ = run_program(name, folder / "repaired")
    title = "none"
    if finding:
        change = finding.change.partition("\n")[0]
        title = f"`{finding.cause}`: {finding.title}" + (f" `{change}`" if change else "")
    scores = [_score(score) for score in (outcome.score, outcome.cured_score, repaired_score)]
    is_of_16_bits = case.cause in CURED_BY_FLOAT32
    row = Row(
        [_fault(name), title, *scores, f"{case.sound:g}"],
        has_cause=finding is not None and finding.cause == case.cause,
        has_place=finding is not None and is_named(case.at, finding),
        is_cured=is_cured(outcome.cured_score, case.sound),
        is_of_16_bits=is_of_16_bits,
        is_repaired=is_of_16_bits and is_cured(repaired_score, case.sound),
    )
    print(*row.cells, row[1:], sep=" | ", flush=True)
    return row


def _table(rows, precision):
    causes, places, cured, of_precision, repaired = (
        sum(column) for column in zip(*(row[1:] for row in rows), strict=True)
    )
    summary = (
        f"Of {len(rows)} programs, kmp names the right cause for {causes} and the right place for"
        f" {places}, and the change cures {cured}."
    )
    if of_precision:
        summary += (
            f" Of {of_precision} that {precision} alone causes, kmp repairs {repaired} without a"
            " change."
        )
    summary += "\n"
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
