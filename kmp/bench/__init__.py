"""`kmp bench`: measures what each precision gains on this machine."""

from kmp.bench import environment_variables, fit_timer, measurement, models, precision
from kmp.bench.measurement import MeasurementError
from kmp.bench.precision import PARTS, measure, parts_of
from kmp.bench.results import header, run

__all__ = [
    "PARTS",
    "MeasurementError",
    "environment_variables",
    "fit_timer",
    "header",
    "measure",
    "measurement",
    "models",
    "parts_of",
    "precision",
    "run",
]
