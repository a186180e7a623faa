"""Encoding and decoding of the lines of a log; `kmp.records` documents the format. Needs no Keras."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Required, TypedDict

import msgspec

from kmp.records.compact_sample import compact, expanded
from kmp.records.log_schema import (
    Count,
    CountByVariable,
    Header,
    LossScale,
    Norm,
    Number,
    Sample,
    Text,
    Texts,
)
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
_HEADER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Header)
_RECORD: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Record)


class LogEncoder:
    """Encodes the lines of one log. Omits the names of a sample if they equal those of the sample before."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] | None = None  # of the last sample

    def line(self, row: Mapping[str, Any]) -> str:
        """Returns the header or a record as one line of JSON; non-finite numbers become null."""
        data = dict(row)
        for key in (key for key in SAMPLE_KEYS if key in row):
            data[key] = dict(compact(row[key]))
            if row[key].names == self._names:
                del data[key]["names"]
            self._names = row[key].names
        # The hook gets the scalars of NumPy.
        return msgspec.json.encode(data, enc_hook=lambda value: value.item()).decode() + "\n"


def to_line(row: Mapping[str, Any]) -> str:
    """Returns the header or a record as one line of JSON, with the names of its samples."""
    return LogEncoder().line(row)


def check_record(record: Mapping[str, Any]) -> None:
    """Raises an error if a log cannot hold the keys and values of a record without a sample."""
    _RECORD.decode(to_line({"step": 0} | dict(record)))


def read_log(file: Path, on_read: Callable[[int], object] | None) -> Iterator[dict[str, Any]]:
    """Yields the header and the records of a log, with `GradientSample`s; `on_read` and errors as in `load_run`."""
    names: tuple[str, ...] | None = None  # of the last sample: the samples of a run share them
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            is_of_log = (
                number > 1 or line.startswith(_HEADER_BEGIN) or _HEADER_BEGIN.startswith(line)
            )
            if is_of_log and not line.endswith(b"\n"):
                return  # a killed process wrote a part of the line
            try:
                record: dict[str, Any] = (_HEADER if number == 1 else _RECORD).decode(line)
                for key in (key for key in SAMPLE_KEYS if key in record):
                    names = record[key]["names"] = (
                        tuple(record[key]["names"]) if "names" in record[key] else names
                    )
                    if names is None:
                        raise ValueError(f"No sample before this one has `names` - at `$.{key}`")
                    try:
                        record[key] = expanded(record["step"], record[key])
                    except ValueError as error:
                        raise ValueError(f"{error} - at `$.{key}`") from error
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                message = f"{file}:{number}: {str(error)[:_LONGEST_MESSAGE]}"
                raise ValueError(
                    printable(message)
                ) from error  # an uncaught error is printed by Python, as it is
            yield record
            if on_read:
                on_read(len(line))
