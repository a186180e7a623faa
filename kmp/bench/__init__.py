"""`kmp bench`: measures the cost of loss scaling and callbacks, and the gain of 16-bit training, on this machine."""

from kmp.bench import precision_comparison
from kmp.bench.runner import NETWORKS, PARTS, WITH_MODE, parts_by_default, run
from kmp.bench.sizes import FULL, QUICK, Size
from kmp.bench.timing import MeasurementError

__all__ = [
    "FULL",
    "NETWORKS",
    "PARTS",
    "QUICK",
    "WITH_MODE",
    "MeasurementError",
    "Size",
    "parts_by_default",
    "precision_comparison",
    "run",
]
