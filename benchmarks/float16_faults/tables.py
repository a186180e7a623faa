"""Writes the tables of README.md in this folder and of docs/advice.md, from the stored results.

Run with `python -m float16_faults.tables`, in `benchmarks`.
"""

import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path

from float16_faults.programs import PROGRAMS
from float16_faults.running import Outcome
from float16_faults.scoring import (
    PlainScores,
    alarms_table_of,
    load,
    plain_scores,
    score_of_fault,
    table_of,
    total,
    warning_of,
)
from float16_faults.truth import (
    BFLOAT16,
    CAUSES,
    FAULTS,
    FLOAT16,
    FLOAT32,
    HEALTHY_BFLOAT16,
    HEALTHY_FLOAT16,
    HEALTHY_FLOAT32,
    Fault,
    Healthy,
    is_sound,
)

README = Path(__file__).parent / "README.md"
PAGE = Path(__file__).parents[2] / "docs" / "advice.md"
TOOLS = ("none", "terminate_on_nan", "check_numerics", "kmp")

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

_FIRST_HEADING = "## Programs with a fault\n"
_HELD_OUT = (
    "A fifth of the programs, by a seeded draw of 2026-11-25: no rule is written for one of them; a"
    " new rule that broke one was narrowed. "
)
_COLUMNS = """
| fault | first finding | score | with the change | with the fallback | sound |
| --- | --- | --- | --- | --- | --- |
"""
_HEALTHY_COLUMNS = """

| program | verdict |
| --- | --- |
"""


def main() -> None:
    """Writes both pages."""
    README.write_text(readme(README.read_text(encoding="utf-8")), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def readme(text: str) -> str:
    """Returns the text of README.md with its lists and tables written again."""
    results = [load(tool) for tool in TOOLS]
    kmp, plain = results[-1].outcomes, plain_scores()
    causes = [f"| `{cause}` | {meaning} |" for cause, meaning in CAUSES.items()]
    parts = {
        "causes": "\n".join(["| cause | what it is |", "| --- | --- |", *causes]),
        "scores": table_of(results, plain),
        "alarms": alarms_table_of(results),
        "warning": warning_of(kmp, plain),
        "plain": _sound_in_keras(plain),
    }
    for name, part in parts.items():
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->")
        text = f"{before}{begin}\n{part}\n\n{end}{after}"
    return text


def _sound_in_keras(plain: PlainScores) -> str:
    """Returns a paragraph on the faults that do not show in the score of Keras."""
    sound = [name for name, fault in FAULTS.items() if is_sound(plain.get(name), fault.sound)]
    names = ", ".join(f"`{name}`" for name in sound)
    return (
        f"Without a tool, Keras reaches a sound score in {len(sound)} programs with a fault:"
        f" {names}. Keras skips a step only if a gradient is NaN or Inf. The gradients of a loss"
        " that is Inf can be finite, and `fault_rounding_siamese` is sound after a few steps. kmp"
        " skips the steps whose loss is not finite, so without a change or a repair these programs"
        " are stuck under kmp. They do not count as repaired."
    )


def page(text: str) -> str:
    """Returns the text of docs/advice.md with its tables written again."""
    outcomes = load("kmp").outcomes
    held_out = {name: fault for name, fault in FLOAT16.items() if fault.held_out}
    others = {name: fault for name, fault in FLOAT16.items() if not fault.held_out}
    sections = [
        _FIRST_HEADING,
        _faults(others, outcomes, "float16"),
        "## Programs with a fault, held out\n",
        _HELD_OUT + _faults(held_out, outcomes, "float16"),
        "## Programs with a fault in bfloat16\n",
        _faults(BFLOAT16, outcomes, "bfloat16"),
        "## Programs with a fault in float32\n",
        _faults(FLOAT32, outcomes, "float32"),
        "## Programs without a fault\n",
        _healthy(HEALTHY_FLOAT16, outcomes),
        "## Programs without a fault in bfloat16 and float32\n",
        _healthy(HEALTHY_BFLOAT16 | HEALTHY_FLOAT32, outcomes),
    ]
    return text.partition(_FIRST_HEADING)[0] + "\n".join(sections)


def _faults(faults: Mapping[str, Fault], outcomes: Mapping[str, Outcome], precision: str) -> str:
    """Returns a summary and a table of programs with a fault."""
    scores = total([score_of_fault(fault, outcomes[name]) for name, fault in faults.items()])
    summary = (
        f"Of {scores.programs} programs, kmp names the right cause for {scores.cause} and the right"
        f" place for {scores.place} of the {scores.places} that have one, and the change cures"
        f" {scores.cured}."
    )
    of_precision = [name for name, fault in faults.items() if fault.cause in CURED_BY_FLOAT32]
    if of_precision and precision != "float32":
        repaired = sum(
            is_sound(outcomes[name].repaired_score, faults[name].sound) for name in of_precision
        )
        summary += (
            f" Of {len(of_precision)} that {precision} alone causes, kmp repairs {repaired} without"
            " a change."
        )
    return summary + "\n" + _COLUMNS + _lines(_row(outcomes[name]) for name in faults)


def _row(outcome: Outcome) -> list[str]:
    finding = next(iter(outcome.findings), None)
    title = "none"
    if finding:
        headline, _, change = finding.text.partition("\n")
        title = f"`{finding.cause}`: {headline}"
        if change:
            title += f" `{change.partition(chr(10))[0]}`"
    scores = (outcome.score, outcome.cured_score, outcome.repaired_score)
    return [
        _description(outcome.program),
        title,
        *("stuck" if score is None else f"{score:.3g}" for score in scores),
        f"{FAULTS[outcome.program].sound:g}",
    ]


def _healthy(programs: Mapping[str, Healthy], outcomes: Mapping[str, Outcome]) -> str:
    """Returns a summary and a table of programs without a fault."""
    alarms = sum(bool(outcomes[name].findings) for name in programs)
    clean = sum("does not hurt" in outcomes[name].verdict for name in programs)
    summary = (
        f"Of {len(programs)} programs, {alarms} have a problem by kmp or are touched by a repair,"
        f" and {clean} get the verdict that their format does not hurt them."
    )
    rows = ([_description(name), outcomes[name].verdict] for name in programs)
    return summary + _HEALTHY_COLUMNS + _lines(rows)


def _description(program: str) -> str:
    return " ".join(inspect.getdoc(PROGRAMS[program]).split())


def _lines(rows: Iterable[list[str]]) -> str:
    lines = []
    for row in rows:
        cells = [cell.replace("|", r"\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


if __name__ == "__main__":
    main()
