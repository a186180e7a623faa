"""Encoding and decoding of the lines of a log; `kmp.records` documents the format. Needs no Keras."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Required, TypedDict

import msgspec

from kmp.records.compact_sample import compact, expanded
from kmp.records.log_schema import Count, CountByVariable, Header, LossScale, Norm, Number, Sample, Text, Texts
from kmp.records.replay import Replay
from kmp.utils import printable

FILE_NAME = "kmp.jsonl"
SAMPLE_KEYS = ("sample", "reference")
MOST_METRICS = 1000  # in one record
_HEADER_BEGIN = b'{"schema":'
_LONGEST_MESSAGE = 300


class Record(TypedDict, total=False):
    """A line of a log after the header."""

    step: Required[Count]
    loss_scale: LossScale | None
    clean_steps: Count
    overflow_count: Count
    overflow_rate: Number | None
    overflows_in_a_row: Count
    nonfinite_loss_count: Count
    nonfinite_losses_in_a_row: Count
    overflows_by_variable: CountByVariable
    overflow_origins_by_variable: CountByVariable
    overflow_origin: Text | None
    last_loss: Number | None
    highest_loss: Number | None
    loss_dtype: Text | None
    epoch: Count
    metrics: Annotated[dict[Text, Number | None], msgspec.Meta(max_length=MOST_METRICS)]
    grad_zeros: Number | None
    grad_norm: Norm | None
    sample: Sample
    reference: Sample
    replay: Replay
    replay_error: Text
    fallback: Texts
    fallback_reason: Text


RECORD_KEYS = frozenset(Record.__annotations__)


class LogEncoder:
    """Encodes the lines of one log. Omits the names of a sample if they equal those of the sample before."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] | None = None  # of the last sample

    def line(self, row: Mapping[str, Any]) -> str:
        """Returns the header or a record as one line of JSON; non-finite numbers become null."""
        data = _without_nonfinite(row)
        if "metrics" in row:
            data["metrics"] = _without_nonfinite(row["metrics"])
        for key in SAMPLE_KEYS:
            if key in row:
                data[key] = dict(compact(row[key]))
                if row[key].names == self._names:
                    del data[key]["names"]
                self._names = row[key].names
        return json.dumps(data, allow_nan=False, separators=(",", ":"), default=dataclasses.asdict) + "\n"


def to_line(row: Mapping[str, Any]) -> str:
    """Returns the header or a record as one line of JSON, with the names of its samples."""
    return LogEncoder().line(row)


def _without_nonfinite(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


class LogParser:
    """Decodes and validates the lines of one log.

    Args:
        file: The log, for messages.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._names: list[str] | tuple[str, ...] | None = None  # of the last sample

    def parse(self, line: bytes, number: int) -> dict[str, Any]:
        """Returns a line of the log: the header, or a record with `GradientSample`s.

        Args:
            line: The line.
            number: Its number, from 1. The first line is the header.

        Raises:
            ValueError: If the line does not conform to the schema. The message names the file, the line and the key.
        """
        try:
            if number == 1:
                return _HEADER.decode(line)
            record: dict[str, Any] = _RECORD.decode(line)
            for key in SAMPLE_KEYS:
                if key in record:
                    record[key] = self._sample(record["step"], key, record[key])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            message = f"{self._file}:{number}: {str(error)[:_LONGEST_MESSAGE]}"
            raise ValueError(printable(message)) from error  # an uncaught error is printed by Python, as it is
        return record

    def _sample(self, step: int, key: str, data: dict[str, Any]) -> Any:
        names = data.get("names", self._names)
        if names is None:
            raise ValueError(f"No sample before this one has `names` - at `$.{key}`")
        # The samples of a run share the names.
        self._names = data["names"] = self._names if names == self._names else tuple(names)
        try:
            return expanded(step, data)
        except ValueError as error:
            raise ValueError(f"{error} - at `$.{key}`") from error


_HEADER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Header)
_RECORD: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Record)


def is_truncated_header(line: bytes) -> bool:
    """Whether a line is a truncated header."""
    return line.startswith(_HEADER_BEGIN) or _HEADER_BEGIN.startswith(line)
