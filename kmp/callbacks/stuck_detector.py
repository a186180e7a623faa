"""The callback that stops a training in which every step is skipped."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from kmp.advice import advise
from kmp.callbacks.float32_fallback import Float32Fallback
from kmp.callbacks.monitor import Monitor
from kmp.callbacks.optimizer_reader import OptimizerReader
from kmp.callbacks.report_callback import Report
from kmp.callbacks.training_records import PARTS, header, record_of
from kmp.optimizer import LossScaleOptimizer
from kmp.records import Run, Snapshot
from kmp.utils import user_messages, validation


class StuckError(RuntimeError):
    """Raised by `kmp.callbacks.StuckDetector` if float16 training makes no progress. The message names the cause.

    The model keeps the weights from before the skipped steps: catch the error to save it.

    Example:
    >>> try:
    ...     raise StuckError("Training is stuck: ...")  # as `fit` does
    ... except StuckError as error:
    ...     print("save the model, and continue in bfloat16:", error)
    save the model, and continue in bfloat16: Training is stuck: ...
    """


class StuckDetector(OptimizerReader):
    """Stops training, with the cause, if the optimizer keeps skipping steps.

    Training is stuck after `patience` consecutive skipped steps, or if a step overflows while the
    loss scale is already at `min_scale`. With `steps_per_execution`, both are checked at the end of
    each execution. The message names the cause, the loss, the loss scale, the origin of the
    overflow and what to try. The model keeps the weights from before the skipped steps. Adds
    nothing to `logs`.

    Does nothing for a model that needs no loss scale and is compiled without
    `kmp.LossScaleOptimizer`.

    Args:
        patience: Integer, at least 1: consecutive skipped steps.
        on_stuck: `"raise"` a `kmp.callbacks.StuckError`, `"warn"` once for each streak of skipped
            steps, or `"ignore"`.
        optimizer: The `kmp.LossScaleOptimizer` to read, for a model with several. Defaults to the
            model's.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is outside its range; in `on_train_begin`, if a float16 model has
            no `kmp.LossScaleOptimizer`.
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
        optimizer: LossScaleOptimizer | None = None,
    ) -> None:
        super().__init__(optimizer)
        self.patience = validation.positive_integer("patience", patience)
        self.on_stuck = validation.one_of("on_stuck", on_stuck, ("raise", "warn", "ignore"))
        self._others: Sequence[keras.callbacks.Callback] = ()

    def explain_with(self, others: Sequence[keras.callbacks.Callback]) -> None:
        """Takes the cause from the records of a monitor of the same `fit`, and completes files before the error.

        There is no error if a fallback among them repairs the training. After the error, `fit`
        calls no callback.
        """
        self._others = others

    def _start(self) -> None:
        self._first = self._snapshot = self.optimizer.snapshot()
        self._batches_left = 1
        self._reported_streak_start: int | None = None

    def read(self) -> None:
        """Reads the optimizer now, reports a stuck training, and sets when it can be stuck at the earliest."""
        counts = self.optimizer.counters.read_counts()
        if (
            counts.overflow_count != self._snapshot.overflow_count
        ):  # copy more only if a step was skipped
            before, self._snapshot = self._snapshot, self.optimizer.snapshot()
            self._report_if_stuck(self._snapshot, before)
        scale = float(self.optimizer.dynamic_scale.numpy())
        to_patience = self.patience - min(
            counts.overflows_in_a_row, counts.step - self._repaired_at
        )
        self._batches_left = max(
            1, int(min(to_patience, self.optimizer.rule.steps_to_min_scale(scale)))
        )

    def _report_if_stuck(self, now: Snapshot, before: Snapshot) -> None:
        # A repair begins a new streak.
        now = replace(
            now, overflows_in_a_row=min(now.overflows_in_a_row, now.step - self._repaired_at)
        )
        skipped, streak_start = now.overflows_in_a_row, now.step - now.overflows_in_a_row
        is_at_min_scale = now.overflows_at_min_scale > before.overflows_at_min_scale
        is_at_min_scale = is_at_min_scale and self._repaired_at <= before.step
        if (
            not (skipped >= self.patience or is_at_min_scale)
            or streak_start == self._reported_streak_start
        ):
            return
        monitor, fallback, report = map(self._attached, (Monitor, Float32Fallback, Report))
        if monitor:
            monitor.replay_stuck()
            if fallback and fallback.repair():
                return
            run = monitor.run
        else:
            run = Run(
                [record_of(now, self._first, PARTS)],
                header(self.model, self.optimizer, has_trained=True),
            )
        self._reported_streak_start = streak_start if skipped else None
        finding = next(iter(advise(run).problems), None)
        if monitor:
            if report:
                report.write()
            monitor.write_verdict()
        cause = finding or _counts_alone(now)
        message = f"{_state_of(now, is_at_min_scale)}\nCause: {cause}"
        if skipped:  # else a step since the last check has changed them
            message += f"\n{_weights_of(self.model)}"
        if self.on_stuck == "raise":
            raise StuckError(message)
        if self.on_stuck == "warn":
            user_messages.warn(message)

    def _attached(self, kind: type[keras.callbacks.Callback]) -> Any:
        """Returns the other callback of this class, if it is attached to this model: it may be left out of `fit`."""
        return next(
            (each for each in self._others if isinstance(each, kind) and each.model is self.model),
            None,
        )

    @property
    def _repaired_at(self) -> int:
        return getattr(self._attached(Float32Fallback), "repaired_at", 0)


def _state_of(now: Snapshot, is_at_min_scale: bool) -> str:
    count = now.overflows_in_a_row
    streak = {0: "a step since the last check was skipped", 1: "the last step was skipped"}
    skipped = streak.get(count, f"the last {count} steps were skipped")
    at_lowest = " with the loss scale at its lowest value" if is_at_min_scale else ""
    loss = "" if now.last_loss is None else f"Last loss: {now.last_loss:g}. "
    return (
        f"Training is stuck: at step {now.step} {skipped}{at_lowest}. {loss}Loss scale:"
        f" {now.loss_scale:g}."
    )


def _counts_alone(now: Snapshot) -> str:
    if now.nonfinite_losses_in_a_row:
        cause = "the loss was NaN or Inf before it was scaled, so no loss scale helps"
    else:
        cause = (
            "gradients overflow, and the overflow starts nearest to the loss at"
            f" {now.overflow_origin}"
        )
    return (
        f"{cause}. kmp.callbacks.defaults() replays such a batch, and names the layer. Where the"
        " loss scale was still falling, a higher patience or a lower initial_scale lets it fall."
    )


def _weights_of(model: keras.Model) -> str:
    weights = model.trainable_variables
    is_finite = (np.isfinite(keras.ops.convert_to_numpy(weight)).all() for weight in weights)
    paths = [weight.path for weight, finite in zip(weights, is_finite, strict=True) if not finite]
    but = f", and {paths[0]} contains NaN or Inf" if paths else ""
    return f"The weights are those from before the skipped steps{but}."
