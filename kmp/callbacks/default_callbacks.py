"""The recommended callbacks for a run."""

import keras

from kmp.callbacks.monitor import Monitor
from kmp.callbacks.training_records import PathLike


def defaults(
    log_dir: PathLike | None = None,
    every_n_steps: int = 250,
    *,
    variables: str | list[str] | None = None,
    replay: bool = True,
    repair: bool = True,
    on_nonfinite: str = "skip",
    patience: int = 100,
    log_norms: bool = False,
    report: PathLike | None = None,
    failing_batch: PathLike | None = None,
) -> list[keras.callbacks.Callback]:
    """Returns the recommended callbacks for a run: a `Monitor`.

    Its `run` is a `kmp.records.Run` with all records. It adds `loss_scale`, `overflow_count` and
    `grad_norm` to `logs`, which Keras shows in the progress bar and in `History`. `run`, the log
    and TensorBoard have more, see `kmp.records`.

    Args:
        log_dir: As in `Monitor`.
        every_n_steps: As in `Monitor`.
        variables: As in `Monitor`.
        replay: As in `Monitor`.
        repair: As in `Monitor`.
        on_nonfinite: As in `Monitor`.
        patience: As in `Monitor`.
        log_norms: As in `Monitor`.
        report: As in `Monitor`.
        failing_batch: As in `Monitor`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is outside its range.

    Example:
    >>> [type(callback).__name__ for callback in defaults(every_n_steps=50)]
    ['Monitor']
    """
    monitor = Monitor(
        log_dir,
        every_n_steps,
        variables=variables,
        replay=replay,
        repair=repair,
        on_nonfinite=on_nonfinite,
        patience=patience,
        log_norms=log_norms,
        report=report,
        failing_batch=failing_batch,
    )
    return [monitor]
