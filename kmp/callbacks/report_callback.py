"""The callback that leaves a report of the training."""

import errno
import time
from pathlib import Path
from typing import Any

import keras

from kmp.backend import distribution
from kmp.callbacks.gradient_histogram import GradientHistogram
from kmp.callbacks.loss_scale_logger import LossScaleLogger
from kmp.callbacks.optimizer_callback import Logs, OptimizerCallback, PathLike
from kmp.callbacks.overflow_counter import OverflowCounter
from kmp.optimizer import LossScaleOptimizer
from kmp.records import Run
from kmp.utils import atomic_files, user_messages, validation

_SUFFIX = ".html"
_MOST_OF_TIME = 0.05


class Report(keras.callbacks.Callback):
    """Writes what `kmp report` shows: one HTML file with verdict, findings, pictures, tables and settings.

    It is written at the end of training, and at epochs' ends while that takes no more than a twentieth of the time, so
    that a killed run has one too; of several workers, the chief writes. A report that cannot be written in the course
    of a training is a warning. On its own it reads what `LossScaleLogger`, `OverflowCounter` and `GradientHistogram`
    read, and puts their keys in `logs`.

    Args:
        path: The file, whose name ends in `.html`.
        run: A `kmp.records.Run` that other callbacks of the same `fit` read into, as `defaults(...)[0].run`; then
            nothing is read twice. By default the callback reads by itself.
        every_n_steps: Integer, at least 1: how often to read and sample, by the optimizer's step counter, without
            `run`.
        optimizer: The `kmp.LossScaleOptimizer` to read without `run`, for a model that holds several; its own by
            default.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If `path` does not end in `.html`, or `every_n_steps` is below 1; in `on_train_begin`, if the
            optimizer is not kmp's.
        OSError: In `on_train_begin`, if `path` cannot be written.

    Example:
    >>> from kmp import callbacks
    >>> readers = callbacks.defaults()
    >>> attached = [*readers, callbacks.Report("report.html", run=readers[0].run)]
    """

    def __init__(
        self,
        path: PathLike,
        run: Run | None = None,
        every_n_steps: int = 250,
        optimizer: LossScaleOptimizer | None = None,
    ) -> None:
        super().__init__()
        self.path = _html_path(path)
        if run is not None and not isinstance(run, Run):
            raise TypeError(f"`run` must be a kmp.records.Run or None. Received: run={run!r}")
        # No keras.callbacks.CallbackList: it gives callbacks a copy of `logs`, and what they add to it would be lost.
        self._readers = _readers(every_n_steps, optimizer) if run is None else []
        self.run = self._readers[0].run if run is None else run
        self._is_failure_told = False

    def set_params(self, params: dict[str, Any]) -> None:
        super().set_params(params)
        for reader in self._readers:
            reader.set_params(params)

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        for reader in self._readers:
            reader.set_model(model)

    def on_train_begin(self, logs: Logs = None) -> None:
        if self._is_chief:
            _check(self.path)
        for reader in self._readers:
            reader.on_train_begin(logs)
        self._rows_written = -1
        self._free_from = 0.0

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        for reader in self._readers:
            reader.on_epoch_begin(epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        for reader in self._readers:
            reader.on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        for reader in self._readers:
            reader.on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        for reader in self._readers:
            reader.on_epoch_end(epoch, logs)
        if time.monotonic() >= self._free_from:
            self.write()

    def on_train_end(self, logs: Logs = None) -> None:
        for reader in self._readers:
            reader.on_train_end(logs)
        if len(self.run.rows) != self._rows_written:
            self.write()

    def write(self) -> None:
        """Writes the report of what was read so far."""
        if not self._is_chief:
            return
        from kmp import report

        begin = time.monotonic()
        try:
            report.write({self.model.name: self.run}, self.path)
        except Exception as error:  # whatever matplotlib or the disk has against it, training is worth more
            self._tell(error)
        self._rows_written = len(self.run.rows)
        end = time.monotonic()
        self._free_from = end + (end - begin) / _MOST_OF_TIME

    @property
    def _is_chief(self) -> bool:
        return distribution.is_chief(self.model.distribute_strategy)

    def _tell(self, error: Exception) -> None:
        if not self._is_failure_told:
            self._is_failure_told = True
            user_messages.warn(f"No report in {str(self.path)!r}: {user_messages.in_short(error)}. Training goes on.")


def _readers(every_n_steps: int, optimizer: LossScaleOptimizer | None) -> list[OptimizerCallback]:
    """Returns the callbacks that record what a report shows, sharing one monitor."""
    classes = (LossScaleLogger, OverflowCounter, GradientHistogram)
    readers: list[OptimizerCallback] = [cls(None, every_n_steps, optimizer) for cls in classes]
    for reader in readers:
        reader.monitor = readers[0].monitor
    return readers


def _html_path(value: Any) -> Path:
    path = validation.local_path("path", value)
    if path.suffix.lower() != _SUFFIX:
        raise ValueError(f"`path` must be the path of a local file that ends in {_SUFFIX}. Received: path={value!r}")
    return path


def _check(path: Path) -> None:
    """Makes the folder, and makes sure that the file can be written there.

    Raises:
        OSError: If it cannot.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "Is a directory")
        atomic_files.check_writable(path.parent)
    except OSError as error:
        message = f"`path` cannot be written ({error.strerror or error})"
        raise OSError(error.errno, message, str(path)) from error
