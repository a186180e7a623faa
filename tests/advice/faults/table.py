"""Writes the tables of docs/advice.md: what is advised for each script, and what the change achieves.

Run with `python tests/advice/faults/table.py`.
"""

import ast
import math
import tempfile
from pathlib import Path

from cases import CASES, HEALTHY
from programs import SCRIPTS, is_cured, is_named, outcome_of

PAGE = Path(__file__).parents[3] / "docs" / "advice.md"

_FAULTS = """## Scripts with a fault

{summary}

| fault | first finding | score | with the change | sound |
| --- | --- | --- | --- | --- |
"""
_HEALTHY = """
## Scripts without a fault

| script | verdict |
| --- | --- |
"""


def main():
    """Runs all scripts, prints the table and writes the page."""
    rows, right = [], {"cause": 0, "place": 0, "cured": 0}
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            outcome = outcome_of(name, Path(folder, name))
            finding = next(iter(outcome.advice.problems), None)
            right["cause"] += bool(finding) and finding.cause == case.cause
            right["place"] += bool(finding) and is_named(case.at, finding)
            right["cured"] += is_cured(outcome.cured_score, case.sound)
            title = f"`{finding.cause}`: {finding.title} `{finding.change.splitlines()[0]}`" if finding else "none"
            rows.append([_fault(name), title, _score(outcome.score), _score(outcome.cured_score), f"{case.sound:g}"])
            print(*rows[-1], sep=" | ", flush=True)
        verdicts = [[_fault(name), outcome_of(name, Path(folder, name)).advice.verdict] for name in HEALTHY]
    named = f"kmp names the right cause for {right['cause']} and the right place for {right['place']}"
    summary = f"Of {len(CASES)} scripts, {named}, and the change cures {right['cured']}."
    print(summary)
    introduction = PAGE.read_text(encoding="utf-8").partition(_FAULTS.splitlines()[0])[0]
    text = _FAULTS.format(summary=summary) + _lines(rows) + _HEALTHY + _lines(verdicts)
    PAGE.write_text(introduction + text, encoding="utf-8")


def _fault(name):
    return ast.get_docstring(ast.parse((SCRIPTS / f"{name}.py").read_text(encoding="utf-8")))


def _score(score):
    return "stuck" if math.isnan(score) else f"{score:.3g}"


def _lines(rows):
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in rows)


if __name__ == "__main__":
    main()
