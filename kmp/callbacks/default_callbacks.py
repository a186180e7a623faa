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
    """Returns the recommended callbacks for a training: a list with one `Monitor`.

    It records the training, replays batches, repairs the training, and stops it if it is stuck:
    see [Callbacks and logs](../guide/callbacks.md). `run` of the monitor has the records, as a
    `kmp.records.Run`. Keras' `logs` get `loss_scale`, `overflow_count` and `grad_norm`.

    Args:
        log_dir: Folder for the log `kmp.jsonl` and TensorBoard's event files; `None` for no files.
        every_n_steps: Integer, at least 1: how often to record and to sample the gradients, in
            steps of the optimizer.
        variables: The variables whose gradients are sampled: a path, a pattern such as
            `"*/kernel"`, or a list of these; `None` for all.
        replay: Whether to replay batches, to find what 16 bits lose and where NaN and Inf begin.
        repair: Whether to set layers to float32 if a replay proves that the training needs it.
        on_nonfinite: What to do about NaN and Inf that no loss scale prevents: `"skip"`, `"raise"`,
            `"lower_learning_rate"`, `"warn"` or `"ignore"`, see
            [NaN and Inf](../guide/diagnose.md#nan-and-inf).
        patience: Integer, at least 1: the number of consecutive skipped steps after which a
            training is stuck.
        log_norms: Whether to add the gradient norm of each layer to `logs`.
        report: An `.html` file for the report, written at the end of epochs and of training.
        failing_batch: An `.npz` file for the batch of the first step with such NaN or Inf.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is outside its range.

    Example:
    >>> import keras, kmp, numpy as np
    >>> with kmp.enable(initial_scale=1024.0):
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> x, y, callbacks = np.ones((8, 4)), np.ones((8, 1)), kmp.callbacks.defaults()
    >>> history = model.fit(x, y, verbose=0, callbacks=callbacks)
    >>> callbacks[0].run.last("loss_scale")
    1024.0
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
