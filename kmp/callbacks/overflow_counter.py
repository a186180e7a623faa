"""The callback that counts overflows."""

from typing import Any

from kmp.callbacks.optimizer_callback import Logs, OptimizerCallback
from kmp.records import Snapshot


class OverflowCounter(OptimizerCallback):
    """Counts the steps that were skipped because the loss or a gradient was non-finite.

    In `logs`:

    - `overflow_count`: skipped steps since training began.

    `run` and the log also have, since the record before, `overflow_rate`, the fraction of steps that were skipped; and
    `nonfinite_loss_count`, the skipped steps since training began whose loss was non-finite before it was scaled. No
    loss scale prevents these.

    They have the path of the variable where the last overflow with a finite loss originated, and for each variable the
    number of steps in which it overflowed and in which the overflow originated there. Records have the numbers by
    variable when these have changed. After 0.5 MB of them, every second such record has them, after another 0.5 MB
    every fourth, and so on; the end of `fit` records the last ones.

    Does nothing for a model that needs no loss scale and is compiled without `kmp.LossScaleOptimizer`.

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

    def _begin_training(self) -> None:
        super()._begin_training()
        self._last_counts: dict[str, dict[str, int]] = {}
        self._not_recorded: dict[str, dict[str, int]] = {}

    def on_train_end(self, logs: Logs = None) -> None:
        if self._is_active and self._not_recorded:
            self._append_record({"step": self._last_snapshot.step} | self._not_recorded)
        super().on_train_end(logs)

    def _initial_values(self, snapshot: Snapshot) -> dict[str, float]:
        return {"overflow_count": snapshot.overflow_count}

    def _record_of(self, snapshot: Snapshot) -> dict[str, Any] | None:
        last = self._last_snapshot
        skipped, steps = snapshot.overflow_count - last.overflow_count, snapshot.step - last.step
        self._logged_values = {"overflow_count": snapshot.overflow_count}
        details: dict[str, Any] = {
            "overflow_rate": skipped / steps,
            "nonfinite_loss_count": snapshot.nonfinite_loss_count,
            "overflows_in_a_row": snapshot.overflows_in_a_row,
            "nonfinite_losses_in_a_row": snapshot.nonfinite_losses_in_a_row,
        } | self._changed_counts(snapshot)
        if snapshot.loss_dtype != last.loss_dtype:
            details["loss_dtype"] = snapshot.loss_dtype
        nonfinite_losses = snapshot.nonfinite_loss_count - last.nonfinite_loss_count
        if skipped > nonfinite_losses:
            details["overflow_origin"] = snapshot.overflow_origin
        details |= {"last_loss": snapshot.last_loss, "highest_loss": snapshot.highest_loss}
        return {"step": snapshot.step} | self._logged_values | details

    def _changed_counts(self, snapshot: Snapshot) -> dict[str, dict[str, int]]:
        """Returns the counts by variable if they have changed since the last record, and are to be recorded."""
        counts = {
            "overflows_by_variable": snapshot.overflows_by_variable,
            "overflow_origins_by_variable": snapshot.overflow_origins_by_variable,
        }
        if counts == self._last_counts:
            return {}
        self._last_counts = counts
        stores = self.monitor.overflow_counts.stores_next()
        self._not_recorded = {} if stores else counts
        return counts if stores else {}
