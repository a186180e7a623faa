"""Encoding and decoding of the lines of a log, see `kmp.records`. Needs no Keras."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import asdict

from kmp.records.compact_sample import compact, expanded
from kmp.records.gradient_sample import GradientSample
from kmp.records.log_schema import Header, Record, Sample
from kmp.utils.names import printable

FILE_NAME = "kmp.jsonl"
SAMPLE_KEYS = ("sample", "reference")
_HEADER_BEGIN = b'{"schema":'
_LONGEST_MESSAGE = 300


class _Format(Struct):
    """What a log must begin with, though a `Header` in memory need not have it."""

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


class _LogDecoder:
    """Decodes the records of one log: a sample without names has those of the last one."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] | None = None  # of the last sample: those of a run share them

    def record(self, line: bytes) -> Record:
        """Returns the record of a line, with its samples."""
        values = asdict(_LINE.decode(line))
        for key in SAMPLE_KEYS:
            if values[key] is UNSET:
                continue
            try:
                values[key] = self._sample(values["step"], values[key])
            except ValueError as error:
                raise ValueError(f"{error} - at `$.{key}`") from error
        return Record(**values)

    def _sample(self, step: int, data: dict[str, Any]) -> GradientSample:
        if "names" in data:
            self._names = tuple(data["names"])
            if len(set(self._names)) < len(self._names):
                raise ValueError("`names` must not repeat a name")
        if self._names is None:
            raise ValueError("No sample before this one has `names`")
        data["names"] = self._names
        return expanded(step, data)


def read_log(file: Path) -> tuple[Header, list[Record]]:
    """Returns the header and the records of a log, with their samples; errors as in `load_run`."""
    header, records = Header(), []
    decoder = _LogDecoder()
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if _is_truncated(line, is_first=number == 1):
                break
            try:
                if number == 1:
                    _FORMAT.decode(line)
                    header = _HEADER.decode(line)
                else:
                    records.append(decoder.record(line))
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                message = f"{file}:{number}: {str(error)[:_LONGEST_MESSAGE]}"
                # Python prints an uncaught error as it is.
                raise ValueError(printable(message)) from error
    return header, records


def _is_truncated(line: bytes, is_first: bool) -> bool:
    """Whether a killed process wrote only a part of a line of a log."""
    is_of_log = not is_first or line.startswith(_HEADER_BEGIN) or _HEADER_BEGIN.startswith(line)
    return is_of_log and not line.endswith(b"\n")
