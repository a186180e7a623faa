"""The callback that logs the loss scale."""

from typing import Any

from kmp.callbacks.optimizer_callback import OptimizerCallback
from kmp.records import Snapshot


class LossScaleLogger(OptimizerCallback):
    """Logs the loss scale, as `loss_scale` in `logs`; 1 if the training loop does not scale its loss.

    Does nothing for a model that needs no loss scale and is compiled without `kmp.LossScaleOptimizer`.

    Args:
        log_dir: Folder for `kmp.jsonl` and TensorBoard's files, or `None` to write no file.
        every_n_steps: Integer, at least 1: how often to read the optimizer, in optimizer steps.
        optimizer: The `kmp.LossScaleOptimizer` to read, for a model with several. Defaults to the model's.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `every_n_steps` is below 1; in `on_train_begin`, if a float16 model has no
            `kmp.LossScaleOptimizer`.
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

    def _initial_values(self, snapshot: Snapshot) -> dict[str, float]:
        return {"loss_scale": snapshot.loss_scale}

    def _record_of(self, snapshot: Snapshot) -> dict[str, Any] | None:
        self._logged_values = {"loss_scale": snapshot.loss_scale}
        return {"step": snapshot.step} | self._logged_values | {"clean_steps": snapshot.clean_steps}
