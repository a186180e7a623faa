"""Writes the tables of docs/advice.md: what is advised for each script, and what the change achieves.

Run with `python tests/advice/faults/table.py`.
"""

import ast
import math
import tempfile
from pathlib import Path

from cases import CASES, HEALTHY
from programs import is_cured, is_named, outcome_of, run_script, source_of

import kmp
from kmp.callbacks.float32_fallback import CURABLE

PAGE = Path(__file__).parents[3] / "docs" / "advice.md"

_FAULTS = """## Scripts with a fault

{summary}

| fault | first finding | score | with the change | with the fallback | sound |
| --- | --- | --- | --- | --- | --- |
"""
_HEALTHY = """
## Scripts without a fault

| script | verdict |
| --- | --- |
"""


def main():
    """Runs all scripts, prints the table and writes the page."""
    rows, right = [], {"cause": 0, "place": 0, "cured": 0, "repaired": 0}
    of_float16 = 0  # faults that the fallback is for
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            outcome = outcome_of(name, Path(folder, name))
            finding = next(iter(outcome.advice.problems), None)
            right["cause"] += bool(finding) and finding.cause == case.cause
            right["place"] += bool(finding) and is_named(case.at, finding)
            right["cured"] += is_cured(outcome.cured_score, case.sound)
            repaired_score, _ = run_script(source_of(name), Path(folder, name, "repaired"))
            of_float16 += case.cause in CURABLE
            right["repaired"] += case.cause in CURABLE and is_cured(repaired_score, case.sound)
            title = f"`{finding.cause}`: {finding.title} `{finding.change.splitlines()[0]}`" if finding else "none"
            scores = [_score(score) for score in (outcome.score, outcome.cured_score, repaired_score)]
            rows.append([_fault(name), title, *scores, f"{case.sound:g}"])
            print(*rows[-1], sep=" | ", flush=True)
        runs = {name: run_script(source_of(name), Path(folder, name))[1] for name in HEALTHY}
        verdicts = [[_fault(name), kmp.advise(run).verdict] for name, run in runs.items()]
        touched = [name for name, run in runs.items() if run.last("fallback")]
    named = f"kmp names the right cause for {right['cause']} and the right place for {right['place']}"
    summary = (
        f"Of {len(CASES)} scripts, {named}, and the change cures {right['cured']}. Of {of_float16} that float16 alone "
        f"causes, `Float32Fallback` repairs {right['repaired']} without a change; it touches {len(touched)} of the "
        f"{len(HEALTHY)} scripts without a fault."
    )
    print(summary)
    introduction = PAGE.read_text(encoding="utf-8").partition(_FAULTS.splitlines()[0])[0]
    text = _FAULTS.format(summary=summary) + _lines(rows) + _HEALTHY + _lines(verdicts)
    PAGE.write_text(introduction + text, encoding="utf-8")


def _fault(name):
    return ast.get_docstring(ast.parse(source_of(name)))


def _score(score):
    return "stuck" if math.isnan(score) else f"{score:.3g}"


def _lines(rows):
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in rows)


if __name__ == "__main__":
    main()
