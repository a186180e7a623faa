"""The callback that stops a training in which every step is skipped."""

from typing import Any

import keras
import numpy as np

from kmp.advice import advise
from kmp.callbacks.model_saving import is_chief, save_atomically
from kmp.callbacks.monitor import Logs, Monitor, PathLike
from kmp.callbacks.optimizer_lookup import has_optimizer, optimizer_argument
from kmp.callbacks.report_callback import Report
from kmp.callbacks.stuck_message import StuckError, format_message, is_at_min_scale
from kmp.optimizer import LossScaleOptimizer
from kmp.policy import guarding
from kmp.records import Snapshot
from kmp.scaling import FixedScale
from kmp.utils import user_messages, validation


class StuckDetector(keras.callbacks.Callback):
    """Stops training, with the cause, if the optimizer keeps skipping steps.

    Training is stuck after `patience` consecutive skipped steps, or if a step overflows while the loss scale is
    already at `min_scale`. With `steps_per_execution`, both are checked at the end of each execution. The message names
    the cause, the loss, the loss scale, the origin of the overflow and what to try. The model keeps the weights from
    before the skipped steps. Adds nothing to `logs`.

    Does nothing for a model that needs no loss scale and is compiled without `kmp.LossScaleOptimizer`.

    Args:
        patience: Integer, at least 1: consecutive skipped steps.
        on_stuck: `"raise"` a `kmp.callbacks.StuckError`, `"warn"` once for each streak of skipped steps, or `"ignore"`.
        checkpoint: A path that ends in `.keras` or `.weights.h5`, to save the model to if it is stuck; or `None`.
        optimizer: The `kmp.LossScaleOptimizer` to read, for a model with several. Defaults to the model's.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is outside its range; in `on_train_begin`, if a float16 model has no
            `kmp.LossScaleOptimizer`.
        StuckError: During training, if it is stuck.

    Example:
    >>> import keras, kmp, numpy as np
    >>> with kmp.enable():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> x, detector = np.full((80, 4), np.nan), kmp.callbacks.StuckDetector(patience=10)
    >>> try:
    ...     _ = model.fit(x, np.ones((80, 1)), batch_size=8, verbose=0, callbacks=[detector])
    ... except kmp.callbacks.StuckError as error:
    ...     print(str(error).splitlines()[0])
    Training is stuck: at step 10 the last 10 steps were skipped. Last loss: nan. Loss scale: 32768.
    """

    def __init__(
        self,
        patience: int = 100,
        on_stuck: str = "raise",
        checkpoint: PathLike | None = None,
        optimizer: LossScaleOptimizer | None = None,
    ) -> None:
        super().__init__()
        self.patience = validation.positive_integer("patience", patience)
        self.on_stuck = validation.one_of("on_stuck", on_stuck, ("raise", "warn", "ignore"))
        self.checkpoint = None if checkpoint is None else validation.model_path("checkpoint", checkpoint)
        self._optimizer = optimizer_argument(optimizer)
        self._monitor: Monitor | None = None
        self._reports: list[Report] = []
        self._is_active = False

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy has: the settings, without the model, which `fit` sets."""
        return vars(self) | {"_model": None}

    def explain_with(self, monitor: Monitor, reports: list[Report]) -> None:
        """Takes the cause from the records of a monitor of the same `fit`, and completes its files before the error.

        After the error, `fit` calls no callback.
        """
        self._monitor, self._reports = monitor, reports

    @property
    def optimizer(self) -> LossScaleOptimizer:
        """The optimizer to read: the one passed to the constructor, or else the model's."""
        return self._optimizer or self.model.optimizer

    def on_train_begin(self, logs: Logs = None) -> None:
        self._is_active = has_optimizer(self.model, self.optimizer, type(self).__name__)
        if self._is_active:
            if self.optimizer is self.model.optimizer and guarding.install(self.model):
                self.model.make_train_function(force=True)
            self._start()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        if self._is_active and not self._has_trained:
            self._start()  # again: a later callback's `on_train_begin` may have loaded the optimizer

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self._is_active:
            self._has_trained = True
            self._batches_left -= self.model.steps_per_execution
            if self._batches_left <= 0:
                self._check()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if self._is_active:
            self._check()

    def _start(self) -> None:
        self._snapshot = self.optimizer.snapshot()
        self._has_trained = False
        self._batches_left = 1
        self._reported_streak_start: int | None = None

    def _check(self) -> None:
        """Reports a stuck training, and sets when it can be stuck at the earliest. Each batch counts as one step."""
        counts = self.optimizer.counters.read_counts()
        if counts.overflows != self._snapshot.overflow_count:  # copy more only if a step was skipped
            before, self._snapshot = self._snapshot, self.optimizer.snapshot()
            self._report_if_stuck(self._snapshot, before)
        if self.optimizer.built:
            scale = float(self.optimizer.dynamic_scale.numpy())
            to_patience = self.patience - counts.overflows_in_a_row
            self._batches_left = max(1, int(min(to_patience, self.optimizer.rule.steps_to_min_scale(scale))))

    def _report_if_stuck(self, now: Snapshot, before: Snapshot) -> None:
        skipped, streak_start = now.overflows_in_a_row, now.step - now.overflows_in_a_row
        is_stuck = skipped >= self.patience or is_at_min_scale(now, before)
        if not is_stuck or streak_start == self._reported_streak_start:
            return
        self._reported_streak_start = streak_start if skipped else None
        finding = None
        if self._monitor:
            self._monitor.read()
            finding = next(iter(advise(self._monitor.run).problems), None)
            for report in self._reports:
                report.write()
            self._monitor.write_verdict()
        is_fixed = isinstance(self.optimizer.rule, FixedScale)
        message = format_message(now, before, is_fixed, self._save_checkpoint(), finding)
        if self.on_stuck == "raise":
            raise StuckError(message)
        if self.on_stuck == "warn":
            user_messages.warn(message)

    def _save_checkpoint(self) -> str:
        """Saves the model to `checkpoint`, if given. Returns a sentence about the model's weights."""
        intact = "The weights are those from before the skipped steps"
        weights = self.model.trainable_variables
        nonfinite = next(
            (weight.path for weight in weights if not np.isfinite(keras.ops.convert_to_numpy(weight)).all()), None
        )
        if nonfinite:
            intact += f", and {nonfinite} contains NaN or Inf"
        if self.checkpoint is None:
            return f"{intact}."
        if not is_chief(self.model.distribute_strategy):
            return f"{intact}, saved by the chief."
        try:
            save_atomically(self.model, self.checkpoint)
        except Exception as error:  # Keras raises many classes; none may hide why training is stuck
            return f"{intact}; saving them to {str(self.checkpoint)!r} failed: {user_messages.one_line(error)}"
        return f"{intact}, saved to {str(self.checkpoint)!r}."
