"""Judges the records of a run: from records to causes, as values. Needs no Keras.

`causes_of` returns what a report says, and `cure_of` what a repair does. A cause is a predicate on
the records with its numbers, its location and its cure; `kmp.advice` has the sentences. All
thresholds stand in `kmp.diagnosis.thresholds`.
"""

from kmp.diagnosis.cause import (
    ERROR,
    INFO,
    SEVERITIES,
    WARNING,
    Cause,
    ComputeInFloat32,
    Edit,
    PrepareData,
    SetArguments,
)
from kmp.diagnosis.causes import causes_of
from kmp.diagnosis.loss_scale_sweep import WhatIf, what_if
from kmp.diagnosis.repair import Cure, cure_of, incurable_cause_of
from kmp.diagnosis.run_metrics import RunMetrics, name_of, since_last_fallback

__all__ = [
    "ERROR",
    "INFO",
    "SEVERITIES",
    "WARNING",
    "Cause",
    "ComputeInFloat32",
    "Cure",
    "Edit",
    "PrepareData",
    "RunMetrics",
    "SetArguments",
    "WhatIf",
    "causes_of",
    "cure_of",
    "incurable_cause_of",
    "name_of",
    "since_last_fallback",
    "what_if",
]
