"""Puts the diagnosis of a run into words: findings with evidence and edits, and a verdict.

Needs no Keras. `kmp.diagnosis` decides what is a cause.
"""

from kmp.advice.diagnose import advise
from kmp.advice.finding import Advice, Finding
from kmp.diagnosis import ComputeInFloat32, PrepareData, SetArguments, WhatIf, what_if

__all__ = [
    "Advice",
    "ComputeInFloat32",
    "Finding",
    "PrepareData",
    "SetArguments",
    "WhatIf",
    "advise",
    "what_if",
]
