"""The callbacks that log the loss scale and what it did."""

from typing import Any

from kmp.callbacks.optimizer_callback import OptimizerCallback
from kmp.records import Snapshot


class LossScaleLogger(OptimizerCallback):
    """Logs the loss scale, as `loss_scale` in `logs`.

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
    >>> with kmp.enable(initial_scale=1024.0):
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0, callbacks=[kmp.callbacks.LossScaleLogger()])
    >>> history.history["loss_scale"]
    [1024.0]
    """

    def _row(self, snapshot: Snapshot) -> dict[str, Any] | None:
        self._keys = {"loss_scale": snapshot.loss_scale}
        return {"step": snapshot.step, "loss_scale": snapshot.loss_scale, "clean_steps": snapshot.clean_steps}
