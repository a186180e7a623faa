"""The callback that counts overflows."""

from typing import Any

from kmp.callbacks.optimizer_callback import Logs, OptimizerCallback
from kmp.records import Snapshot


class OverflowCounter(OptimizerCallback):
    """Counts the steps that were skipped because the loss or a gradient was non-finite.

    In `logs`:

    - `overflow_count`: skipped steps since training began.
    - `overflow_rate`: skipped steps as a fraction of the steps since the last record; in an epoch's logs, of the
      epoch's steps.
    - `nonfinite_loss_count`, in an epoch's logs: skipped steps since training began whose loss was non-finite before
      it was scaled. No loss scale prevents these.
    - `overflow_origin`, in an epoch's logs: the variable where the last overflow with a finite loss originated, as its
      index in the optimizer's variables, `model.trainable_variables`. -1 before the first such overflow.

    `run` and the log have the path of that variable, and for each variable the number of steps in which it overflowed
    and in which the overflow originated there. Paths are not in `logs`: Keras averages its values and fails on strings.

    Args:
        log_dir: Folder for `kmp.jsonl` and TensorBoard's files, or `None` to write no file.
        every_n_steps: Integer, at least 1: how often to read the optimizer, in optimizer steps.
        optimizer: The `kmp.LossScaleOptimizer` to read, for a model with several. Defaults to the model's.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `every_n_steps` is below 1; in `on_train_begin`, if the optimizer is not a
            `kmp.LossScaleOptimizer`.
        OSError: In `on_train_begin`, if `log_dir` cannot be written.

    Example:
    >>> import keras, kmp, numpy as np
    >>> with kmp.enable():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> y = np.full((8, 1), 1e4)  # at the loss scale 2^15, gradients exceed 65504
    >>> history = model.fit(np.ones((8, 4)), y, verbose=0, callbacks=[kmp.callbacks.OverflowCounter()])
    >>> history.history["overflow_count"], history.history["nonfinite_loss_count"]
    ([1], [0])
    """

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._at_epoch_begin = self._last_snapshot

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_end(epoch, logs)
        newest = self._last_snapshot
        steps = newest.step - self._at_epoch_begin.step
        if logs is not None and steps:
            logs["overflow_rate"] = (newest.overflow_count - self._at_epoch_begin.overflow_count) / steps
            logs["nonfinite_loss_count"] = newest.nonfinite_loss_count
            logs["overflow_origin"] = self._index_of(newest.overflow_origin)

    def _index_of(self, path: str | None) -> int:
        paths = self.optimizer.paths
        return paths.index(path) if path in paths else -1

    def _record_of(self, snapshot: Snapshot) -> dict[str, Any] | None:
        last = self._last_snapshot
        skipped, steps = snapshot.overflow_count - last.overflow_count, snapshot.step - last.step
        self._logged_values = {"overflow_count": snapshot.overflow_count, "overflow_rate": skipped / steps}
        details = {
            "nonfinite_loss_count": snapshot.nonfinite_loss_count,
            "overflows_in_a_row": snapshot.overflows_in_a_row,
            "nonfinite_losses_in_a_row": snapshot.nonfinite_losses_in_a_row,
            "overflows_by_variable": snapshot.overflows_by_variable,
            "overflow_origins_by_variable": snapshot.overflow_origins_by_variable,
        }
        nonfinite_losses = snapshot.nonfinite_loss_count - last.nonfinite_loss_count
        if skipped > nonfinite_losses:
            details["overflow_origin"] = snapshot.overflow_origin
        if nonfinite_losses and snapshot.nonfinite_activation:
            details["nonfinite_activation"] = snapshot.nonfinite_activation
        details |= {"last_loss": snapshot.last_loss, "highest_loss": snapshot.highest_loss}
        return {"step": snapshot.step} | self._logged_values | details
