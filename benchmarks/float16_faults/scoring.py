"""Counts what a tool achieves, and keeps it in a file."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import msgspec

from float16_faults.running import Outcome, is_named
from float16_faults.truth import (
    BFLOAT16,
    FAULTS,
    FLOAT16,
    FLOAT32,
    HEALTHY,
    Fault,
    is_sound,
)

RESULTS = Path(__file__).parent / "results"

# Scores in Keras without a tool, by program; `None` is that of a training that fails.
PlainScores = Mapping[str, float | None]

# The rows of a table. The last one is only for tools that run programs under kmp.
GROUPS: dict[str, list[str]] = {
    "float16": [n for n, f in FLOAT16.items() if not f.held_out and not f.only_kmp],
    "float16, held out": [n for n, f in FLOAT16.items() if f.held_out],
    "bfloat16": list(BFLOAT16),
    "float32": list(FLOAT32),
    "float16, arguments that only kmp has": [n for n, f in FLOAT16.items() if f.only_kmp],
}


@dataclass(frozen=True)
class Results:
    """What a tool achieved.

    Attributes:
        tool: The name of the tool.
        date: The day of the run.
        versions: The versions of Keras and TensorFlow.
        outcomes: The outcomes of programs, by name.
    """

    tool: str
    date: str
    versions: dict[str, str]
    outcomes: dict[str, Outcome]


@dataclass(frozen=True)
class Score:
    """What a tool achieved on one program with a fault, or on several.

    Attributes:
        programs: How many programs there are.
        found: How many have a finding.
        cause: In how many the first finding has the right cause.
        places: How many have a place.
        place: In how many of these the first finding names it.
        cured: How many end sound with the change of the first finding.
        repaired: How many end sound under the tool, and do not in Keras without it.
    """

    programs: int = 0
    found: int = 0
    cause: int = 0
    places: int = 0
    place: int = 0
    cured: int = 0
    repaired: int = 0


def score_of_fault(fault: Fault, outcome: Outcome, plain: float | None = None) -> Score:
    """Scores one program with a fault.

    Args:
        fault: The truth.
        outcome: What the tool achieved.
        plain: The score in Keras without a tool; `None` if that fails or is not known.
    """
    first = next(iter(outcome.findings), None)
    is_repaired = is_sound(outcome.repaired_score, fault.sound)
    return Score(
        programs=1,
        found=first is not None,
        cause=first is not None and first.cause == fault.cause,
        places=bool(fault.place),
        place=bool(first and fault.place and is_named(fault.place, first.text)),
        cured=is_sound(outcome.cured_score, fault.sound),
        repaired=is_repaired and not is_sound(plain, fault.sound),
    )


def total(scores: Sequence[Score]) -> Score:
    """Returns the sums of scores."""
    return Score(*(sum(column) for column in zip(*map(astuple, scores), strict=True)))


def group_scores(outcomes: Mapping[str, Outcome], plain: PlainScores) -> dict[str, Score]:
    """Returns the score of each group of programs of which one was run.

    Args:
        outcomes: What the tool achieved, by program.
        plain: What Keras achieves without a tool.
    """
    scores = {}
    for group, programs in GROUPS.items():
        scored = [
            score_of_fault(FAULTS[name], outcomes[name], plain.get(name))
            for name in programs
            if name in outcomes
        ]
        if scored:
            scores[group] = total(scored)
    return scores


def false_alarms(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Returns the healthy programs with a finding."""
    return [name for name in HEALTHY if name in outcomes and outcomes[name].findings]


def load(tool: str) -> Results:
    """Returns the results of a tool that come with the benchmark."""
    file = RESULTS / f"{tool}.json"
    return msgspec.json.decode(file.read_bytes(), type=Results)


def plain_scores() -> PlainScores:
    """Returns the scores in Keras without a tool that come with the benchmark."""
    return {name: outcome.score for name, outcome in load("none").outcomes.items()}


def outcomes_in(file: Path, tool: str) -> dict[str, Outcome]:
    """Returns the outcomes that a file has; none without a file.

    Raises:
        ValueError: If they are of another tool.
    """
    if not file.exists():
        return {}
    found = msgspec.json.decode(file.read_bytes(), type=Results)
    if found.tool != tool:
        raise ValueError(f"{file} has the results of the tool {found.tool}, not of {tool}")
    return found.outcomes


def save(results: Results, file: Path) -> None:
    """Writes results as indented JSON."""
    text = msgspec.json.format(msgspec.json.encode(results), indent=1)
    file.write_bytes(text + b"\n")


def table_of(results: Collection[Results], plain: PlainScores) -> str:
    """Returns a Markdown table with the scores of tools."""
    lines = [
        "| tool | programs with a fault in | programs | found | cause | place | cured | repaired |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in results:
        for group, score in group_scores(each.outcomes, plain).items():
            place = f"{score.place} of {score.places}"
            cells = [
                *(each.tool, group, score.programs, score.found),
                *(score.cause, place, score.cured, score.repaired),
            ]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def alarms_table_of(results: Collection[Results]) -> str:
    """Returns a Markdown table with the false alarms of tools."""
    lines = ["| tool | healthy programs | false alarms |", "| --- | --- | --- |"]
    for each in results:
        healthy = [name for name in HEALTHY if name in each.outcomes]
        if healthy:
            alarms = false_alarms(each.outcomes)
            lines.append(f"| {each.tool} | {len(healthy)} | {len(alarms)} |")
    return "\n".join(lines)


def warning_of(outcomes: Mapping[str, Outcome], plain: PlainScores) -> str:
    """Returns what has to stand beside the scores of kmp."""
    text = (
        "kmp was developed on these programs, so its scores show what it was made for, not what it"
        " would find elsewhere."
    )
    held_out = group_scores(outcomes, plain).get("float16, held out")
    if held_out is None:
        return text
    return (
        f"{text} No rule was written for the {held_out.programs} programs that are held out, though"
        " a rule that broke one was narrowed: of these it has the cause of"
        f" {held_out.cause}, the place of {held_out.place} of {held_out.places}, and cures"
        f" {held_out.cured}."
    )
