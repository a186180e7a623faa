"""Callbacks for `fit`: one that records, replays, repairs, stops stuck runs and reports.

The compiled step counts on the device, and the callbacks copy a few numbers to the host. They
compute nothing themselves, except the weight updates and the replays of `Monitor`.

With a `log_dir`, records go to `kmp.jsonl` there (see `kmp.records`) and to TensorBoard event
files.
"""

from kmp.callbacks.default_callbacks import defaults
from kmp.callbacks.loggers import GradientHistogram, LossScaleLogger, OverflowCounter
from kmp.callbacks.monitor import Monitor
from kmp.callbacks.stuck_detector import StuckError

__all__ = [
    "GradientHistogram",
    "LossScaleLogger",
    "Monitor",
    "OverflowCounter",
    "StuckError",
    "defaults",
]
