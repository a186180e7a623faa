"""When and how a callback reads the optimizer, whatever it does with the reading."""

import abc
import os
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import keras

from kmp import _arguments, _guard, _replicas, _warnings
from kmp._formats import FLOAT16
from kmp._state import compute_dtypes
from kmp._writers import LogWriter, header
from kmp.optimizer import LossScaleOptimizer
from kmp.records import Run, Snapshot

PathLike = str | os.PathLike[str]
Logs = dict[str, Any] | None

_newest: WeakKeyDictionary[LossScaleOptimizer, Snapshot] = WeakKeyDictionary()  # the last reading that a callback made


class Reader(keras.callbacks.Callback, abc.ABC):
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
        self.log_dir = None if log_dir is None else _arguments.local_path("log_dir", log_dir)
        self.every_n_steps = _arguments.positive_integer("every_n_steps", every_n_steps)
        self.run = Run()
        self._chosen = optimizer
        self._writer: LogWriter | None = None

    @property
    def optimizer(self) -> LossScaleOptimizer:
        """The optimizer that is read: the one given, else the model's own.

        Raises:
            ValueError: If it is not kmp's.
        """
        optimizer = self._chosen or getattr(self.model, "optimizer", None)
        if not isinstance(optimizer, LossScaleOptimizer):
            raise ValueError(_no_loss_scale(type(self).__name__, self.model, optimizer))
        return optimizer

    def on_train_begin(self, logs: Logs = None) -> None:
        optimizer = self.optimizer
        if self._folder is not None:
            LogWriter.check(self._folder)
        self._stop()
        self.run.header = header(self.model, optimizer)
        if self._prepare(optimizer):
            self.model.make_train_function(force=True)
        self._start()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        if not self._has_trained:
            self._start()  # again: a callback listed later may have restored the optimizer
            self.run.forget_after(self._first_step)
            self._open()
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
            _guard.mend_epoch(self.model, logs)
            logs.update(self._keys)

    def on_train_end(self, logs: Logs = None) -> None:
        if self._has_trained and self._last.step == self._first_step:
            _warnings.warn(_UNUSED.format(callback=type(self).__name__))
        self._stop()

    def _prepare(self, optimizer: LossScaleOptimizer) -> bool:
        """Arranges what the compiled step must be able to do; returns whether it has to be traced anew."""
        return optimizer is self.model.optimizer and _guard.install(self.model)

    def _start(self) -> None:
        self._last = _newest[self.optimizer] = self.optimizer.snapshot()
        self._first_step = self._last.step
        self._due = self._first_step + 1
        # Between readings nothing is copied from the device: the step is reckoned from batches, at the rate last seen.
        self._steps_per_batch = 1.0
        self._batches_since = self._batches_of_epoch = 0
        self._keys: dict[str, float] = {}
        self._has_trained = False

    def _stop(self) -> None:
        if self._writer:
            self._writer.close()
            self._writer = None

    def _open(self) -> None:
        if self._folder is not None and self._writer is None:
            self._writer = LogWriter.open(self._folder, self.model, self.optimizer, self._first_step)

    @property
    def _folder(self) -> Path | None:
        """Where this process writes; of several workers, only the chief does."""
        return self.log_dir if _replicas.is_chief(self.model.distribute_strategy) else None

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
        """Returns what the optimizer holds, from another callback's reading if it has taken no step since that one."""
        optimizer = self.optimizer
        known = _newest.get(optimizer)
        if known is None or known.step != optimizer.counters.read_steps():
            known = _newest[optimizer] = optimizer.snapshot()
        return known

    def _next_due(self, snapshot: Snapshot) -> int:
        """Returns the step to read next."""
        return (snapshot.step // self.every_n_steps + 1) * self.every_n_steps

    def _record(self, snapshot: Snapshot) -> None:
        row = self._row(snapshot)
        if row:
            self._append(row)

    def _append(self, row: dict[str, Any]) -> None:
        self.run.append(row)
        self._open()
        if self._writer:
            self._writer.write(row)

    @abc.abstractmethod
    def _row(self, snapshot: Snapshot) -> dict[str, Any] | None:
        """Sets `self._keys` from the reading and returns what to record of it, or `None` for nothing."""


_UNUSED = (
    "{callback}: the optimizer it reads took no step. A model that trains with optimizers of its own has to have them "
    "wrapped with kmp.wrap, and the callback has to be told which one to read: {callback}(optimizer=...)."
)


def _no_loss_scale(callback: str, model: keras.Model, optimizer: Any) -> str:
    kind = type(optimizer)
    found = f"{kind.__module__.split('.')[0]}'s {kind.__name__}" if optimizer is not None else "None"
    dtypes = sorted(compute_dtypes(model))
    advice = (
        "Compile the model after kmp.enable() and without auto_scale_loss=False, or with kmp.LossScaleOptimizer(opt)."
        if FLOAT16.name in dtypes
        else "That needs no loss scale: leave kmp's callbacks out, or compile with kmp.LossScaleOptimizer(opt, "
        "loss_scale=1.0) to see its gradients all the same. For float16 call kmp.enable() before building the model; "
        "again after keras.backend.clear_session(), and in each thread, which have the policy float32."
    )
    reads = f"{callback} reads kmp.LossScaleOptimizer, and the model's optimizer is {found}"
    return f"{reads}; the model computes in {' and '.join(dtypes)}. {advice}"
