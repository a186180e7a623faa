"""The records of a training run, and loading them from a log. Needs no Keras."""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kmp.records.exponent_histogram import ExponentHistogram
from kmp.records.gradient_sample import GradientSample
from kmp.records.jsonl import FILE_NAME, SCHEMA, is_truncated_header, parse, sample_of, upgraded

RUN_EXPECTED = "a kmp.records.Run, such as kmp.load_run(log_dir) returns"  # in messages


@dataclass
class Run:
    """The records of a training run, oldest first.

    Args:
        rows: Records, dictionaries with a `step`; see `kmp.records` for the keys.
        header: The log's header, its first line.

    Example:
    >>> run = Run([{"step": 1, "loss_scale": 8.0}, {"step": 2, "loss_scale": 16.0}])
    >>> run.last("loss_scale"), run.series("loss_scale")[0].tolist()
    (16.0, [1, 2])
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    header: dict[str, Any] = field(default_factory=dict)

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds a record."""
        self.rows.append(dict(row))

    def drop_after(self, step: int) -> None:
        """Removes the records after a step, for training that resumes from that step."""
        self.rows[:] = [row for row in self.rows if row["step"] <= step]

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the steps that have a value of `key`, and the values, as arrays of equal length."""
        steps_and_values = [(row["step"], row[key]) for row in self.rows if key in row]
        values = [math.nan if value is None else value for _, value in steps_and_values]
        return np.array([step for step, _ in steps_and_values], np.int64), np.array(values)

    def table(self) -> np.ndarray:
        """Returns all numbers as a structured array, with one row per recorded step, in order.

        The fields are `step` (int64) and every key with plain numbers as values (float64; NaN if a step has none).
        """
        by_step: dict[int, dict[str, float]] = {}
        for row in self.rows:
            by_step.setdefault(row["step"], {}).update(scalars(row))
        keys = dict.fromkeys(key for values in by_step.values() for key in values)
        table = np.zeros(len(by_step), [("step", np.int64), *((key, np.float64) for key in keys)])
        for index, (step, values) in enumerate(sorted(by_step.items())):
            table[index] = (step, *(values.get(key, math.nan) for key in keys))
        return table

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run; empty if the header has none.

        `rule` (`"FixedScale"` or `"DynamicScale"`) and its arguments; `model`, `parameters`, `compute_dtypes`,
        `float32_variables` (paths of the variables of float32 layers), `optimizer`, `replicas`.
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
        """The histograms of all variables together, one per sample, oldest first."""
        return [sample.histogram for sample in self.samples]

    def last(self, key: str, default: Any = None) -> Any:
        """Returns the newest value of `key`, or `default` if there is none."""
        return next((row[key] for row in reversed(self.rows) if key in row), default)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, allow_truncated: bool = False) -> "Run":
        """Loads a log.

        Args:
            path: The `.jsonl` file, or the `log_dir` that holds `kmp.jsonl`.
            allow_truncated: Whether to ignore a truncated last line, which a killed process may leave.

        Raises:
            FileNotFoundError: If there is no log.
            ValueError: If a line does not conform to a supported schema.
        """
        file = Path(path)
        file = file / FILE_NAME if file.is_dir() else file
        if file.exists() and not file.is_file():
            raise ValueError(f"{file}: not a log of kmp (not a regular file)")
        try:
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: not a log of kmp ({error})") from error
        if (
            allow_truncated
            and lines
            and not lines[-1].endswith("\n")
            and (len(lines) > 1 or is_truncated_header(lines[0]))
        ):
            lines.pop()
        parsed = [parse(line, f"{file}:{number}") for number, line in enumerate(lines, 1)]
        if parsed and parsed[0].get("kind") != "header":
            raise ValueError(f"{file}:1: a log of kmp begins with a header. Received keys: {sorted(parsed[0])}")
        header = parsed[0] if parsed else {}
        rows = [row for row in parsed if row.get("kind") != "header"]
        return cls(rows if header.get("schema") == SCHEMA else list(map(upgraded, rows)), header)


def load_run(path: str | os.PathLike[str]) -> Run:
    r"""Loads the log of a training run, even if the run is still in progress or was killed.

    Args:
        path: The `.jsonl` file, or the `log_dir` that holds `kmp.jsonl`.

    Returns:
        A `kmp.records.Run`: `table()` returns all numbers as a structured array; `samples` are the sampled gradients,
        `settings` the settings of the run.

    Raises:
        FileNotFoundError: If there is no log.
        ValueError: If a line does not conform to a supported schema.

    Example:
    >>> import tempfile
    >>> log = Path(tempfile.mkdtemp()) / "kmp.jsonl"
    >>> _ = log.write_text('{"schema": 3, "kind": "header"}\n{"step": 1, "loss_scale": 8.0}\n')
    >>> load_run(log).last("loss_scale")
    8.0
    """
    return Run.load(path, allow_truncated=True)


def scalars(row: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """Yields the keys and values of a record that are plain numbers, except `step`."""
    for key, value in row.items():
        if key != "step" and isinstance(value, int | float):
            yield key, float(value)
