"""The lines of a log, written and read; `kmp.records` says what is in them. Needs NumPy alone."""

import json
import math
from collections.abc import Mapping
from typing import Any

from kmp.records.gradient_sample import GradientSample

SCHEMA = 3
READABLE_SCHEMAS = (2, SCHEMA)
FILE_NAME = "kmp.jsonl"

# What schema 2 calls them.
_RENAMED = {"culprit": "overflow_origin", "culprits_by_variable": "overflow_origins_by_variable"}

_BY_VARIABLE = {"overflows_by_variable", "overflow_origins_by_variable", "culprits_by_variable"}
_NUMBERS = {
    *("loss_scale", "clean_steps", "overflow_count", "overflow_rate", "overflows_in_a_row", "nonfinite_loss_count"),
    *("nonfinite_losses_in_a_row", "last_loss", "highest_loss", "grad_zeros", "grad_norm"),
}


def to_line(row: Mapping[str, Any]) -> str:
    """Returns a reading as one line of JSON; numbers that are not finite become null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(finite, allow_nan=False, separators=(",", ":")) + "\n"


def parse(line: str, place: str) -> dict[str, Any]:
    """Returns the header or the reading that a line holds.

    Args:
        line: The line.
        place: Where it stands, for messages.

    Raises:
        ValueError: If it is not of this schema.
    """
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{place}: not a line of JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place}: a reading is a JSON object. Received: {type(row).__name__}")
    if row.get("kind") == "header" and row.get("schema") not in READABLE_SCHEMAS:
        known = " and ".join(map(str, READABLE_SCHEMAS))
        raise ValueError(f"{place}: schema {row.get('schema')!r}; this version of kmp reads schemas {known}")
    if row.get("kind") != "header" and type(row.get("step")) is not int:
        raise ValueError(f"{place}: a reading has an integer `step`. Received: {sorted(row)}")
    _check_values(row, place)
    for key in ("sample", "reference"):
        if key in row:
            _check_sample(row, key, place)
    return row


def upgraded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record of schema 2 with the keys of this schema."""
    return {_RENAMED.get(key, key): value for key, value in row.items()}


def _check_values(row: Mapping[str, Any], place: str) -> None:
    settings = row.get("settings", {})
    if not isinstance(settings, dict) or not isinstance(settings.get("compute_dtypes", []), list):
        raise ValueError(f"{place}: settings is an object with a list of `compute_dtypes`. Received: {settings!r}")
    for key in _NUMBERS & row.keys():
        if row[key] is not None and type(row[key]) not in (int, float):
            raise ValueError(f"{place}: {key} is a number. Received: {row[key]!r}")
    for key in _BY_VARIABLE & row.keys():
        if not isinstance(row[key], dict) or not all(type(count) is int for count in row[key].values()):
            raise ValueError(f"{place}: {key} is an object of integers. Received: {row[key]!r}")
    _check_scale(row.get("loss_scale"), place)


def _check_scale(scale: float | None, place: str) -> None:
    if scale is not None and not scale > 0:
        raise ValueError(f"{place}: a loss scale is above 0. Received: {scale!r}")


def sample_of(row: Mapping[str, Any], key: str) -> GradientSample:
    """Returns the `sample` or the `reference` of a reading."""
    return GradientSample.from_dict(row["step"], float(row[key]["loss_scale"]), row[key]["variables"])


def _check_sample(row: Mapping[str, Any], key: str, place: str) -> None:
    try:
        sample = sample_of(row, key)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(f"{place}: not a {key} of kmp's gradients ({error!r})") from error
    _check_scale(sample.loss_scale, place)


def is_truncated_header(line: str) -> bool:
    """Whether a line is a header that was cut short."""
    begin = '{"schema":'
    return line.startswith(begin) or begin.startswith(line)
