"""Encoding and decoding of the lines of a log, see `kmp.records`. Needs no Keras."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import asdict

from kmp.records import flat_replays
from kmp.records.compact_sample import compact, expanded
from kmp.records.log_schema import Header, Record, Sample
from kmp.utils.names import printable

FILE_NAME = "kmp.jsonl"
SAMPLE_KEYS = ("sample", "reference")
_HEADER_BEGIN = b'{"schema":'
_LONGEST_MESSAGE = 300


class _Format(Struct):
    """What the first line of a log must have."""

    schema: int
    kind: str


# A record as it stands in a log, with the compact form of its samples.
_Line = msgspec.defstruct(
    "_Line",
    [(key, Sample | UnsetType, UNSET) for key in SAMPLE_KEYS],
    bases=(Record,),
    kw_only=True,
)
_FORMAT = msgspec.json.Decoder(_Format)
_HEADER = msgspec.json.Decoder(Header)
_LINE = msgspec.json.Decoder(_Line)


class LogEncoder:
    """Encodes the lines of one log.

    Omits the names of a sample that equal those of the last one.
    """

    def __init__(self) -> None:
        self._names: tuple[str, ...] | None = None  # of the last sample

    def line(self, part: Header | Record) -> str:
        """Returns the header or a record as one line of JSON; non-finite numbers become null."""
        samples: dict[str, Any] = {}
        for key in SAMPLE_KEYS:
            sample = getattr(part, key, UNSET)
            if sample is UNSET:
                continue
            samples[key] = dict(compact(sample))
            if sample.names == self._names:
                del samples[key]["names"]
            self._names = sample.names
        if samples:
            part = msgspec.structs.replace(part, **samples)
        # The hook gets the scalars of NumPy.
        return msgspec.json.encode(part, enc_hook=lambda value: value.item()).decode() + "\n"


def to_line(part: Header | Record) -> str:
    """Returns the header or a record as one line of JSON, with the names of its samples."""
    return LogEncoder().line(part)


def check_record(record: Record) -> None:
    """Raises an error if a log cannot hold the values of a record."""
    _LINE.decode(to_line(record))


def read_log(file: Path) -> tuple[Header, list[Record]]:
    """Returns the header and the records of a log, with their samples; errors as in `load_run`."""
    header, records = Header(), []
    names: tuple[str, ...] | None = None  # of the last sample: the samples of a run share them
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if _is_truncated(line, is_first=number == 1):
                break
            try:
                if number == 1:
                    _FORMAT.decode(line)
                    header = _HEADER.decode(line)
                else:
                    record, names = _decoded(line, names)
                    records.append(record)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                message = f"{file}:{number}: {str(error)[:_LONGEST_MESSAGE]}"
                # Python prints an uncaught error as it is.
                raise ValueError(printable(message)) from error
    return header, records


def _is_truncated(line: bytes, is_first: bool) -> bool:
    """Whether a killed process wrote only a part of a line of a log."""
    is_of_log = not is_first or line.startswith(_HEADER_BEGIN) or _HEADER_BEGIN.startswith(line)
    return is_of_log and not line.endswith(b"\n")


def _decoded(line: bytes, names: tuple[str, ...] | None) -> tuple[Record, tuple[str, ...] | None]:
    """Returns the record of a line, and the names of the variables of the last sample.

    Args:
        line: The line.
        names: The names of the variables of the last sample before it.
    """
    if flat_replays.MARK in line:
        decoded = msgspec.json.decode(line)
        if isinstance(decoded, dict) and isinstance(decoded.get("replay"), dict):
            decoded["replay"] = flat_replays.nested(decoded["replay"])
        values = asdict(msgspec.convert(decoded, _Line))
    else:
        values = asdict(_LINE.decode(line))
    for key in SAMPLE_KEYS:
        data = values[key]
        if data is UNSET:
            continue
        if "names" in data:
            names = tuple(data["names"])
            if len(set(names)) < len(names):
                raise ValueError(f"`names` must not repeat a name - at `$.{key}`")
        if names is None:
            raise ValueError(f"No sample before this one has `names` - at `$.{key}`")
        data["names"] = names
        try:
            values[key] = expanded(values["step"], data)
        except ValueError as error:
            raise ValueError(f"{error} - at `$.{key}`") from error
    return Record(**values), names
