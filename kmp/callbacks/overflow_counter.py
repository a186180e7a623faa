"""The callbacks that log the loss scale and what it did."""

from typing import Any

from kmp.callbacks.optimizer_callback import Logs, OptimizerCallback
from kmp.records import Snapshot


class OverflowCounter(OptimizerCallback):
    """Counts the steps that were skipped because the loss or a gradient was not finite.

    In `logs`: `overflow_count` (since training began) and `overflow_rate` (the share of the steps since the last
    reading; in an epoch's logs, of the epoch's steps). In an epoch's logs also `nonfinite_loss_count`: those whose loss
    was not finite before it was scaled, where no scale would have helped; and `overflow_origin`: where the variable to
    blame for the last overflow with a finite loss is in the optimizer's list, `model.trainable_variables`, or -1 before
    the first one. Its path, and how often each variable overflowed and was to blame, are in `run` and in the log: Keras
    averages what is in `logs`, and fails on strings.

    Args:
        log_dir: Folder for `kmp.jsonl` and TensorBoard's files, or `None` to write no file.
        every_n_steps: Integer, at least 1: how often to read, by the optimizer's step counter.
        optimizer: The `kmp.LossScaleOptimizer` to read, for a model that holds several; its own by default.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If `every_n_steps` is below 1; in `on_train_begin`, if the optimizer is not kmp's.
        OSError: In `on_train_begin`, if `log_dir` cannot be written.

    Example:
    >>> import keras, kmp, numpy as np
    >>> with kmp.enable():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> y = np.full((8, 1), 1e4)  # at the scale of 2^15, gradients beyond 65504
    >>> history = model.fit(np.ones((8, 4)), y, verbose=0, callbacks=[kmp.callbacks.OverflowCounter()])
    >>> history.history["overflow_count"], history.history["nonfinite_loss_count"]
    ([1], [0])
    """

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._at_epoch_begin = self._last

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_end(epoch, logs)
        steps = self._last.step - self._at_epoch_begin.step
        if logs is not None and steps:
            skipped = self._last.overflow_count - self._at_epoch_begin.overflow_count
            logs["overflow_rate"] = skipped / steps
            logs["nonfinite_loss_count"] = self._last.nonfinite_loss_count
            logs["overflow_origin"] = self._place_of(self._last.overflow_origin)

    def _place_of(self, overflow_origin: str | None) -> int:
        paths = self.optimizer.paths
        return paths.index(overflow_origin) if overflow_origin in paths else -1

    def _row(self, snapshot: Snapshot) -> dict[str, Any] | None:
        new, steps = snapshot.overflow_count - self._last.overflow_count, snapshot.step - self._last.step
        self._keys = {"overflow_count": snapshot.overflow_count, "overflow_rate": new / steps}
        details = {
            "nonfinite_loss_count": snapshot.nonfinite_loss_count,
            "overflows_in_a_row": snapshot.overflows_in_a_row,
            "nonfinite_losses_in_a_row": snapshot.nonfinite_losses_in_a_row,
            "overflows_by_variable": snapshot.overflows_by_variable,
            "overflow_origins_by_variable": snapshot.overflow_origins_by_variable,
        }
        nonfinite = snapshot.nonfinite_loss_count - self._last.nonfinite_loss_count
        if new > nonfinite:
            details["overflow_origin"] = snapshot.overflow_origin
        if nonfinite and snapshot.nonfinite_activation:
            details["nonfinite_activation"] = snapshot.nonfinite_activation
        details |= {"last_loss": snapshot.last_loss, "highest_loss": snapshot.highest_loss}
        return {"step": snapshot.step} | self._keys | details
