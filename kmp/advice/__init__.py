"""Diagnoses a recorded run: ranked findings, each with its evidence and a suggested change.

Needs no Keras.
"""

from kmp.advice.diagnose import advise
from kmp.advice.diagnose import diagnosis_of as diagnosis_of
from kmp.advice.finding import INFO as INFO
from kmp.advice.finding import Advice, Finding
from kmp.advice.loss_scale_sweep import WhatIf, what_if
from kmp.advice.run_metrics import RunMetrics as RunMetrics
from kmp.advice.run_metrics import since_last_fallback as since_last_fallback
from kmp.advice.thresholds import EXPLODING_LOSS as EXPLODING_LOSS
from kmp.advice.thresholds import SMALL_LOSS as SMALL_LOSS
from kmp.advice.wording import skipped as skipped

__all__ = ["Advice", "Finding", "WhatIf", "advise", "what_if"]
