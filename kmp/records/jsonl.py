"""Writing and parsing of log lines; `kmp.records` documents the format. Needs no Keras."""

import json
import math
from collections.abc import Mapping
from typing import Any

from kmp.records.gradient_sample import GradientSample

SCHEMA = 3
READABLE_SCHEMAS = (2, SCHEMA)
FILE_NAME = "kmp.jsonl"

# Keys of schema 2 and their names in this schema.
_RENAMED_KEYS = {"culprit": "overflow_origin", "culprits_by_variable": "overflow_origins_by_variable"}

_COUNTS_BY_VARIABLE = {"overflows_by_variable", "overflow_origins_by_variable", "culprits_by_variable"}
_NUMBER_KEYS = {
    *("loss_scale", "clean_steps", "overflow_count", "overflow_rate", "overflows_in_a_row", "nonfinite_loss_count"),
    *("nonfinite_losses_in_a_row", "last_loss", "highest_loss", "grad_zeros", "grad_norm"),
}


def to_line(row: Mapping[str, Any]) -> str:
    """Returns a record as one line of JSON; non-finite numbers become null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(finite, allow_nan=False, separators=(",", ":")) + "\n"


def parse(line: str, location: str) -> dict[str, Any]:
    """Parses a line of a log, the header or a record.

    Args:
        line: The line.
        location: File and line number, for messages.

    Raises:
        ValueError: If the line does not conform to a supported schema.
    """
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{location}: not a line of JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{location}: a record must be a JSON object. Received: {type(row).__name__}")
    if row.get("kind") == "header" and row.get("schema") not in READABLE_SCHEMAS:
        known = " and ".join(map(str, READABLE_SCHEMAS))
        raise ValueError(f"{location}: schema {row.get('schema')!r}; this version of kmp reads schemas {known}")
    if row.get("kind") != "header" and type(row.get("step")) is not int:
        raise ValueError(f"{location}: a record must have an integer `step`. Received keys: {sorted(row)}")
    _check_values(row, location)
    for key in ("sample", "reference"):
        if key in row:
            _check_sample(row, key, location)
    return row


def upgraded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record of schema 2 with the keys of the current schema."""
    return {_RENAMED_KEYS.get(key, key): value for key, value in row.items()}


def _check_values(row: Mapping[str, Any], location: str) -> None:
    settings = row.get("settings", {})
    if not isinstance(settings, dict) or not isinstance(settings.get("compute_dtypes", []), list):
        raise ValueError(
            f"{location}: `settings` must be an object, and its `compute_dtypes` a list. Received: {settings!r}"
        )
    for key in _NUMBER_KEYS & row.keys():
        if row[key] is not None and type(row[key]) not in (int, float):
            raise ValueError(f"{location}: `{key}` must be a number. Received: {row[key]!r}")
    for key in _COUNTS_BY_VARIABLE & row.keys():
        if not isinstance(row[key], dict) or not all(type(count) is int for count in row[key].values()):
            raise ValueError(f"{location}: `{key}` must be an object of integers. Received: {row[key]!r}")
    _check_scale(row.get("loss_scale"), location)


def _check_scale(scale: float | None, location: str) -> None:
    if scale is not None and not scale > 0:
        raise ValueError(f"{location}: `loss_scale` must be above 0. Received: {scale!r}")


def sample_of(row: Mapping[str, Any], key: str) -> GradientSample:
    """Returns the `sample` or `reference` of a record."""
    return GradientSample.from_dict(row["step"], float(row[key]["loss_scale"]), row[key]["variables"])


def _check_sample(row: Mapping[str, Any], key: str, location: str) -> None:
    try:
        sample = sample_of(row, key)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(f"{location}: not a valid `{key}` ({error!r})") from error
    _check_scale(sample.loss_scale, location)


def is_truncated_header(line: str) -> bool:
    """Whether a line is a truncated header."""
    prefix = '{"schema":'
    return line.startswith(prefix) or prefix.startswith(line)
