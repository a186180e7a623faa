"""Callbacks for `fit`: what the loss scaler does, in `logs`, files and TensorBoard; stuck runs; resuming killed ones.

Those that read compute nothing of their own (but the float32 reference that `GradientHistogram` may be asked for): the
compiled step counts on the device, and a reading copies a few numbers to the host.
List them before callbacks that use their keys, such as `CSVLogger`; `History` and the progress bar always come after.

With a `log_dir`, readings go to `kmp.jsonl` there (see `kmp.records`) and to TensorBoard event files.
"""

from typing import Any

import keras

from kmp import _arguments
from kmp._backup import BackupAndRestore
from kmp._histogram_callback import GradientHistogram
from kmp._loggers import LossScaleLogger, OverflowCounter
from kmp._probe_callback import ForwardProbe
from kmp._reader import PathLike, Reader
from kmp._report_callback import Report
from kmp._stuck import StuckError
from kmp._stuck_detector import StuckDetector

__all__ = [
    "BackupAndRestore",
    "ForwardProbe",
    "GradientHistogram",
    "LossScaleLogger",
    "OverflowCounter",
    "Report",
    "StuckDetector",
    "StuckError",
    "defaults",
]


def defaults(
    log_dir: PathLike | None = None,
    every_n_steps: int = 250,
    *,
    variables: str | list[str] | None = None,
    reference: tuple[Any, ...] | None = None,
    on_stuck: str = "raise",
    checkpoint: PathLike | None = None,
    report: PathLike | None = None,
    probe: bool = False,
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that a run should have.

    Those are `LossScaleLogger`, `OverflowCounter` and `GradientHistogram`, which share one `run`, a `kmp.records.Run`
    that holds what all of them read; and `StuckDetector`. Where asked for, `ForwardProbe` and `Report` too.

    Args:
        log_dir: Folder for `kmp.jsonl` and TensorBoard's files, or `None` to write no file.
        every_n_steps: Integer, at least 1: how often to read and sample, by the optimizer's step counter.
        variables: As in `GradientHistogram`: which to sample; all by default.
        reference: As in `GradientHistogram`: a batch to take through the model in float32 too; none by default.
        on_stuck: As in `StuckDetector`: `"raise"`, `"warn"` or `"ignore"`.
        checkpoint: As in `StuckDetector`: where to save the model if it is stuck.
        report: As in `Report`: an `.html` file to write.
        probe: Whether to name what was the first to be inf or nan when a loss is: see `ForwardProbe`.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is outside its range.

    Example:
    >>> [type(callback).__name__ for callback in defaults(every_n_steps=50)]
    ['LossScaleLogger', 'OverflowCounter', 'GradientHistogram', 'StuckDetector']
    """
    readers: list[Reader] = [kind(log_dir, every_n_steps) for kind in (LossScaleLogger, OverflowCounter)]
    readers.append(GradientHistogram(log_dir, every_n_steps, variables=variables, reference=reference))
    for reader in readers:
        reader.run = readers[0].run
    probes = [ForwardProbe(None, every_n_steps)] if _arguments.boolean("probe", probe) else []
    reports = [] if report is None else [Report(report, run=readers[0].run)]
    detector = StuckDetector(on_stuck=on_stuck, checkpoint=checkpoint)

    def read_and_report() -> None:
        for callback in readers:
            callback.read(is_epoch_end=True)
        for callback in reports:
            callback.write()

    detector.before_telling = read_and_report  # an error ends `fit` without another chance
    return [*readers, *probes, detector, *reports]
