"""The callback that logs the loss scale."""

from kmp.callbacks.monitor import Monitor, PathLike
from kmp.callbacks.training_records import LOSS_SCALE
from kmp.optimizer import LossScaleOptimizer


class LossScaleLogger(Monitor):
    """Logs the loss scale, as `loss_scale` in `logs`: what `Monitor` records, without overflows and gradients.

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

    parts = (LOSS_SCALE,)

    def __init__(
        self, log_dir: PathLike | None = None, every_n_steps: int = 250, optimizer: LossScaleOptimizer | None = None
    ) -> None:
        super().__init__(log_dir, every_n_steps, optimizer)
