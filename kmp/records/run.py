"""The records of a training run, and loading them from a log. Needs no Keras."""

import math
import numbers
import os
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UNSET
from msgspec.structs import asdict

from kmp.records.exponent_histogram import ExponentHistogram
from kmp.records.gradient_sample import GradientSample
from kmp.records.jsonl import FILE_NAME, SAMPLE_KEYS, read_log
from kmp.records.log_schema import Header, Record, Settings
from kmp.records.replay import Replay
from kmp.utils import validation
from kmp.utils.float_formats import FLOAT16, FloatFormat, computing_format
from kmp.utils.names import printable

RUN_EXPECTED = "a kmp.records.Run, such as kmp.load_run(log_dir) returns"  # in messages


@dataclass
class Run:
    """The records of a training run, oldest first.

    Args:
        rows: The records.
        header: The log's header, its first line, with the settings of the run.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the `step` of a record is no integer.

    Example:
    >>> from kmp.records import Record, Run
    >>> run = Run([Record(step=1, loss_scale=8.0), Record(step=2, loss_scale=16.0)])
    >>> run.last("loss_scale"), run.series("loss_scale")[0].tolist()
    (16.0, [1, 2])
    """

    rows: list[Record] = field(default_factory=list)
    header: Header = field(default_factory=Header)

    def __post_init__(self) -> None:
        validation.instance("rows", self.rows, list, "a list of records")
        validation.instance("header", self.header, Header, "a kmp.records.Header")
        for row in self.rows:
            _check_record("rows", row)

    def __repr__(self) -> str:
        return f"<Run: {len(self.rows)} records>"

    def append(self, row: Record) -> None:
        """Adds a record.

        Raises:
            TypeError: If `row` is not a `Record`.
            ValueError: If its `step` is no integer.
        """
        _check_record("row", row)
        self.rows.append(row)

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the steps that have a value of `key`, and the values: equally long arrays.

        Raises:
            ValueError: If no record can have this key.
        """
        validation.one_of("key", key, Record.__struct_fields__)
        pairs = [(row.step, getattr(row, key)) for row in self.rows]
        return _series([(step, value) for step, value in pairs if value is not UNSET])

    def table(self) -> np.ndarray:
        """Returns all numbers as a structured array, with one row per recorded step, in order.

        The fields are `step` (int64) and every key with plain numbers as values (float64; NaN if a
        step has none).
        """
        steps = sorted({row.step for row in self.rows})
        index_of = {step: index for index, step in enumerate(steps)}
        columns: dict[str, np.ndarray] = {}
        for row in self.rows:
            for key, value in scalars(row):
                if key not in columns:
                    columns[key] = np.full(len(steps), math.nan)
                columns[key][index_of[row.step]] = value
        table = np.empty(len(steps), [("step", np.int64), *((key, np.float64) for key in columns)])
        for key, values in {"step": steps, **columns}.items():
            table[key] = values
        return table

    @property
    def settings(self) -> Settings:
        """The settings of the run; the defaults if the header has none."""
        return self.header.settings

    @property
    def format(self) -> FloatFormat:
        """The number format that limits the run: of a mixed precision, the one with 16 bits.

        float16 if the header does not have the dtypes that the layers compute in.
        """
        return computing_format(self.settings.compute_dtypes or [FLOAT16.name])

    @property
    def has_loss_scale(self) -> bool:
        """Whether a loss scale matters: float16 needs one, and other formats may have one."""
        settings = self.settings
        is_one = settings.rule == "FixedScale" and settings.initial_scale == 1.0
        return self.format is FLOAT16 or not is_one

    @property
    def metrics(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The metrics of epochs, such as `loss` and `val_accuracy`, by name.

        Each is the steps, and the values.
        """
        by_name: dict[str, list[tuple[int, float | None]]] = {}
        for row in self.rows:
            for name, value in (row.metrics or {}).items():
                by_name.setdefault(name, []).append((row.step, value))
        return {name: _series(pairs) for name, pairs in by_name.items()}

    @property
    def samples(self) -> list[GradientSample]:
        """The sampled gradients, oldest first."""
        return [row.sample for row in self.rows if row.sample is not UNSET]

    @property
    def references(self) -> list[GradientSample]:
        """The gradients of the float32 reference passes, oldest first."""
        return [row.reference for row in self.rows if row.reference is not UNSET]

    @property
    def replays(self) -> list[tuple[int, Replay]]:
        """The replays of training batches, each with its step, oldest first."""
        return [(row.step, row.replay) for row in self.rows if row.replay]

    @property
    def comparisons(self) -> list[tuple[int, Replay]]:
        """The replays whose passes were finite in both precisions, oldest first.

        Each with its step.
        """
        return [(step, replay) for step, replay in self.replays if replay.comparison]

    @property
    def histograms(self) -> list[ExponentHistogram]:
        """The histograms of all variables together, one per sample, oldest first."""
        return [sample.histogram for sample in self.samples]

    def last(self, key: str, default: Any = None) -> Any:
        """Returns the newest value of `key`, or `default` if there is none.

        Raises:
            ValueError: If no record can have this key.
        """
        validation.one_of("key", key, Record.__struct_fields__)
        values = (getattr(row, key) for row in reversed(self.rows))
        return next((value for value in values if value is not UNSET), default)


def log_file(path: str | os.PathLike[str]) -> Path:
    """Returns the log in a `log_dir`, or `path` itself."""
    validation.instance("path", path, (str, os.PathLike), "the path of a log, or of its `log_dir`")
    file = Path(path)
    return file / FILE_NAME if file.is_dir() else file


def load_run(path: str | os.PathLike[str]) -> Run:
    r"""Loads the log of a training run, even if the run is still in progress or was killed.

    Args:
        path: The `.jsonl` file, or the `log_dir` that holds `kmp.jsonl`. A truncated last line is
            ignored.

    Returns:
        A `kmp.records.Run`: `table()` returns all numbers as a structured array; `samples` are the
        sampled gradients, `settings` the settings of the run.

    Raises:
        FileNotFoundError: If there is no log.
        TypeError: If `path` is not a path.
        ValueError: If a line does not conform to the schema. The message names file, line and key.

    Example:
    >>> import kmp, pathlib, tempfile
    >>> log = pathlib.Path(tempfile.mkdtemp()) / "kmp.jsonl"
    >>> _ = log.write_text('{"schema": 1, "kind": "header"}\n{"step": 1, "loss_scale": 8.0}\n')
    >>> kmp.load_run(log).last("loss_scale")
    8.0
    """
    file = log_file(path)
    if file.exists() and not file.is_file():
        raise ValueError(f"{printable(str(file))}: not a log of kmp (not a regular file)")
    header, records = read_log(file)
    return Run(records, header)


def scalars(row: Record) -> Iterable[tuple[str, float]]:
    """Yields the plain numbers of a record, except `step`, and its metrics.

    Each with its key.
    """
    for key, value in ((row.metrics or {}) | asdict(row)).items():
        if key != "step" and isinstance(value, int | float):
            yield key, float(value)


def _series(steps_and_values: list[tuple[int, Any]]) -> tuple[np.ndarray, np.ndarray]:
    values = [math.nan if value is None else value for _, value in steps_and_values]
    return np.array([step for step, _ in steps_and_values], np.int64), np.array(values)


def _check_record(name: str, row: Any) -> None:
    expected = "records, such as kmp.records.Record(step=1, loss_scale=8.0)"
    validation.instance(name, row, Record, expected)
    if not isinstance(row.step, numbers.Integral):
        raise ValueError(
            f"`{name}` must hold records with an integer `step`. Received: {reprlib.repr(row)}"
        )
    for key in SAMPLE_KEYS:
        sample = getattr(row, key)
        if sample is not UNSET:
            validation.instance(
                f"{name}[...].{key}", sample, GradientSample, "a kmp.records.GradientSample"
            )
