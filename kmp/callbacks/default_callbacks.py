"""The recommended callbacks for a run, which share one list of records."""

import functools

import keras

from kmp.callbacks.gradient_histogram import AUTO, GradientHistogram
from kmp.callbacks.loss_scale_logger import LossScaleLogger
from kmp.callbacks.optimizer_callback import PathLike
from kmp.callbacks.overflow_counter import OverflowCounter
from kmp.callbacks.report_callback import Report, html_path
from kmp.callbacks.stuck_detector import StuckDetector


def defaults(
    log_dir: PathLike | None = None,
    every_n_steps: int = 250,
    *,
    variables: str | list[str] | None = None,
    reference: str | None = AUTO,
    on_stuck: str = "raise",
    checkpoint: PathLike | None = None,
    report: PathLike | None = None,
) -> list[keras.callbacks.Callback]:
    """Returns the recommended callbacks for a run.

    These are `LossScaleLogger`, `OverflowCounter`, `GradientHistogram` and `StuckDetector`. They share one `run`, a
    `kmp.records.Run` with the records of all of them. `report` adds a `Report`.

    They add `loss_scale`, `overflow_count` and `grad_norm` to `logs`, which Keras shows in the progress bar and in
    `History`. `run`, the log and TensorBoard have more, see `kmp.records`.

    They do nothing for a model that needs no loss scale, such as a float32 or bfloat16 one, and is compiled without
    `kmp.LossScaleOptimizer`; the logger `"kmp"` reports it once per model. To record such a model, compile it with
    `kmp.wrap(optimizer, loss_scale=1.0)`.

    Args:
        log_dir: Folder for `kmp.jsonl` and TensorBoard's files, or `None` to write no file.
        every_n_steps: Integer, at least 1: how often to read and sample, in optimizer steps.
        variables: The variables to sample, as in `GradientHistogram`. Defaults to all.
        reference: `"auto"` or `None`, as in `GradientHistogram`: whether to replay batches to find what float16 loses.
        on_stuck: As in `StuckDetector`: `"raise"`, `"warn"` or `"ignore"`.
        checkpoint: Where to save the model if training is stuck, as in `StuckDetector`.
        report: An `.html` file to write, as in `Report`.

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
    reports = [] if report is None else [Report(html_path("report", report), run=histogram.run)]
    # After the error, `fit` calls no callback. These callables can be pickled and copied with the callbacks.
    read_loggers = [functools.partial(logger.read, is_epoch_end=True) for logger in loggers]
    detector.before_stuck = [*read_loggers, *(callback.write for callback in reports), histogram.monitor.write_verdict]
    return [*loggers, detector, *reports]
