"""The callback that counts overflows."""

from kmp.callbacks.monitor import Monitor, PathLike
from kmp.callbacks.training_records import OVERFLOWS
from kmp.optimizer import LossScaleOptimizer


class OverflowCounter(Monitor):
    """Counts the steps that were skipped because the loss or a gradient was non-finite, as `overflow_count` in `logs`.

    What `Monitor` records, without the loss scale and gradients. `run` and the log also have, since the record before,
    `overflow_rate`, the fraction of steps that were skipped; `nonfinite_loss_count`, the skipped steps since training
    began whose loss was non-finite before it was scaled, which no loss scale prevents; the variable where the last
    overflow with a finite loss originated; and for each variable the number of steps in which it overflowed and in
    which the overflow originated there.

    Args:
        log_dir: Folder for `kmp.jsonl` and TensorBoard's files, or `None` to write no file.
        every_n_steps: Integer, at least 1: how often to read the optimizer, in optimizer steps.
        optimizer: The `kmp.LossScaleOptimizer` to read, for a model with several. Defaults to the model's.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is outside its range; in `on_train_begin`, if a float16 model has no
            `kmp.LossScaleOptimizer`.
        OSError: In `on_train_begin`, if `log_dir` cannot be written.

    Example:
    >>> import keras, kmp, numpy as np
    >>> with kmp.enable():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> y = np.full((8, 1), 1e4)  # at the loss scale 2^15, gradients exceed 65504
    >>> counter = kmp.callbacks.OverflowCounter()
    >>> history = model.fit(np.ones((8, 4)), y, verbose=0, callbacks=[counter])
    >>> history.history["overflow_count"], counter.run.last("nonfinite_loss_count")
    ([1], 0)
    """

    parts = (OVERFLOWS,)

    def __init__(
        self, log_dir: PathLike | None = None, every_n_steps: int = 250, optimizer: LossScaleOptimizer | None = None
    ) -> None:
        super().__init__(log_dir, every_n_steps, optimizer)
