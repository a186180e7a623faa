"""Callbacks for `fit`: log the loss scaler in `logs`, files and TensorBoard; stop stuck runs; write a report.

The compiled step counts on the device, and the callbacks copy a few numbers to the host. They
compute nothing themselves, except the weight updates and the float32 passes of `Monitor`. List them
before callbacks that use their keys, such as `CSVLogger`, or a `ModelCheckpoint` that monitors
`loss_scale`: listed before them, it only warns and saves nothing. `History` and the progress bar
always come last.

With a `log_dir`, records go to `kmp.jsonl` there (see `kmp.records`) and to TensorBoard event
files.
"""

from kmp.callbacks.default_callbacks import defaults
from kmp.callbacks.float32_fallback import Float32Fallback
from kmp.callbacks.loggers import GradientHistogram, LossScaleLogger, OverflowCounter
from kmp.callbacks.monitor import Monitor
from kmp.callbacks.report_callback import Report
from kmp.callbacks.stuck_detector import StuckDetector, StuckError

__all__ = [
    "Float32Fallback",
    "GradientHistogram",
    "LossScaleLogger",
    "Monitor",
    "OverflowCounter",
    "Report",
    "StuckDetector",
    "StuckError",
    "defaults",
]
