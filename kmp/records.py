"""What was observed: readings of a training run, kept in memory and as JSON Lines. Needs NumPy alone.

A log is one JSON object a line. The first is a header, `{"schema": 2, "kind": "header", ...}`, with `started` (time, in
UTC), the versions of `keras`, `tensorflow` and `numpy`, and `settings` (object: the loss scale's rule and its numbers,
model, optimizer, dtypes; see `Run.settings`). Each later one is a reading with `"step"` (training steps done, skipped
ones included) and whatever was read then:

- `loss_scale`: float, the scale that the next step will use.
- `clean_steps`: integer, steps without an overflow since the scale last grew (or, at its highest, would have grown),
  or gradients of a finite loss last overflowed.
- `overflow_count`: integer, steps skipped since training began, because the loss or a gradient was not finite.
- `overflow_rate`: float, the share of the steps since the last reading that were skipped.
- `overflows_in_a_row`: integer, steps skipped since the last one that was applied.
- `nonfinite_loss_count`: integer, those in `overflow_count` whose loss was not finite before it was scaled.
- `nonfinite_losses_in_a_row`: integer, those in `overflows_in_a_row`.
- `overflows_by_variable`: object, from a variable's path to the number of steps in which its gradient was not finite;
  zeros are left out.
- `culprits_by_variable`: object, from a variable's path to the number of skipped steps with a finite loss in which it
  was the one to blame.
- `culprit`: string, in a reading with new such steps: path of the variable to blame for the last one (see `Snapshot`).
- `last_loss`: float, the loss of that step before it was scaled, summed over replicas.
- `highest_loss`: float, the highest magnitude of such a loss so far, of those that were finite.
- `nonfinite_activation`: string, in a reading with a new non-finite loss, where a `kmp.callbacks.ForwardProbe` looked:
  what was the first to be inf or nan in that step's forward pass.
- `grad_zeros`: float, the share of gradient elements that are exactly zero in the sampled step, which is `step`.
- `grad_norm`: float, the L2 norm of all gradients of that step, without the loss scale.
- `sample`: object with `loss_scale`, that step's; and `variables`: object from a variable's path, in the order from the
  input to the loss, to an object with `zero`, `inf`, `nan` (counts of elements of its loss-scaled gradient); `counts`
  (list of the others by binary exponent, floor(log2) of the magnitude, from exponent `first` on); `amax`, `norm`,
  `weight_norm`, `update_norm`, `updates`, `lost_updates` (see `GradientSample`; left out where not finite); and, where
  the loss scale is no power of two, `unscaled`: `zero` to `counts` for the gradient without it.
- `reference`: the same as `sample`, of a float32 pass over the batch that `kmp.callbacks.GradientHistogram` was given.

A number that is not finite is written as null.
"""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kmp._histograms import BIN_COUNT, ExponentHistogram
from kmp._log_lines import FILE_NAME, is_torn_header, parse, sample_of
from kmp._samples import GradientSample

__all__ = [
    "BIN_COUNT",
    "ExponentHistogram",
    "GradientSample",
    "Run",
    "Snapshot",
    "load_run",
]

A_RUN = "a kmp.records.Run, such as kmp.load_run(log_dir) returns"  # in messages

# What `nonfinite_activation` says where it is no layer's path.
THE_INPUT, THE_TARGET, THE_WEIGHTS = BATCH = ("the batch's x", "the batch's y", "the batch's sample_weight")
THE_LOSS = "the loss function"


@dataclass(frozen=True)
class Snapshot:
    """One reading of a `LossScaleOptimizer`.

    Args:
        step: Training steps done, skipped ones included.
        loss_scale: The scale that the next step will use.
        clean_steps: Steps without an overflow since the scale last grew (or, at its highest, would have grown), or
            gradients of a finite loss last overflowed.
        overflow_count: Steps skipped since training began.
        overflows_in_a_row: Steps skipped since the last one that was applied.
        nonfinite_loss_count: Steps skipped whose loss was not finite before it was scaled.
        nonfinite_losses_in_a_row: Those of them among `overflows_in_a_row`.
        overflows_at_min_scale: Steps skipped that asked for a scale below the lowest one.
        culprit: Path of the variable to blame for the last step that was skipped with a finite loss: of those whose
            gradient was not finite, the one nearest the loss in the order of the graph, because an overflow spreads to
            all before it. (Of a step that ran eagerly, the last in the model's order.) `None` before the first one.
        last_loss: The loss of the last step before it was scaled, summed over replicas. `None` before the first one.
        highest_loss: The highest magnitude of such losses so far, of those that were finite. `None` before the first.
        overflows_by_variable: Variable path to the number of steps in which its gradient was not finite; zeros left
            out.
        culprits_by_variable: Variable path to the number of steps, skipped with a finite loss, in which it was the one
            to blame; zeros left out.
        nonfinite_activation: What was the first to be inf or nan in the last forward pass whose loss was not finite: a
            layer's path, `"the batch's x"` and the like, or `"the loss function"`. `None` before one, and without a
            `kmp.callbacks.ForwardProbe`.
        sample: The last sample of gradients, or `None` where none was asked for.

    Example:
    >>> import kmp
    >>> kmp.LossScaleOptimizer("sgd", initial_scale=8.0).snapshot().loss_scale
    8.0
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
    highest_loss: float | None = None
    overflows_by_variable: dict[str, int] = field(default_factory=dict)
    culprits_by_variable: dict[str, int] = field(default_factory=dict)
    nonfinite_activation: str | None = None
    sample: GradientSample | None = None

    @property
    def histogram(self) -> ExponentHistogram | None:
        """The last sampled histogram of all variables together."""
        return self.sample.histogram if self.sample else None


@dataclass
class Run:
    """A training run as a list of readings, oldest first.

    Args:
        rows: Readings as dictionaries with a `step`; see the module's list of keys.
        header: What the log's first line says.

    Example:
    >>> run = Run([{"step": 1, "loss_scale": 8.0}, {"step": 2, "loss_scale": 16.0}])
    >>> run.last("loss_scale"), run.series("loss_scale")[0].tolist()
    (16.0, [1, 2])
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    header: dict[str, Any] = field(default_factory=dict)

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds a reading."""
        self.rows.append(dict(row))

    def forget_after(self, step: int) -> None:
        """Drops the readings beyond a step, as of a training that another one takes the place of."""
        self.rows[:] = [row for row in self.rows if row["step"] <= step]

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the steps at which `key` was read, and its values, as arrays of equal length."""
        pairs = [(row["step"], row[key]) for row in self.rows if key in row]
        values = [math.nan if value is None else value for _, value in pairs]
        return np.array([step for step, _ in pairs], np.int64), np.array(values)

    def table(self) -> np.ndarray:
        """Returns all numbers as an array with named fields: a row for each step that was read, in order.

        Its fields are `step`, int64, and every key whose values are plain numbers, float64; nan where a step has none.
        """
        by_step: dict[int, dict[str, float]] = {}
        for row in self.rows:
            by_step.setdefault(row["step"], {}).update(scalars(row))
        keys = dict.fromkeys(key for values in by_step.values() for key in values)
        table = np.zeros(len(by_step), [("step", np.int64), *((key, np.float64) for key in keys)])
        for place, (step, values) in enumerate(sorted(by_step.items())):
            table[place] = (step, *(values.get(key, math.nan) for key in keys))
        return table

    @property
    def settings(self) -> dict[str, Any]:
        """What the run was made with.

        `rule` (`"FixedScale"` or `"DynamicScale"`) and its arguments; `model`, `parameters`, `compute_dtypes`,
        `float32_variables` (paths of those whose layers compute in float32), `optimizer`, `replicas`. Empty if the
        header tells none.
        """
        settings = self.header.get("settings")
        return dict(settings) if isinstance(settings, Mapping) else {}

    @property
    def samples(self) -> list[GradientSample]:
        """The sampled gradients, oldest first."""
        return [sample_of(row, "sample") for row in self.rows if "sample" in row]

    @property
    def references(self) -> list[GradientSample]:
        """The gradients of the float32 reference passes, oldest first."""
        return [sample_of(row, "reference") for row in self.rows if "reference" in row]

    @property
    def histograms(self) -> list[ExponentHistogram]:
        """The histograms of the samples, all variables together, oldest first."""
        return [sample.histogram for sample in self.samples]

    def last(self, key: str, default: Any = None) -> Any:
        """Returns the newest reading of `key`."""
        return next((row[key] for row in reversed(self.rows) if key in row), default)

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
        if file.exists() and not file.is_file():
            raise ValueError(f"{file}: not a log of kmp (no regular file)")
        try:
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: not a log of kmp ({error})") from error
        if torn_end and lines and not lines[-1].endswith("\n") and (len(lines) > 1 or is_torn_header(lines[0])):
            lines.pop()
        parsed = [parse(line, f"{file}:{number}") for number, line in enumerate(lines, 1)]
        if parsed and parsed[0].get("kind") != "header":
            raise ValueError(f"{file}:1: a log of kmp begins with a header. Received: {sorted(parsed[0])}")
        return cls([row for row in parsed if row.get("kind") != "header"], parsed[0] if parsed else {})


def load_run(path: str | os.PathLike[str]) -> Run:
    r"""Reads a log back, also that of a run which is going on or was killed.

    Args:
        path: The `.jsonl` file, or the `log_dir` that holds `kmp.jsonl`.

    Returns:
        A `kmp.records.Run`: `table()` has all numbers as an array with named fields, `samples` the sampled gradients,
        `settings` what the run was made with.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If a line is not a reading of this schema.

    Example:
    >>> import tempfile
    >>> log = Path(tempfile.mkdtemp()) / "kmp.jsonl"
    >>> _ = log.write_text('{"schema": 2, "kind": "header"}\n{"step": 1, "loss_scale": 8.0}\n')
    >>> load_run(log).last("loss_scale")
    8.0
    """
    return Run.load(path, torn_end=True)


def scalars(row: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """Yields the plain numbers of a reading, its `step` left out."""
    for key, value in row.items():
        if key != "step" and isinstance(value, int | float):
            yield key, float(value)
