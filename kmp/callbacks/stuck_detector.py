"""The callback that stops a training in which every step is skipped."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import keras
import numpy as np

from kmp.advice import advise
from kmp.callbacks.model_saving import is_chief, save_atomically
from kmp.callbacks.optimizer_callback import OptimizerCallback, PathLike
from kmp.callbacks.stuck_message import StuckError, format_message, is_at_min_scale
from kmp.optimizer import LossScaleOptimizer
from kmp.records import Snapshot
from kmp.scaling import FixedScale
from kmp.utils import user_messages, validation


class StuckDetector(OptimizerCallback):
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
        super().__init__(None, validation.positive_integer("patience", patience), optimizer)
        self.on_stuck = validation.one_of("on_stuck", on_stuck, ("raise", "warn", "ignore"))
        self.checkpoint = None if checkpoint is None else validation.model_path("checkpoint", checkpoint)
        self._reported_streak_start: int | None = None
        self.before_stuck: Sequence[Callable[[], None]] = ()

    @property
    def patience(self) -> int:
        """Consecutive skipped steps after which training is stuck."""
        return self.every_n_steps

    def _read_snapshot(self) -> Snapshot:
        """Returns a full snapshot only if a step was skipped since the last one: otherwise training is not stuck."""
        counts = self.optimizer.counters.read_counts()
        if not self.optimizer.built or counts.overflows != self._last_snapshot.overflow_count:
            return super()._read_snapshot()
        return replace(
            self._last_snapshot,
            step=counts.steps,
            overflows_in_a_row=0,
            loss_scale=float(self.optimizer.dynamic_scale.numpy()),
        )

    def _next_step_to_read(self, snapshot: Snapshot) -> int:
        """Returns the first step at which training can be stuck."""
        to_min_scale = self.optimizer.rule.steps_to_min_scale(snapshot.loss_scale)
        return snapshot.step + max(1, int(min(self.patience - snapshot.overflows_in_a_row, to_min_scale)))

    def _begin_training(self) -> None:
        super()._begin_training()
        self._reported_streak_start = None

    def _record_of(self, snapshot: Snapshot) -> None:
        skipped, streak_start = snapshot.overflows_in_a_row, snapshot.step - snapshot.overflows_in_a_row
        is_stuck = skipped >= self.patience or is_at_min_scale(snapshot, self._last_snapshot)
        if not is_stuck or streak_start == self._reported_streak_start:
            return
        self._reported_streak_start = streak_start if skipped else None
        is_fixed = isinstance(self.optimizer.rule, FixedScale)
        for function in self.before_stuck:
            function()
        finding = next(iter(advise(self.run).problems), None)
        message = format_message(snapshot, self._last_snapshot, is_fixed, self._save_checkpoint(), finding)
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
