"""The base class of the callbacks that read an optimizer: when they read."""

import abc
import os
from pathlib import Path
from typing import Any

import keras

from kmp.callbacks.optimizer_monitor import OptimizerMonitor
from kmp.optimizer import LossScaleOptimizer
from kmp.policy import skipped_step_rollback
from kmp.records import Run, Snapshot
from kmp.utils import user_messages, validation

PathLike = str | os.PathLike[str]
Logs = dict[str, Any] | None


class OptimizerCallback(keras.callbacks.Callback, abc.ABC):
    """Reads the optimizer at its first step, at steps that `every_n_steps` divides, and at each epoch's end."""

    def __init__(
        self,
        log_dir: PathLike | None = None,
        every_n_steps: int = 250,
        optimizer: LossScaleOptimizer | None = None,
    ) -> None:
        super().__init__()
        if optimizer is not None and not isinstance(optimizer, LossScaleOptimizer):
            raise TypeError(f"`optimizer` must be a kmp.LossScaleOptimizer or None. Received: optimizer={optimizer!r}")
        folder = None if log_dir is None else validation.local_path("log_dir", log_dir)
        self.every_n_steps = validation.positive_integer("every_n_steps", every_n_steps)
        self.monitor = OptimizerMonitor(folder, optimizer)

    @property
    def run(self) -> Run:
        """What was recorded, a `kmp.records.Run`."""
        return self.monitor.run

    @property
    def log_dir(self) -> Path | None:
        """Where the log is written."""
        return self.monitor.log_dir

    @property
    def optimizer(self) -> LossScaleOptimizer:
        """The optimizer that is read: the one given, else the model's own.

        Raises:
            ValueError: If it is not kmp's.
        """
        return self.monitor.optimizer_of(self.model, type(self).__name__)

    def on_train_begin(self, logs: Logs = None) -> None:
        optimizer = self.optimizer
        self._stop()
        self.monitor.prepare(self.model, optimizer)
        if self._prepare(optimizer):
            self.model.make_train_function(force=True)
        self._start()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        if not self._has_trained:
            self._start()  # again: a callback listed later may have restored the optimizer
            self.run.forget_after(self._first_step)
            self._open_log()
        self._batches_of_epoch = 0

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._has_trained = True
        self._count_batches(batch)
        if self._last.step + self._steps_per_batch * self._batches_since >= self._due:
            self.read()
        if logs is not None:
            logs.update(self._keys)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.read(is_epoch_end=True)
        if logs is not None:
            skipped_step_rollback.fix_epoch_loss(self.model, logs)
            logs.update(self._keys)

    def on_train_end(self, logs: Logs = None) -> None:
        if self._has_trained and self._last.step == self._first_step:
            user_messages.warn(_UNUSED.format(callback=type(self).__name__))
        self._stop()

    def _prepare(self, optimizer: LossScaleOptimizer) -> bool:
        """Arranges what the compiled step must be able to do; returns whether it has to be traced anew."""
        return optimizer is self.model.optimizer and skipped_step_rollback.install(self.model)

    def _start(self) -> None:
        self._last = self.monitor.start(self.optimizer)
        self._first_step = self._last.step
        self._due = self._first_step + 1
        # Between readings nothing is copied from the device: the step is reckoned from batches, at the rate last seen.
        self._steps_per_batch = 1.0
        self._batches_since = self._batches_of_epoch = 0
        self._keys: dict[str, float] = {}
        self._has_trained = False

    def _stop(self) -> None:
        self.monitor.close()

    def _open_log(self) -> None:
        self.monitor.open(self.model, self.optimizer, self._first_step)

    @property
    def _steps_in_epoch(self) -> int:
        """Batches in an epoch, 0 while Keras does not know."""
        return (self.params or {}).get("steps") or 0

    def _count_batches(self, batch: int) -> None:
        # With steps_per_execution the index of an epoch's last call may lie beyond its last batch.
        done = min(batch + 1, self._steps_in_epoch or batch + 1)
        self._batches_since += done - self._batches_of_epoch
        self._batches_of_epoch = done

    def read(self, is_epoch_end: bool = False) -> None:
        """Reads the optimizer now, and records what is new.

        Args:
            is_epoch_end: Whether more steps may have been taken than the batches since the last reading tell.
        """
        snapshot = self._look()
        steps = snapshot.step - self._last.step
        if not is_epoch_end:
            self._steps_per_batch = steps / self._batches_since if steps else self._steps_per_batch / 2
        if steps:
            self._record(snapshot)
            self._last, self._batches_since = snapshot, 0
            self._due = self._next_due(snapshot)

    def _look(self) -> Snapshot:
        return self.monitor.snapshot(self.optimizer)

    def _next_due(self, snapshot: Snapshot) -> int:
        """Returns the step to read next."""
        return (snapshot.step // self.every_n_steps + 1) * self.every_n_steps

    def _record(self, snapshot: Snapshot) -> None:
        row = self._row(snapshot)
        if row:
            self._append(row)

    def _append(self, row: dict[str, Any]) -> None:
        self._open_log()
        self.monitor.record(row)

    @abc.abstractmethod
    def _row(self, snapshot: Snapshot) -> dict[str, Any] | None:
        """Sets `self._keys` from the reading and returns what to record of it, or `None` for nothing."""


_UNUSED = (
    "{callback}: the optimizer it reads took no step. A model that trains with optimizers of its own has to have them "
    "wrapped with kmp.wrap, and the callback has to be told which one to read: {callback}(optimizer=...)."
)
