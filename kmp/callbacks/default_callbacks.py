"""The callbacks that a run should have, sharing one run."""

from typing import Any

import keras

from kmp.callbacks.forward_probe import ForwardProbe
from kmp.callbacks.gradient_histogram import GradientHistogram
from kmp.callbacks.loss_scale_logger import LossScaleLogger
from kmp.callbacks.optimizer_callback import PathLike
from kmp.callbacks.overflow_counter import OverflowCounter
from kmp.callbacks.report_callback import Report
from kmp.callbacks.stuck_detector import StuckDetector
from kmp.utils import validation


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
    histogram = GradientHistogram(log_dir, every_n_steps, variables=variables, reference=reference)
    readers = [LossScaleLogger(log_dir, every_n_steps), OverflowCounter(log_dir, every_n_steps), histogram]
    detector = StuckDetector(on_stuck=on_stuck, checkpoint=checkpoint)
    for callback in (*readers, detector):
        callback.monitor = histogram.monitor
    probes = [ForwardProbe(None, every_n_steps)] if validation.boolean("probe", probe) else []
    reports = [] if report is None else [Report(report, run=histogram.run)]

    def read_and_report() -> None:
        for callback in readers:
            callback.read(is_epoch_end=True)
        for callback in reports:
            callback.write()

    detector.before_stuck = read_and_report  # an error ends `fit` without another chance
    return [*readers, *probes, detector, *reports]
