"""The recommended callbacks for a run."""

import keras

from kmp.callbacks.float32_fallback import Float32Fallback
from kmp.callbacks.monitor import AUTO, Monitor
from kmp.callbacks.optimizer_reader import PathLike
from kmp.callbacks.report_callback import Report
from kmp.callbacks.stuck_detector import StuckDetector
from kmp.utils import validation


def defaults(
    log_dir: PathLike | None = None,
    every_n_steps: int = 250,
    *,
    variables: str | list[str] | None = None,
    reference: str | None = AUTO,
    float32_fallback: bool = True,
    on_stuck: str = "raise",
    report: PathLike | None = None,
) -> list[keras.callbacks.Callback]:
    """Returns the recommended callbacks for a run.

    These are a `Monitor`, whose `run` is a `kmp.records.Run` with all records; a `Float32Fallback`,
    which sets layers to float32 in which float16 fails; and a `StuckDetector` for what that cannot
    repair. `report` adds a `Report`.

    They add `loss_scale`, `overflow_count` and `grad_norm` to `logs`, which Keras shows in the
    progress bar and in `History`. `run`, the log and TensorBoard have more, see `kmp.records`.

    They do nothing for a model that needs no loss scale, such as a float32 or bfloat16 one, and is
    compiled without `kmp.LossScaleOptimizer`; the logger `"kmp"` reports it once per model. To
    record such a model, compile it with `kmp.wrap(optimizer, loss_scale=1.0)`.

    Args:
        log_dir: Folder for `kmp.jsonl` and TensorBoard's files, or `None` to write no file.
        every_n_steps: Integer, at least 1: how often to read and sample, in optimizer steps.
        variables: The variables to sample, as in `Monitor`. Defaults to all.
        reference: `"auto"` or `None`, as in `Monitor`: whether to replay batches to find what
            float16 loses.
        float32_fallback: Whether to add `Float32Fallback`. It needs `reference="auto"`.
        on_stuck: As in `StuckDetector`: `"raise"`, `"warn"` or `"ignore"`.
        report: An `.html` file to write, as in `Report`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is outside its range.

    Example:
    >>> [type(callback).__name__ for callback in defaults(every_n_steps=50)]
    ['Monitor', 'Float32Fallback', 'StuckDetector']
    """
    monitor = Monitor(log_dir, every_n_steps, variables=variables, reference=reference)
    reports = (
        []
        if report is None
        else [Report(validation.local_path("report", report, (".html",)), run=monitor.run)]
    )
    has_fallback = (
        validation.boolean("float32_fallback", float32_fallback) and reference is not None
    )
    fallbacks = [Float32Fallback(monitor)] if has_fallback else []
    detector = StuckDetector(on_stuck=on_stuck)
    detector.explain_with([monitor, *fallbacks, *reports])
    return [monitor, *fallbacks, detector, *reports]
