"""The recommended callbacks for a run, which share one list of records."""

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
    """Returns the recommended callbacks for a run.

    These are `LossScaleLogger`, `OverflowCounter`, `GradientHistogram` and `StuckDetector`. They share one `run`, a
    `kmp.records.Run` with the records of all of them. `ForwardProbe` and `Report` are added on request.

    Args:
        log_dir: Folder for `kmp.jsonl` and TensorBoard's files, or `None` to write no file.
        every_n_steps: Integer, at least 1: how often to read and sample, in optimizer steps.
        variables: The variables to sample, as in `GradientHistogram`. Defaults to all.
        reference: A batch for a float32 reference pass, as in `GradientHistogram`. Defaults to none.
        on_stuck: As in `StuckDetector`: `"raise"`, `"warn"` or `"ignore"`.
        checkpoint: Where to save the model if training is stuck, as in `StuckDetector`.
        report: An `.html` file to write, as in `Report`.
        probe: Whether to find the first NaN or Inf when a loss is non-finite: see `ForwardProbe`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is outside its range.

    Example:
    >>> [type(callback).__name__ for callback in defaults(every_n_steps=50)]
    ['LossScaleLogger', 'OverflowCounter', 'GradientHistogram', 'StuckDetector']
    """
    histogram = GradientHistogram(log_dir, every_n_steps, variables=variables, reference=reference)
    loggers = [LossScaleLogger(log_dir, every_n_steps), OverflowCounter(log_dir, every_n_steps), histogram]
    detector = StuckDetector(on_stuck=on_stuck, checkpoint=checkpoint)
    for callback in (*loggers, detector):
        callback.monitor = histogram.monitor
    probes = [ForwardProbe(None, every_n_steps)] if validation.boolean("probe", probe) else []
    reports = [] if report is None else [Report(report, run=histogram.run)]

    def read_and_report() -> None:
        for callback in loggers:
            callback.read(is_epoch_end=True)
        for callback in reports:
            callback.write()

    detector.before_stuck = read_and_report  # after the error, `fit` calls no callback
    return [*loggers, *probes, detector, *reports]
