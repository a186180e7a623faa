"""The callback that ends a training which cannot get on."""

from collections.abc import Callable
from dataclasses import replace

from kmp.backend import distribution
from kmp.callbacks.model_saving import save_atomically
from kmp.callbacks.optimizer_callback import Logs, OptimizerCallback, PathLike
from kmp.callbacks.stuck_message import StuckError, describe, is_at_lowest
from kmp.optimizer import LossScaleOptimizer
from kmp.records import Snapshot
from kmp.scaling import FixedScale
from kmp.utils import user_messages, validation


class StuckDetector(OptimizerCallback):
    """Tells when float16 cannot work for a model, and why, in place of skipping every step for good.

    Training counts as stuck after `patience` skipped steps in a row, and at an overflow while the scale is already at
    `min_scale`; with `steps_per_execution`, as seen at the end of each execution. The message names the cause, the
    loss, the scale, the variable to blame and what to try. The weights are those from before the streak.

    Args:
        patience: Integer, at least 1: skipped steps in a row.
        on_stuck: `"raise"` a `kmp.callbacks.StuckError`, `"warn"` once for each streak, or `"ignore"` it.
        checkpoint: A path that ends in `.keras` or `.weights.h5`, to save the model to when it is stuck; or `None`.
        optimizer: The `kmp.LossScaleOptimizer` to read, for a model that holds several; its own by default.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is outside its range; in `on_train_begin`, if the optimizer is not kmp's.
        StuckError: In training, if it is stuck.

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
        self._streak_told: int | None = None
        self.before_stuck: Callable[[], None] = lambda: None

    @property
    def patience(self) -> int:
        """Skipped steps in a row that count as stuck."""
        return self.every_n_steps

    def _look(self) -> Snapshot:
        """Reads all of the optimizer only where a step was skipped since the last time: training is not stuck else."""
        counters = self.optimizer.counters
        if not self.optimizer.built or int(counters.overflows.numpy()) != self._last.overflow_count:
            return super()._look()
        return replace(
            self._last,
            step=counters.read_steps(),
            overflows_in_a_row=0,
            loss_scale=float(self.optimizer.dynamic_scale.numpy()),
        )

    def _next_due(self, snapshot: Snapshot) -> int:
        """Returns the first step that training can be stuck at, so that no reading is made for nothing."""
        to_lowest = self.optimizer.rule.steps_to_min_scale(snapshot.loss_scale)
        return snapshot.step + max(1, int(min(self.patience - snapshot.overflows_in_a_row, to_lowest)))

    def on_train_begin(self, logs: Logs = None) -> None:
        self._streak_told = None
        super().on_train_begin(logs)

    def _row(self, snapshot: Snapshot) -> None:
        skipped, streak = snapshot.overflows_in_a_row, snapshot.step - snapshot.overflows_in_a_row
        is_stuck = skipped >= self.patience or is_at_lowest(snapshot, self._last)
        if not is_stuck or streak == self._streak_told:
            return
        self._streak_told = streak if skipped else None
        is_fixed = isinstance(self.optimizer.rule, FixedScale)
        message = describe(snapshot, self._last, is_fixed, self._save())
        self.before_stuck()
        if self.on_stuck == "raise":
            raise StuckError(message)
        if self.on_stuck == "warn":
            user_messages.warn(message)

    def _save(self) -> str:
        """Saves the model where asked; returns a sentence on where its weights are."""
        intact = "The weights are those from before the skipped steps"
        if self.checkpoint is None:
            return f"{intact}."
        if not distribution.is_chief(self.model.distribute_strategy):
            return f"{intact}, saved by the chief."
        try:
            save_atomically(self.model, self.checkpoint)
        except Exception as error:  # Keras raises what it likes; none of it may hide why training is stuck
            return f"{intact}; saving them to {str(self.checkpoint)!r} failed: {user_messages.in_short(error)}"
        return f"{intact}, saved to {str(self.checkpoint)!r}."
