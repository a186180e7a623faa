"""Writing and parsing of log lines; `kmp.records` documents the format. Needs no Keras."""

import contextlib
import dataclasses
import json
import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kmp.records.compact_sample import expanded
from kmp.records.exponent_histogram import LAST_EXPONENT
from kmp.records.gradient_sample import GradientSample
from kmp.records.log_errors import InvalidValueError, explanation
from kmp.records.log_schema import (
    MOST_UNKNOWN_KEYS,
    READABLE_SCHEMAS,
    Header,
    Record,
    Settings,
    UnknownNumber,
    UnknownSetting,
)
from kmp.utils import printable

SCHEMA = READABLE_SCHEMAS[-1]
FILE_NAME = "kmp.jsonl"
SAMPLE_KEYS = ("sample", "reference")

_LONGEST_UNKNOWN_KEY = 100

# Keys of schema 2 and their names in this schema.
_RENAMED_KEYS = {"culprit": "overflow_origin", "culprits_by_variable": "overflow_origins_by_variable"}

RECORD_KEYS = frozenset(Record.__annotations__)

_Values = dict[str, msgspec.Raw]
_VALUES = msgspec.json.Decoder(_Values)
_HEADER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Header)
_RECORD: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Record)
_UNKNOWN_NUMBER = msgspec.json.Decoder(UnknownNumber)
_UNKNOWN_SETTING = msgspec.json.Decoder(UnknownSetting)
_ANY = msgspec.json.Decoder()


def to_line(row: Mapping[str, Any]) -> str:
    """Returns a record as one line of JSON; non-finite numbers become null."""
    finite = _without_nonfinite(row)
    if "metrics" in finite:
        finite["metrics"] = _without_nonfinite(finite["metrics"])
    return json.dumps(finite, allow_nan=False, separators=(",", ":"), default=dataclasses.asdict) + "\n"


def _without_nonfinite(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


class RepeatedNames:
    """Removes the names of variables from the samples of a log where they equal those of the sample before."""

    def __init__(self) -> None:
        self._names: list[str] | None = None

    def removed(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the next record of the log without names that a reader knows from the records before it."""
        result = dict(row)
        for key in SAMPLE_KEYS:
            names = row[key].get("names") if key in row else None
            if names is not None and names == self._names:
                result[key] = {name: value for name, value in row[key].items() if name != "names"}
            self._names = self._names if names is None else names
        return result


class LogParser:
    """Parses and validates the lines of one log.

    Args:
        file: The log, for messages.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._unknown_keys: set[str] = set()
        self._names: list[str] | None = None  # of the last sample; the samples of a run share the list

    def parse(self, line: bytes, number: int) -> dict[str, Any]:
        """Returns a line of the log: the header, which has the `kind` `"header"`, or a record.

        Args:
            line: The line.
            number: Its number, from 1.

        Raises:
            ValueError: If the line does not conform to a supported schema. The message names file, line and key.
        """
        try:
            values = _VALUES.decode(line)
            is_header = "kind" in values and _ANY.decode(values["kind"]) == "header"
            if number == 1 and not is_header:
                raise InvalidValueError(f"a log of kmp begins with a header. Received keys: {reprlib.repr([*values])}")
            return self._header(line, values) if is_header else self._record(line, values)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ValueError(printable(f"{self._file}:{number}: {explanation(error, line)}")) from error

    def _record(self, line: bytes, values: _Values) -> dict[str, Any]:
        record: dict[str, Any] = _RECORD.decode(line)
        for key in SAMPLE_KEYS:
            if "variables" in record.get(key, ()):
                _check_variables(key, record[key])
            elif key in record:
                self._fill_in_names(key, record[key])
                expanded(record["step"], record[key], key)  # raises for values that are not valid
        return record | self._unknown(values, Record, _UNKNOWN_NUMBER)

    def _fill_in_names(self, key: str, sample: dict[str, Any]) -> None:
        names = sample.get("names", self._names)
        if names is None:
            raise InvalidValueError(f"`{key}` has no `names`, and no sample before it has any")
        self._names = sample["names"] = self._names if names == self._names else names

    def _header(self, line: bytes, values: _Values) -> dict[str, Any]:
        schema = _ANY.decode(values["schema"]) if "schema" in values else None
        if schema not in READABLE_SCHEMAS:
            known = f"{', '.join(map(str, READABLE_SCHEMAS[:-1]))} and {SCHEMA}"
            raise InvalidValueError(f"schema {reprlib.repr(schema)}; this version of kmp reads schemas {known}")
        header: dict[str, Any] = _HEADER.decode(line)
        if "settings" in header:
            header["settings"] |= self._unknown(_VALUES.decode(values["settings"]), Settings, _UNKNOWN_SETTING)
        return header | self._unknown(values, Header, _UNKNOWN_SETTING)

    def _unknown(self, values: _Values, known: Any, decoder: Any) -> dict[str, Any]:
        """Returns the values of unknown keys that the rest of kmp can take, without the others."""
        kept = {}
        for key, value in values.items():
            if key not in known.__annotations__ and key.isidentifier() and len(key) <= _LONGEST_UNKNOWN_KEY:
                with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
                    kept[key] = decoder.decode(value)
        self._unknown_keys.update(kept)
        if len(self._unknown_keys) > MOST_UNKNOWN_KEYS:
            problem = f"a log may have {MOST_UNKNOWN_KEYS} keys that this version of kmp does not know"
            raise InvalidValueError(f"`{max(kept)}`: {problem}")
        return kept


def upgraded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record of an older schema with the keys of the current schema."""
    return {_RENAMED_KEYS.get(key, key): value for key, value in row.items()}


def sample_of(row: Mapping[str, Any], key: str) -> GradientSample:
    """Returns the `sample` or `reference` of a record."""
    sample = row[key]
    if "variables" in sample:
        return GradientSample.from_dict(row["step"], float(sample["loss_scale"]), sample["variables"])
    return expanded(row["step"], sample, key)


def has_update(sample: Mapping[str, Any]) -> bool:
    """Whether a `sample` of a record measured the update of the weights."""
    return "update_norm" in sample or any("update_norm" in entry for entry in sample.get("variables", {}).values())


def is_truncated_header(line: bytes) -> bool:
    """Whether a line is a truncated header."""
    prefix = b'{"schema":'
    return line.startswith(prefix) or prefix.startswith(line)


def _check_variables(key: str, sample: Mapping[str, Any]) -> None:
    """Checks what a schema does not express, of a sample with `variables`.

    Raises:
        ValueError: If counts go beyond float32's exponents, or differ in sum with and without the loss scale.
    """
    variables = sample["variables"]
    if len({"unscaled" in entry for entry in variables.values()}) > 1:
        raise InvalidValueError(f"`{key}.variables` must all have `unscaled`, or none")
    for name, entry in variables.items():
        if max(map(_last_exponent, (entry, entry.get("unscaled", entry)))) > LAST_EXPONENT:
            raise InvalidValueError(f"`{_path(key, name)}.counts` must end at exponent {LAST_EXPONENT} or below")
        if "unscaled" in entry and _element_count(entry["unscaled"]) != _element_count(entry):
            raise InvalidValueError(f"`{_path(key, name)}.unscaled` must count as many elements as the scaled gradient")


def _path(key: str, name: str) -> str:
    return f"{key}.variables[{reprlib.repr(name)}]"


def _last_exponent(bins: Mapping[str, Any]) -> int:
    return bins["first"] + len(bins["counts"]) - 1


def _element_count(bins: Mapping[str, Any]) -> int:
    return sum(bins["counts"], bins["zero"] + bins["inf"] + bins["nan"])
