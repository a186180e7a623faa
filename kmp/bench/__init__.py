"""What each precision gains: for a model of the user, and on this machine."""

from kmp.bench import (
    environment_variables,
    fit_timer,
    layer_times,
    measurement,
    models,
    precision,
    results,
)
from kmp.bench.comparing import compare
from kmp.bench.measurement import MeasurementError
from kmp.bench.step_comparison import Device, Step, StepComparison

__all__ = [
    "Device",
    "MeasurementError",
    "Step",
    "StepComparison",
    "compare",
    "environment_variables",
    "fit_timer",
    "layer_times",
    "measurement",
    "models",
    "precision",
    "results",
]
