"""Judges what the records of a run show: from observations to causes, as values. Needs no Keras.

`Observations` are the values that causes are found from. `ladder` has the questions about a run and
the rungs that answer them, `causes` one module for each cause: its predicate, numbers, location,
change and sentences. `causes_of` returns what a report says, and `cure_of` what a repair does. All
thresholds stand in `thresholds`.
"""

from kmp.diagnosis.cause import ERROR, INFO, SEVERITIES, WARNING, Cause
from kmp.diagnosis.edits import Change, ComputeInFloat32, Edit, PrepareData, SetArguments
from kmp.diagnosis.ladder import causes_of, names_of_causes
from kmp.diagnosis.loss_scale_sweep import WhatIf, what_if
from kmp.diagnosis.model_names import name_of
from kmp.diagnosis.observations import Observations
from kmp.diagnosis.repair import Cure, cure_of, incurable_cause_of
from kmp.diagnosis.verdict import verdict_of

__all__ = [
    "ERROR",
    "INFO",
    "SEVERITIES",
    "WARNING",
    "Cause",
    "Change",
    "ComputeInFloat32",
    "Cure",
    "Edit",
    "Observations",
    "PrepareData",
    "SetArguments",
    "WhatIf",
    "causes_of",
    "cure_of",
    "incurable_cause_of",
    "name_of",
    "names_of_causes",
    "verdict_of",
    "what_if",
]
