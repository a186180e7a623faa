"""Callbacks for `fit`: what the loss scaler does, in `logs`, files and TensorBoard; stuck runs; resuming killed ones.

Those that read compute nothing: the compiled step counts on the device, and a reading copies a few numbers to the host.
List them before callbacks that use their keys, such as `CSVLogger`; `History` and the progress bar always come after.

With a `log_dir`, readings go to `kmp.jsonl` there (see `kmp.records`) and to TensorBoard event files.
"""

import textwrap
from typing import Any

import keras

from kmp import _arguments, _replicas, _warnings
from kmp._backup import BackupAndRestore as BackupAndRestore
from kmp._backup import save_whole
from kmp._reader import Logs, PathLike, Reader
from kmp._stuck import StuckError as StuckError
from kmp._stuck import describe, is_at_lowest
from kmp.optimizer import LossScaleOptimizer
from kmp.records import Snapshot
from kmp.scaling import FixedScale


class LossScaleLogger(Reader):
    """Logs the loss scale, as `loss_scale` in `logs`.

    Args:
        log_dir: Folder for `kmp.jsonl` and TensorBoard's files, or `None` to write no file.
        every_n_steps: Integer, at least 1: how often to read, by the optimizer's step counter.
        optimizer: The `kmp.LossScaleOptimizer` to read, for a model that holds several; its own by default.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If `every_n_steps` is below 1; in `on_train_begin`, if the optimizer is not kmp's.
        OSError: In `on_train_begin`, if `log_dir` cannot be written.
    """

    def _row(self, snapshot: Snapshot) -> dict[str, Any] | None:
        self._keys = {"loss_scale": snapshot.loss_scale}
        return {"step": snapshot.step, "loss_scale": snapshot.loss_scale, "clean_steps": snapshot.clean_steps}


class OverflowCounter(Reader):
    """Counts the steps that were skipped because the loss or a gradient was not finite.

    In `logs`: `overflow_count` (since training began) and `overflow_rate` (the share of the steps since the last
    reading; in an epoch's logs, of the epoch's steps). In an epoch's logs also `nonfinite_loss_count`: those whose loss
    was not finite before it was scaled, where no scale would have helped.

    Args:
        log_dir: Folder for `kmp.jsonl` and TensorBoard's files, or `None` to write no file.
        every_n_steps: Integer, at least 1: how often to read, by the optimizer's step counter.
        optimizer: The `kmp.LossScaleOptimizer` to read, for a model that holds several; its own by default.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If `every_n_steps` is below 1; in `on_train_begin`, if the optimizer is not kmp's.
        OSError: In `on_train_begin`, if `log_dir` cannot be written.
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

    def _row(self, snapshot: Snapshot) -> dict[str, Any] | None:
        new, steps = snapshot.overflow_count - self._last.overflow_count, snapshot.step - self._last.step
        self._keys = {"overflow_count": snapshot.overflow_count, "overflow_rate": new / steps}
        details = {
            "nonfinite_loss_count": snapshot.nonfinite_loss_count,
            "overflows_in_a_row": snapshot.overflows_in_a_row,
            "overflows_by_variable": snapshot.overflows_by_variable,
        }
        if new:
            details["culprit"] = snapshot.culprit
        details["last_loss"] = snapshot.last_loss
        return {"step": snapshot.step} | self._keys | details


class GradientHistogram(Reader):
    """Counts gradient elements by binary exponent, in the compiled step, at a cadence.

    In `logs`: `grad_zeros`, the share of elements that are exactly zero: an upper bound on what float16 flushed. The
    histograms are in `run.histograms`, in the log and in TensorBoard; `kmp.plots.gradient_exponents` draws them.

    Args:
        log_dir: Folder for `kmp.jsonl` and TensorBoard's files, or `None` to write no file.
        every_n_steps: Integer, at least 1: sampled are the first step of a `fit`, each step that this divides, and the
            first step of an epoch that would have no sample.
        optimizer: The `kmp.LossScaleOptimizer` to read, for a model that holds several; its own by default.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If `every_n_steps` is below 1; in `on_train_begin`, if the optimizer is not kmp's.
        OSError: In `on_train_begin`, if `log_dir` cannot be written.
    """

    def _prepare(self, optimizer: LossScaleOptimizer) -> bool:
        is_new = optimizer.prepare_sampling()
        return super()._prepare(optimizer) or is_new

    def _start(self) -> None:
        super()._start()
        self._sampled = self._last.histogram.step if self._last.histogram else 0
        self.optimizer.start_sampling(self, self.every_n_steps)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_begin(epoch, logs)
        at_end = self._last.step + self._steps_in_epoch
        if at_end // self.every_n_steps == self._last.step // self.every_n_steps:
            self.optimizer.start_sampling(self, self.every_n_steps)  # or the epoch would have no sample

    def _stop(self) -> None:
        self.optimizer.stop_sampling(self)
        super()._stop()

    def _row(self, snapshot: Snapshot) -> dict[str, Any] | None:
        histogram = snapshot.histogram
        if histogram is None or histogram.step == self._sampled:
            return None
        self._sampled = histogram.step
        self._keys = {"grad_zeros": histogram.zero_fraction}
        return {"step": histogram.step, "histogram": histogram.to_dict()} | self._keys


class StuckDetector(Reader):
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
    """

    def __init__(
        self,
        patience: int = 100,
        on_stuck: str = "raise",
        checkpoint: PathLike | None = None,
        optimizer: LossScaleOptimizer | None = None,
    ) -> None:
        super().__init__(None, _arguments.positive_integer("patience", patience), optimizer)
        self.on_stuck = _arguments.one_of("on_stuck", on_stuck, ("raise", "warn", "ignore"))
        self.checkpoint = None if checkpoint is None else _arguments.model_path("checkpoint", checkpoint)
        self._streak_told: int | None = None

    @property
    def patience(self) -> int:
        """Skipped steps in a row that count as stuck."""
        return self.every_n_steps

    def _next_due(self, snapshot: Snapshot) -> int:
        """Returns the first step that training can be stuck at, so that no reading is made for nothing."""
        to_lowest = self.optimizer.rule.steps_to_its_end(snapshot.loss_scale)
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
        if self.on_stuck == "raise":
            raise StuckError(message)
        if self.on_stuck == "warn":
            _warnings.warn(message)

    def _save(self) -> str:
        """Saves the model where asked; returns a sentence on where its weights are."""
        intact = "The weights are those from before the skipped steps"
        if self.checkpoint is None:
            return f"{intact}."
        if not _replicas.is_chief(self.model.distribute_strategy):
            return f"{intact}, saved by the chief."
        try:
            save_whole(self.model, self.checkpoint)
        except Exception as error:  # Keras raises what it likes; none of it may hide why training is stuck
            reason = textwrap.shorten(str(error), 200, placeholder=" ...")
            return f"{intact}; saving them to {str(self.checkpoint)!r} failed: {reason}"
        return f"{intact}, saved to {str(self.checkpoint)!r}."


def defaults(
    log_dir: PathLike | None = None,
    every_n_steps: int = 100,
    *,
    on_stuck: str = "raise",
    checkpoint: PathLike | None = None,
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that a run should have.

    Those are `LossScaleLogger`, `OverflowCounter` and `GradientHistogram`, which share one `run`, a `kmp.records.Run`
    that holds what all of them read; and `StuckDetector`.

    Args:
        log_dir: Folder for `kmp.jsonl` and TensorBoard's files, or `None` to write no file.
        every_n_steps: Integer, at least 1: how often to read and sample, by the optimizer's step counter.
        on_stuck: As in `StuckDetector`: `"raise"`, `"warn"` or `"ignore"`.
        checkpoint: As in `StuckDetector`: where to save the model if it is stuck.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is outside its range.

    Example:
    >>> [type(callback).__name__ for callback in defaults(every_n_steps=50)]
    ['LossScaleLogger', 'OverflowCounter', 'GradientHistogram', 'StuckDetector']
    """
    readers = [kind(log_dir, every_n_steps) for kind in (LossScaleLogger, OverflowCounter, GradientHistogram)]
    for reader in readers:
        reader.run = readers[0].run
    return [*readers, StuckDetector(on_stuck=on_stuck, checkpoint=checkpoint)]
