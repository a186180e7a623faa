"""`kmp bench`: measures what loss scaling, callbacks and lower precision cost and gain on this machine."""

from kmp.bench.runner import FULL, NETWORKS, PARTS, QUICK, WITH_MODE, Size, parts_by_default, run
from kmp.bench.timing import MeasurementError

__all__ = ["FULL", "NETWORKS", "PARTS", "QUICK", "WITH_MODE", "MeasurementError", "Size", "parts_by_default", "run"]
