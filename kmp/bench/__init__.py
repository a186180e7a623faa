"""`kmp bench`: measures what each precision gains on this machine."""

from kmp.bench import measurement, models, networks, precision
from kmp.bench.measurement import MeasurementError
from kmp.bench.parts import PARTS, measure
from kmp.bench.results import run

__all__ = [
    "PARTS",
    "MeasurementError",
    "measure",
    "measurement",
    "models",
    "networks",
    "precision",
    "run",
]
