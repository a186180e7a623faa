"""Writes the report of a training while it runs."""

import time
from pathlib import Path

from kmp.records import Run
from kmp.utils import atomic_files, user_messages

_MAX_TIME_FRACTION = 0.05


class ReportWriter:
    """Writes the report of `kmp report`: one HTML file.

    Also at epoch ends, so that a killed run has one, as long as that takes at most a twentieth of
    the time. A failure to write is a warning. Without records there is no report.

    Args:
        path: The file.
        run: The records.
        name: The name of the run in the report.

    Raises:
        OSError: If `path` cannot be written, or has a file that is not a report of kmp.
    """

    def __init__(self, path: Path, run: Run, name: str) -> None:
        self._path, self._run, self._name = path, run, name
        self._has_warned = False
        self._records_written = -1
        self._earliest_next_write = 0.0
        # Imports rich and jinja2.
        from kmp.report.page import check_target

        check_target(path, "`report`")
        atomic_files.check_file_writable(path, "the report")

    def end_epoch(self) -> None:
        """Writes the report if that does not take too much of the time."""
        if time.monotonic() >= self._earliest_next_write:
            self.write()

    def end(self) -> None:
        """Writes the report of the complete run."""
        if len(self._run.rows) != self._records_written:
            self.write()

    def write(self) -> None:
        """Writes the report of the records so far."""
        if not self._run.rows:
            return
        from kmp import report

        begin = time.monotonic()
        try:
            report.write({self._name: self._run}, self._path)
        except Exception as error:  # no error of matplotlib or of the disk may end training
            self._warn_once(error)
        self._records_written = len(self._run.rows)
        end = time.monotonic()
        self._earliest_next_write = end + (end - begin) / _MAX_TIME_FRACTION

    def _warn_once(self, error: Exception) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        user_messages.warn(
            f"The report {str(self._path)!r} was not written: {user_messages.one_line(error)}."
            " Training continues."
        )
