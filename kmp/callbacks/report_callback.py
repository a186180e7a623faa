"""The callback that writes a report of the training."""

import errno
import time

from kmp.callbacks.optimizer_reader import CopyableCallback, Logs, PathLike
from kmp.records import Run
from kmp.utils import atomic_files, user_messages, validation

_MAX_TIME_FRACTION = 0.05


class Report(CopyableCallback):
    """Writes the report of `kmp report`: one HTML file with verdict, findings, figures, tables and settings.

    The report is written at the end of training. It is also written at epoch ends, so that a killed
    run has one, as long as that takes at most a twentieth of the time. Of several workers, only the
    chief writes. A failure to write during training is a warning. Without records there is no
    report.

    Args:
        path: The file. Its name ends in `.html`.
        run: The `kmp.records.Run` of other callbacks in the same `fit`, such as
            `defaults()[0].run`.

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
        self.path = validation.local_path("path", path, (".html",))
        if not isinstance(run, Run):
            raise TypeError(
                f"`run` must be a kmp.records.Run, such as defaults()[0].run. Received: run={run!r}"
            )
        self.run = run

    def on_train_begin(self, logs: Logs = None) -> None:
        self._has_warned = False
        self._records_written = -1
        self._earliest_next_write = 0.0
        if not self._is_chief:
            return
        try:
            if self.path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "Is a directory")
            atomic_files.check_writable(self.path.parent)
        except OSError as error:
            message = f"the report cannot be written ({error.strerror or error})"
            raise OSError(error.errno, message, str(self.path)) from error

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
            if not self._has_warned:
                self._has_warned = True
                reason = user_messages.one_line(error)
                user_messages.warn(
                    f"The report {str(self.path)!r} was not written: {reason}. Training continues."
                )
        self._records_written = len(self.run.rows)
        end = time.monotonic()
        self._earliest_next_write = end + (end - begin) / _MAX_TIME_FRACTION
