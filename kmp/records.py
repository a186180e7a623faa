"""What was observed: readings of a training run, kept in memory and as JSON Lines. Needs NumPy alone.

A log is one JSON object a line. The first is a header, `{"schema": 1, "kind": "header", ...}`; each later one is a
reading with `"step"` (training steps done, skipped ones included) and whatever was read then:

- `loss_scale`: float, the scale that the next step will use.
- `clean_steps`: integer, steps without an overflow since the scale last changed.
- `overflow_count`: integer, steps skipped since training began, because the loss or a gradient was not finite.
- `overflow_rate`: float, the share of the steps since the last reading that were skipped.
- `overflows_in_a_row`: integer, steps skipped since the last one that was applied.
- `nonfinite_loss_count`: integer, those in `overflow_count` whose loss was not finite before it was scaled.
- `overflows_by_variable`: object, from a variable's path to the number of steps in which its gradient was not finite;
  zeros are left out.
- `culprit`: string, in a reading with new overflows: path of the variable to blame for the last one (see `Snapshot`).
- `last_loss`: float, the loss of that step before it was scaled, summed over replicas.
- `grad_zeros`: float, the share of gradient elements that are exactly zero in the sampled step.
- `histogram`: object with `step`; `loss_scale` (that step's); `zero`, `inf`, `nan` (element counts); and `exponents`
  (object, from floor(log2) of the loss-scaled magnitude to the element count; empty bins are left out).

A number that is not finite is written as null.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kmp._formats import FLOAT32

SCHEMA = 1
FILE_NAME = "kmp.jsonl"

# One bin for zero, one for each binary exponent of a finite float32, one each for inf and nan.
ZERO_BIN = 0
FIRST_EXPONENT = FLOAT32.min_subnormal_exponent
LAST_EXPONENT = FLOAT32.max_exponent
INF_BIN = LAST_EXPONENT - FIRST_EXPONENT + 2
NAN_BIN = INF_BIN + 1
BIN_COUNT = NAN_BIN + 1


@dataclass(frozen=True, eq=False)
class ExponentHistogram:
    """Gradient elements counted by binary exponent, from one training step.

    Args:
        counts: Integer array of shape `(280,)`: elements that are zero; one bin for each exponent, floor(log2|g|), from
            -149 to 127; then inf; then nan. Of the loss-scaled gradient, as the backward pass made it.
        step: The training step that was sampled, counted from 1.
        loss_scale: The scale that the gradients carry.
    """

    counts: np.ndarray
    step: int
    loss_scale: float

    def __post_init__(self) -> None:
        counts = np.asarray(self.counts, np.int64)
        if counts.shape != (BIN_COUNT,):
            raise ValueError(f"`counts` must have shape ({BIN_COUNT},). Received: shape {counts.shape}")
        object.__setattr__(self, "counts", counts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExponentHistogram) and self.to_dict() == other.to_dict()

    def __repr__(self) -> str:
        special = f"{self.zeros} zero, {self.infs} inf, {self.nans} nan"
        return f"<ExponentHistogram step={self.step} loss_scale={self.loss_scale:g}: {self.total} elements, {special}>"

    def __hash__(self) -> int:
        return hash((self.step, self.loss_scale))

    @property
    def total(self) -> int:
        """All elements counted."""
        return int(self.counts.sum())

    @property
    def zeros(self) -> int:
        """Elements that are exactly zero."""
        return int(self.counts[ZERO_BIN])

    @property
    def infs(self) -> int:
        """Elements that are inf or -inf."""
        return int(self.counts[INF_BIN])

    @property
    def nans(self) -> int:
        """Elements that are nan."""
        return int(self.counts[NAN_BIN])

    @property
    def zero_fraction(self) -> float:
        """Share of elements that are exactly zero: an upper bound on what float16 flushed."""
        return self.zeros / self.total if self.total else math.nan

    @property
    def by_exponent(self) -> np.ndarray:
        """Counts of the finite nonzero elements, shape `(277,)`, matching `exponents`."""
        return self.counts[ZERO_BIN + 1 : INF_BIN]

    @property
    def exponents(self) -> np.ndarray:
        """The binary exponents -149 to 127, shape `(277,)`."""
        return np.arange(FIRST_EXPONENT, LAST_EXPONENT + 1)

    def to_dict(self) -> dict[str, Any]:
        """Returns the histogram as JSON has it; see the module's list of keys."""
        filled = {str(e): int(n) for e, n in zip(self.exponents, self.by_exponent, strict=True) if n}
        special = {"zero": self.zeros, "inf": self.infs, "nan": self.nans}
        return {"step": self.step, "loss_scale": self.loss_scale, **special, "exponents": filled}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ExponentHistogram":
        """The reverse of `to_dict`."""
        counts = np.zeros(BIN_COUNT, np.int64)
        counts[[ZERO_BIN, INF_BIN, NAN_BIN]] = data["zero"], data["inf"], data["nan"]
        for exponent, count in data["exponents"].items():
            counts[int(exponent) - FIRST_EXPONENT + 1] = count
        return cls(counts, int(data["step"]), float(data["loss_scale"]))


@dataclass(frozen=True)
class Snapshot:
    """One reading of a `LossScaleOptimizer`.

    Args:
        step: Training steps done, skipped ones included.
        loss_scale: The scale that the next step will use.
        clean_steps: Steps without an overflow since the scale last changed.
        overflow_count: Steps skipped since training began.
        overflows_in_a_row: Steps skipped since the last one that was applied.
        nonfinite_loss_count: Steps skipped whose loss was not finite before it was scaled.
        nonfinite_losses_in_a_row: Those among `overflows_in_a_row`.
        overflows_at_min_scale: Steps skipped that asked for a scale below the lowest one.
        culprit: Path of the variable to blame for the last skipped step: of those whose gradient was not finite, the
            one nearest the loss, because an overflow spreads to all before it. (The last in the model's order, which is
            the network's for Sequential and functional models.) `None` before the first one.
        last_loss: The loss of the last step before it was scaled, summed over replicas. `None` before the first one.
        overflows_by_variable: Variable path to the number of steps in which its gradient was not finite; zeros left
            out.
        histogram: The last sampled histogram, or `None` where none was asked for.
    """

    step: int
    loss_scale: float
    clean_steps: int
    overflow_count: int
    overflows_in_a_row: int
    nonfinite_loss_count: int
    nonfinite_losses_in_a_row: int = 0
    overflows_at_min_scale: int = 0
    culprit: str | None = None
    last_loss: float | None = None
    overflows_by_variable: dict[str, int] = field(default_factory=dict)
    histogram: ExponentHistogram | None = None


@dataclass
class Run:
    """A training run as a list of readings, oldest first.

    Args:
        rows: Readings as dictionaries with a `step`; see the module's list of keys.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds a reading."""
        self.rows.append(dict(row))

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the steps at which `key` was read, and its values, as arrays of equal length."""
        pairs = [(row["step"], row[key]) for row in self.rows if key in row]
        values = [math.nan if value is None else value for _, value in pairs]
        return np.array([step for step, _ in pairs], np.int64), np.array(values)

    @property
    def histograms(self) -> list[ExponentHistogram]:
        """The sampled histograms, oldest first."""
        return [ExponentHistogram.from_dict(row["histogram"]) for row in self.rows if "histogram" in row]

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, torn_end: bool = False) -> "Run":
        """Reads a log.

        Args:
            path: The `.jsonl` file, or the `log_dir` that holds `kmp.jsonl`.
            torn_end: Whether to pass over a last line that was cut short, as a killed process leaves it.

        Raises:
            FileNotFoundError: If there is none.
            ValueError: If a line is not a reading of this schema.
        """
        file = Path(path)
        file = file / FILE_NAME if file.is_dir() else file
        try:
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: not a log of kmp ({error})") from error
        if torn_end and lines and not lines[-1].endswith("\n") and (len(lines) > 1 or _is_torn_header(lines[0])):
            lines.pop()
        parsed = [_parse(line, f"{file}:{number}") for number, line in enumerate(lines, 1)]
        if parsed and parsed[0].get("kind") != "header":
            raise ValueError(f"{file}:1: a log of kmp begins with a header. Received: {sorted(parsed[0])}")
        return cls([row for row in parsed if row.get("kind") != "header"])


def to_line(row: Mapping[str, Any]) -> str:
    """Returns a reading as one line of JSON; numbers that are not finite become null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(finite, allow_nan=False, separators=(",", ":")) + "\n"


def scalars(row: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """Yields the plain numbers of a reading, its `step` left out."""
    for key, value in row.items():
        if key != "step" and isinstance(value, int | float):
            yield key, float(value)


def _parse(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{place}: not a line of JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place}: a reading is a JSON object. Received: {type(row).__name__}")
    if row.get("kind") == "header" and row.get("schema") != SCHEMA:
        raise ValueError(f"{place}: schema {row.get('schema')!r}; this version of kmp reads schema {SCHEMA}")
    if row.get("kind") != "header" and type(row.get("step")) is not int:
        raise ValueError(f"{place}: a reading has an integer `step`. Received: {sorted(row)}")
    if "histogram" in row:
        _check_histogram(row["histogram"], place)
    return row


def _check_histogram(data: Any, place: str) -> None:
    try:
        ExponentHistogram.from_dict(data)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise ValueError(f"{place}: not a histogram of kmp's ({error!r})") from error


def _is_torn_header(line: str) -> bool:
    begin = '{"schema":'
    return line.startswith(begin) or begin.startswith(line)
