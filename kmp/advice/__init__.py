"""From a recorded run to ranked findings, each with its evidence and a change. Knows numbers, no Keras."""

from kmp.advice.diagnose import advise
from kmp.advice.finding import Advice, Finding
from kmp.advice.loss_scale_sweep import WhatIf, what_if
from kmp.advice.run_metrics import RunMetrics as RunMetrics

__all__ = ["Advice", "Finding", "WhatIf", "advise", "what_if"]
