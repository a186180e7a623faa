"""Makes the records of a training from what the optimizer counted: pure functions. See `kmp.records` for the keys."""

import math
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any

import numpy as np

from kmp.records import HIGHEST_NUMBER, MOST_METRICS, RECORD_KEYS, SAMPLE_KEYS, GradientSample, Snapshot, compact

LOSS_SCALE, OVERFLOWS, GRADIENTS = PARTS = ("loss scale", "overflows", "gradients")

Record = dict[str, Any]

_COUNT_SIZE = 10  # bytes of a number with its punctuation


def record_of(snapshot: Snapshot, previous: Snapshot, parts: Collection[str]) -> Record:
    """Returns the record of the steps between two snapshots.

    Args:
        snapshot: The newer snapshot, after at least one more step.
        previous: The older snapshot.
        parts: What to record: `LOSS_SCALE`, `OVERFLOWS`.
    """
    record: Record = {"step": snapshot.step}
    if LOSS_SCALE in parts:
        record |= {"loss_scale": snapshot.loss_scale, "clean_steps": snapshot.clean_steps}
    if OVERFLOWS not in parts:
        return record
    skipped = snapshot.overflow_count - previous.overflow_count
    record |= {
        "overflow_count": snapshot.overflow_count,
        "overflow_rate": skipped / (snapshot.step - previous.step),
        "nonfinite_loss_count": snapshot.nonfinite_loss_count,
        "overflows_in_a_row": snapshot.overflows_in_a_row,
        "nonfinite_losses_in_a_row": snapshot.nonfinite_losses_in_a_row,
        "last_loss": snapshot.last_loss,
        "highest_loss": snapshot.highest_loss,
    }
    if skipped > snapshot.nonfinite_loss_count - previous.nonfinite_loss_count:
        record["overflow_origin"] = snapshot.overflow_origin
    if snapshot.overflows_by_variable != previous.overflows_by_variable:
        record["overflows_by_variable"] = snapshot.overflows_by_variable
        record["overflow_origins_by_variable"] = snapshot.overflow_origins_by_variable
    if snapshot.loss_dtype != previous.loss_dtype:
        record["loss_dtype"] = snapshot.loss_dtype
    return record


def sample_record(sample: GradientSample) -> Record:
    """Returns the record of a sample of gradients."""
    zeros, norm = sample.histogram.zero_fraction, sample.total_norm
    return {"step": sample.step, "grad_zeros": zeros, "grad_norm": norm, "sample": sample}


def metrics_record(step: int, epoch: int, values: Mapping[str, Any]) -> Record:
    """Returns the record of an epoch: those of Keras' `logs` that are numbers, as far as a log can hold them."""
    numbers = {key: to_number(value) for key, value in values.items() if key not in RECORD_KEYS}
    known = ((key, value) for key, value in numbers.items() if value is not None)
    metrics = {key: value if abs(value) <= HIGHEST_NUMBER else math.nan for key, value in islice(known, MOST_METRICS)}
    return {"step": step, "epoch": epoch, "metrics": metrics}


def record_size(record: Mapping[str, Any]) -> int:
    """Returns about the number of bytes of a record's samples and counts by variable in a log."""
    columns = [value for key in SAMPLE_KEYS if key in record for value in compact(record[key]).values()]
    texts = [text for value in columns for text in (value.values() if isinstance(value, Mapping) else [value])]
    counts = [path for value in record.values() if isinstance(value, Mapping) for path in value]
    return sum(len(text) for text in texts if isinstance(text, str)) + sum(len(path) + _COUNT_SIZE for path in counts)


def to_number(value: Any) -> float | None:
    """Returns a number, or a tensor or variable with one, as a float; `None` for anything else."""
    value = value.numpy() if hasattr(value, "numpy") else value
    is_number = isinstance(value, int | float | np.number) or (isinstance(value, np.ndarray) and value.size == 1)
    return float(value) if is_number else None
