"""Encoding and decoding of the lines of a log, see `kmp.records`. Needs no Keras."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kmp.records import flat_replays
from kmp.records.compact_sample import compact, expanded
from kmp.records.log_schema import Header, Record
from kmp.utils.names import printable

FILE_NAME = "kmp.jsonl"
SAMPLE_KEYS = ("sample", "reference")
RECORD_KEYS = frozenset(Record.__annotations__)
_HEADER_BEGIN = b'{"schema":'
_LONGEST_MESSAGE = 300
_HEADER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Header)
_RECORD: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Record)


class LogEncoder:
    """Encodes the lines of one log.

    Omits the names of a sample that equal those of the last one.
    """

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


def read_log(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the header and the records of a log, with their samples; errors as in `load_run`."""
    names: tuple[str, ...] | None = None  # of the last sample: the samples of a run share them
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if _is_truncated(line, is_first=number == 1):
                return
            try:
                record = _HEADER.decode(line) if number == 1 else _decoded(line)
                names = _expand_samples(record, names)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                message = f"{file}:{number}: {str(error)[:_LONGEST_MESSAGE]}"
                # Python prints an uncaught error as it is.
                raise ValueError(printable(message)) from error
            yield record


def _is_truncated(line: bytes, is_first: bool) -> bool:
    """Whether a killed process wrote only a part of a line of a log."""
    is_of_log = not is_first or line.startswith(_HEADER_BEGIN) or _HEADER_BEGIN.startswith(line)
    return is_of_log and not line.endswith(b"\n")


def _decoded(line: bytes) -> dict[str, Any]:
    if flat_replays.MARK not in line:
        return _RECORD.decode(line)
    record = msgspec.json.decode(line)
    if isinstance(record, dict) and isinstance(record.get("replay"), dict):
        record["replay"] = flat_replays.nested(record["replay"])
    return msgspec.convert(record, Record)


def _expand_samples(
    record: dict[str, Any], names: tuple[str, ...] | None
) -> tuple[str, ...] | None:
    """Expands the samples of a record. Returns the names of the variables of the last one."""
    for key in (key for key in SAMPLE_KEYS if key in record):
        data = record[key]
        if "names" in data:
            names = tuple(data["names"])
            if len(set(names)) < len(names):
                raise ValueError(f"`names` must not repeat a name - at `$.{key}`")
        if names is None:
            raise ValueError(f"No sample before this one has `names` - at `$.{key}`")
        data["names"] = names
        try:
            record[key] = expanded(record["step"], data)
        except ValueError as error:
            raise ValueError(f"{error} - at `$.{key}`") from error
    return names
