"""The callback that writes a report of the training."""

import errno
import time
from pathlib import Path
from typing import Any

import keras

from kmp.callbacks.model_saving import is_chief
from kmp.callbacks.monitor import Logs, PathLike
from kmp.records import Run
from kmp.utils import atomic_files, user_messages, validation

_SUFFIX = ".html"
_MAX_TIME_FRACTION = 0.05


class Report(keras.callbacks.Callback):
    """Writes the report of `kmp report`: one HTML file with verdict, findings, figures, tables and settings.

    The report is written at the end of training. It is also written at epoch ends, so that a killed run has one, as
    long as that takes at most a twentieth of the time. Of several workers, only the chief writes. A failure to write
    during training is a warning. Without records there is no report.

    Args:
        path: The file. Its name ends in `.html`.
        run: The `kmp.records.Run` of other callbacks in the same `fit`, such as `defaults()[0].run`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `path` does not end in `.html`.
        OSError: In `on_train_begin`, if `path` cannot be written.

    Example:
    >>> from kmp import callbacks
    >>> monitor = callbacks.Monitor()
    >>> attached = [monitor, callbacks.Report("report.html", run=monitor.run)]
    """

    def __init__(self, path: PathLike, run: Run) -> None:
        super().__init__()
        self.path = html_path("path", path)
        if not isinstance(run, Run):
            raise TypeError(f"`run` must be a kmp.records.Run, such as defaults()[0].run. Received: run={run!r}")
        self.run = run
        self._has_warned = False

    def on_train_begin(self, logs: Logs = None) -> None:
        if self._is_chief:
            _check_writable(self.path)
        self._records_written = -1
        self._earliest_next_write = 0.0

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if time.monotonic() >= self._earliest_next_write:
            self.write()

    def on_train_end(self, logs: Logs = None) -> None:
        if len(self.run.rows) != self._records_written:
            self.write()

    def write(self) -> None:
        """Writes the report of the records so far."""
        if not self._is_chief or not self.run.rows:
            return
        from kmp import report

        begin = time.monotonic()
        try:
            report.write({self.model.name: self.run}, self.path)
        except Exception as error:  # no error of matplotlib or of the disk may end training
            self._warn(error)
        self._records_written = len(self.run.rows)
        end = time.monotonic()
        self._earliest_next_write = end + (end - begin) / _MAX_TIME_FRACTION

    @property
    def _is_chief(self) -> bool:
        return is_chief(self.model.distribute_strategy)

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            message = user_messages.one_line(error)
            user_messages.warn(f"The report {str(self.path)!r} was not written: {message}. Training continues.")


def html_path(name: str, value: Any) -> Path:
    """Returns `value` as the path of an `.html` file on this machine.

    Raises:
        TypeError: If `value` is not a string or path.
        ValueError: If `value` does not end in `.html`, or is not a local path.
    """
    path = validation.local_path(name, value)
    if path.suffix.lower() != _SUFFIX:
        raise ValueError(
            f"`{name}` must be the path of a local file that ends in {_SUFFIX}. Received: {name}={value!r}"
        )
    return path


def _check_writable(path: Path) -> None:
    """Creates the folder and checks that the file can be written.

    Raises:
        OSError: If it cannot.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "Is a directory")
        atomic_files.check_writable(path.parent)
    except OSError as error:
        message = f"the report cannot be written ({error.strerror or error})"
        raise OSError(error.errno, message, str(path)) from error
