"""What each precision gains: for a model of the user, and on this machine.

Outside the package `kmp`, because no training needs it. `kmp bench` and `kmp doctor` use it.
"""

from kmp_bench.comparing import compare
from kmp_bench.measurement import MeasurementError
from kmp_bench.step_comparison import Device, Step, StepComparison

__all__ = ["Device", "MeasurementError", "Step", "StepComparison", "compare"]
