"""Writes docs/hub.md from the results of `check.py`.

Run with `python benchmarks/hub/hub_table.py`.
"""

import json
from pathlib import Path

RESULTS = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parents[2] / "docs" / "hub.md"
MAX_ERROR = 0.03  # relative; 60 times the rounding error of one float16 operation, 2^-11
MODES = ("keras", "enable", "convert")  # Keras' mixed_float16, `kmp.enable()`, `kmp.convert(model)`
_START = "## All models\n"
_COLUMNS = """
- `Keras`, `enable`, `convert`: the relative error (L2 norm) of the outputs against float32 with
  Keras' `mixed_float16`, `kmp.enable()` and `kmp.convert(model)`; `NaN` if an output is not finite,
  `raises` for an error, `does not train` if the loss does not fall at least half as far as in
  float32.
- loss: the mean squared error against random targets before and after 30 steps.
- largest: the largest magnitude that a layer returns in float32. float16 ends at 65504.
- kept: the layers and operations that `convert` keeps in float32, of all.

| model | Keras | `enable` | `convert` | loss in float32 | loss with `enable` | largest | kept |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


def works(result, mode):
    """Whether outputs are close to float32's, and the loss falls at least half as far."""
    candidate = result[mode]
    if "raises" in candidate or candidate["error"] is None or candidate["error"] > MAX_ERROR:
        return False
    first, last = result["losses"]
    trained = candidate["losses"][-1]
    return trained is not None and trained <= (first + last) / 2


def main():
    """Prints and writes the table."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = []
    for name, result in results.items():
        outcomes = [_outcome(result, mode) for mode in MODES]
        losses = [_losses(result), _losses(result["enable"])]
        kept = f"{len(result['float32'])} of {result['layers_and_operations']}"
        rows.append(
            "| " + " | ".join([f"`{name}`", *outcomes, *losses, _magnitude(result), kept]) + " |"
        )
    counts = {mode: sum(works(result, mode) for result in results.values()) for mode in MODES}
    print(f"{counts} of {len(results)}")
    introduction = PAGE.read_text(encoding="utf-8").partition(_START)[0]
    PAGE.write_text(introduction + _START + _COLUMNS + "\n".join(rows) + "\n", encoding="utf-8")


def _outcome(result, mode):
    candidate = result[mode]
    if "raises" in candidate:
        return "raises"
    if candidate["error"] is None:
        return "NaN"
    is_close = candidate["error"] <= MAX_ERROR
    return f"{candidate['error']:.1e}" + (
        ", does not train" if is_close and not works(result, mode) else ""
    )


def _magnitude(result):
    largest = result["largest"][1]
    return "" if largest is None else f"{largest:.3g}"


def _losses(result):
    if "losses" not in result:
        return ""
    return " to ".join(f"{loss:.3g}" for loss in result["losses"])


if __name__ == "__main__":
    main()
