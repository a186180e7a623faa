"""The base class of the callbacks that read an optimizer every n steps."""

import abc
import math
import os
from itertools import islice
from pathlib import Path
from typing import Any

import keras
from filelock import FileLock

from kmp.callbacks.optimizer_monitor import OptimizerMonitor
from kmp.callbacks.run_header import to_number
from kmp.optimizer import LossScaleOptimizer
from kmp.policy import guarding
from kmp.records import HIGHEST_NUMBER, MOST_METRICS, RECORD_KEYS, Run, Snapshot
from kmp.utils import user_messages, validation

PathLike = str | os.PathLike[str]
Logs = dict[str, Any] | None


class OptimizerCallback(keras.callbacks.Callback, abc.ABC):
    """Reads the optimizer at its first step, at each multiple of `every_n_steps`, and at the end of each epoch.

    Does nothing in the training of a model that has no `kmp.LossScaleOptimizer` and needs none.
    """

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
        self._is_active = False
        self._folder_lock: FileLock | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy has: the settings and the records, without the model, which `fit` sets."""
        return vars(self) | {"_model": None, "_folder_lock": None}

    @property
    def run(self) -> Run:
        """The records so far, a `kmp.records.Run`."""
        return self.monitor.run

    @property
    def log_dir(self) -> Path | None:
        """The folder of the log."""
        return self.monitor.log_dir

    @property
    def optimizer(self) -> LossScaleOptimizer:
        """The optimizer to read: the one passed to the constructor, or else the model's."""
        return self.monitor.optimizer_of(self.model)

    def on_train_begin(self, logs: Logs = None) -> None:
        self.monitor.close()  # an interrupted training leaves the log open and its folder locked
        self._folder_lock = None
        self._is_active = self.monitor.has_optimizer(self.model, type(self).__name__)
        if self._is_active:
            self._prepare_training()
        else:
            self.monitor.clear()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        if self._is_active:
            self._begin_epoch()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self._is_active:
            self._end_batch(batch)
            if logs is not None:
                logs.update(self._logged_values)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if self._is_active:
            self.read(is_epoch_end=True)
            if logs is not None:
                guarding.fix_epoch_loss(self.model, logs)
                self._record_metrics(epoch, logs)
                logs.update(self._logged_values)

    def on_train_end(self, logs: Logs = None) -> None:
        if self._is_active:
            if self._has_trained and self._last_snapshot.step == self._start_step:
                user_messages.warn(_NO_STEP.format(callback=type(self).__name__))
            self._end_training()
            self._folder_lock = None

    def _prepare_training(self) -> None:
        optimizer = self.optimizer
        self._folder_lock = self.monitor.check(self.model)
        self._end_training()
        self.monitor.describe(self.model, optimizer)
        if self._prepare_train_step(optimizer):
            self.model.make_train_function(force=True)
        self._begin_training()

    def _begin_epoch(self) -> None:
        if not self._has_trained:
            self._begin_training()  # again: a later callback's `on_train_begin` may have loaded the optimizer
            self.monitor.drop_after(self._start_step)
            self._open_log()
        self._batches_of_epoch = 0

    def _end_batch(self, batch: int) -> None:
        self._has_trained = True
        self._count_batches(batch)
        if self._last_snapshot.step + self._steps_per_batch * self._batches_since_read >= self._next_read:
            self.read()

    def _record_metrics(self, epoch: int, logs: dict[str, Any]) -> None:
        """Records the epoch's metrics, unless a callback of the same run has."""
        if self.monitor.last_epoch == (epoch, self._last_snapshot.step):
            return
        self.monitor.last_epoch = epoch, self._last_snapshot.step
        values = {"learning_rate": getattr(self.optimizer.inner_optimizer, "learning_rate", None)} | logs
        numbers = {key: to_number(value) for key, value in values.items() if key not in RECORD_KEYS}
        known = ((key, value) for key, value in numbers.items() if value is not None)
        # A log has no larger numbers, and no more of them.
        metrics = {
            key: value if abs(value) <= HIGHEST_NUMBER else math.nan for key, value in islice(known, MOST_METRICS)
        }
        if metrics:
            self._append_record({"step": self._last_snapshot.step, "epoch": epoch, "metrics": metrics})

    def _prepare_train_step(self, optimizer: LossScaleOptimizer) -> bool:
        """Adds this callback's work to the train step. Returns whether the step must be traced again."""
        return optimizer is self.model.optimizer and guarding.install(self.model)

    def _begin_training(self) -> None:
        self._last_snapshot = self.monitor.start(self.optimizer)
        self._start_step = self._last_snapshot.step
        self._next_read = self._start_step + 1
        # Nothing is copied from the device between snapshots: the step is estimated from the number of batches and the
        # steps per batch between the last two snapshots.
        self._steps_per_batch = 1.0
        self._batches_since_read = self._batches_of_epoch = 0
        # `History` and `CSVLogger` take the keys of the first epoch, so all keys exist from the start.
        self._logged_values = self._initial_values(self._last_snapshot)
        self._has_trained = False

    def _end_training(self) -> None:
        self.monitor.close()

    def _open_log(self) -> None:
        self.monitor.open(self.model, self.optimizer, self._last_snapshot.step)

    @property
    def _batches_per_epoch(self) -> int:
        """Batches in an epoch, or 0 while Keras does not know the number."""
        return (self.params or {}).get("steps") or 0

    def _count_batches(self, batch: int) -> None:
        # With steps_per_execution, the index in the last call of an epoch can exceed the last batch.
        done = min(batch + 1, self._batches_per_epoch or batch + 1)
        self._batches_since_read += done - self._batches_of_epoch
        self._batches_of_epoch = done

    def read(self, is_epoch_end: bool = False) -> None:
        """Reads the optimizer now and records the new state.

        Args:
            is_epoch_end: Whether the optimizer may have taken steps that no counted batch accounts for.
        """
        snapshot = self._read_snapshot()
        steps = snapshot.step - self._last_snapshot.step
        if not is_epoch_end:
            self._steps_per_batch = steps / self._batches_since_read if steps else self._steps_per_batch / 2
        if steps:
            self._record_snapshot(snapshot)
            self._last_snapshot, self._batches_since_read = snapshot, 0
            self._next_read = self._next_step_to_read(snapshot)

    def _read_snapshot(self) -> Snapshot:
        return self.monitor.snapshot(self.optimizer)

    def _next_step_to_read(self, snapshot: Snapshot) -> int:
        return (snapshot.step // self.every_n_steps + 1) * self.every_n_steps

    def _record_snapshot(self, snapshot: Snapshot) -> None:
        record = self._record_of(snapshot)
        if record:
            self._append_record(record)

    def _append_record(self, record: dict[str, Any]) -> None:
        if self.model.built and "layers" not in self.monitor.run.settings:  # built by the first step
            self.monitor.describe(self.model, self.optimizer)
        self._open_log()
        self.monitor.append(record)

    def _initial_values(self, snapshot: Snapshot) -> dict[str, float]:
        """Returns the values for `logs` before the first record."""
        return {}

    @abc.abstractmethod
    def _record_of(self, snapshot: Snapshot) -> dict[str, Any] | None:
        """Sets `self._logged_values` from a snapshot. Returns its record, or `None` to record nothing."""


_NO_STEP = (
    "{callback}: the optimizer it reads took no step. If the model trains with optimizers other than "
    "`model.optimizer`, wrap each with kmp.wrap and pass the one to read: {callback}(optimizer=...)."
)
