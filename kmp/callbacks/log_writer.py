"""Writes records to disk: JSON Lines and TensorBoard event files in one folder."""

import contextlib
import errno
import itertools
import logging
import os
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import tensorflow as tf
from filelock import FileLock, Timeout

from kmp.advice import advise
from kmp.callbacks import tensorboard_events
from kmp.callbacks.training_records import record_size
from kmp.records import Header, Record, Run, load_run
from kmp.records.jsonl import FILE_NAME, LogEncoder
from kmp.utils import atomic_files, user_messages

logger = logging.getLogger("kmp")

_WRITE_ERRORS = (OSError, tf.errors.OpError)


class LogWriter:
    """Writes the records of one callback into `log_dir`.

    The records go to `kmp.jsonl`, and to event files for TensorBoard.

    Args:
        owner: What writes the records: the files of one that is gone may be closed.
        folder: The folder, after `check`.
        first_step: The step that training continues after. If the folder has a log with later
            records, that log is archived and its records up to this step are carried over.

    Attributes:
        fallbacks: The `fallback` records of the log that this training continues.
        size_at_start: The bytes of the records in that log, see `record_size`, and of its event
            files.

    Raises:
        ValueError: If another callback of the training writes into the folder, or if it has a log
            that is not kmp's.
    """

    _open: ClassVar[dict[Path, "LogWriter"]] = {}

    @classmethod
    def check(cls, folder: Path) -> FileLock | None:
        """Prepares the folder before a training: creates it, checks that it is writable, locks it.

        Closes the files that an interrupted training left open. All users of a folder in one
        process share one lock, which filelock releases when the last one has dropped it, or when
        the process ends, however it ends. `None` where files cannot be locked. `.kmp.lock` stays in
        the folder.

        Raises:
            OSError: If the folder is not writable, or another process has locked it.
        """
        for writer in [*cls._open.values()]:
            if writer._folder == folder.resolve() or writer._owner() is None:
                writer._close_files()
        try:
            atomic_files.check_writable(folder)
            with (folder / FILE_NAME).open("a"):
                pass
        except OSError as error:
            message = f"`log_dir` cannot be written ({error.strerror or error})"
            raise OSError(error.errno, message, str(folder)) from error
        lock = FileLock(folder.resolve() / ".kmp.lock", is_singleton=True, thread_local=False)
        try:
            if not lock.is_locked:
                lock.acquire(blocking=False)
        except Timeout as error:
            message = (
                "`log_dir` is in use by another process. Wait until its training ends, stop that"
                " process, or give this training another folder. A notebook whose training was"
                " interrupted uses the folder until its kernel stops"
            )
            raise OSError(errno.EBUSY, message, str(folder)) from error
        except (OSError, NotImplementedError):  # such as some network file systems
            return None
        return lock

    def __init__(self, owner: object, folder: Path, first_step: int) -> None:
        folder = folder.resolve()  # two paths to one folder have one writer
        other = self._open.get(folder)
        if other:
            # The error ends the training, and Keras calls no callback after it.
            other._close_files()
            raise ValueError(
                "`log_dir` is in use by another callback of this training. A kmp.callbacks.Monitor"
                " writes all records into one log; give each optimizer its own folder. Received:"
                f" log_dir={str(folder)!r}"
            )
        self._folder, self._owner = folder, weakref.ref(owner)
        self._has_failed = self._has_records = self._has_warned_of_change = False
        self._encoder = LogEncoder()
        self.fallbacks: list[Record] = []
        self.size_at_start = 0
        # The open log and the writer of the event files, unless opening them fails.
        self._lines: Any = None
        self._events: Any = None
        with self._stopping_on_write_error():
            kept = self._open_files(first_step)
            self.fallbacks = [record for record in kept.rows if record.fallback]
            sizes = [
                *map(record_size, kept.rows),
                *(file.stat().st_size for file in _event_files(folder)),
            ]
            self.size_at_start = sum(sizes)
        self._open[folder] = self

    def _open_files(self, last_step: int) -> Run:
        """Opens the files to continue the log after a step. Returns the records that it has."""
        kept, is_rewritten = _continue_log(self._folder, last_step)
        self._has_records = bool(kept.rows)
        self._encoder = LogEncoder()
        self._lines = (self._folder / FILE_NAME).open("a", encoding="utf-8")
        self._events = tf.summary.create_file_writer(
            str(self._folder), filename_suffix=tensorboard_events.SUFFIX
        )
        for record in kept.rows if is_rewritten else ():
            self._write_events(record, kept)
        self._events.flush()
        return kept

    def write(self, run: Run) -> int:
        """Writes the last record of a run. Stops the log with a warning if the disk is full.

        And if a later training uses the folder. A log that another program has truncated or
        replaced continues with what is left of it, with one warning.

        Returns:
            The bytes of its histograms in the event files.
        """
        if self._has_failed:
            return 0
        record = run.rows[-1]
        with self._stopping_on_write_error():
            if self._lines.closed:
                raise OSError("a later training uses this folder")
            if self._has_records and self._is_changed():
                self._continue_changed(record.step)
            self._write_line(record, run.header)
            size = self._write_events(record, run)
            self._events.flush()
            return size
        return 0

    def _is_changed(self) -> bool:
        """Whether the log is not the file that was opened, or shorter than what was written."""
        try:
            found = (self._folder / FILE_NAME).stat()
        except FileNotFoundError as error:
            raise OSError("the log was deleted or moved") from error
        is_same = os.path.samestat(found, os.fstat(self._lines.fileno()))
        return not is_same or found.st_size < self._lines.tell()

    def _continue_changed(self, step: int) -> None:
        """Opens a log again that another program changed. What cannot be read is archived."""
        self._lines.close()
        self._events.close()
        try:
            kept = len(self._open_files(step).rows)
        except ValueError:
            log = (self._folder / FILE_NAME).resolve()
            _archive(self._folder, log, "was changed, and cannot be read")
            log.write_bytes(b"")
            kept = len(self._open_files(step).rows)
        if not self._has_warned_of_change:
            self._has_warned_of_change = True
            user_messages.warn(
                f"Another program truncated or replaced {str(self._folder / FILE_NAME)!r} before"
                f" step {step}. Training continues, and so does the log, after the {kept} records"
                " that can still be read. The callbacks' `run` has all records of this training."
            )

    def _write_line(self, record: Record, header: Header) -> None:
        if not self._has_records:
            if self._lines.tell():
                self._lines.truncate(0)  # the header of a log without records
            self._lines.write(self._encoder.line(header))
            self._has_records = True
        self._lines.write(self._encoder.line(record))
        self._lines.flush()

    def _write_events(self, record: Record, run: Run) -> int:
        with self._events.as_default(step=record.step):
            return tensorboard_events.write(record, run)

    @contextlib.contextmanager
    def _stopping_on_write_error(self) -> Iterator[None]:
        try:
            yield
        except _WRITE_ERRORS as error:
            self._has_failed = True
            user_messages.warn(
                f"Logging to {str(self._folder)!r} stops: {user_messages.one_line(error)}. Training"
                " continues, and the callbacks' `run` still gets all records."
            )

    def write_verdict(self) -> None:
        """Writes what `advise` makes of the whole log, for TensorBoard's text tab."""
        if self._has_failed or self._lines.closed or not self._has_records:
            return
        try:
            run = load_run(self._folder)
            with self._events.as_default(step=run.rows[-1].step):
                tensorboard_events.write_text("kmp/verdict", str(advise(run)))
            self._events.flush()
        except Exception as error:
            # Neither the disk nor a log that somebody edited may end training.
            user_messages.warn(
                f"TensorBoard's text tab has no verdict: {user_messages.one_line(error)}."
            )

    def close(self) -> None:
        """Adds the verdict for TensorBoard, and closes the files."""
        self.write_verdict()
        self._close_files()

    def _close_files(self) -> None:
        if self._open.get(self._folder) is self:
            del self._open[self._folder]
        for file in (self._lines, self._events):
            with contextlib.suppress(*_WRITE_ERRORS):  # the failed write already warned
                if file is not None:
                    file.close()


def _continue_log(folder: Path, first_step: int) -> tuple[Run, bool]:
    """Makes an existing log end at `first_step`, by an atomic write.

    Archives it first if that drops or changes a line.

    Returns:
        The log as a run, and whether it was archived, so that TensorBoard's files need its records
        again.
    """
    log = (folder / FILE_NAME).resolve()
    if not log.exists() or not log.stat().st_size:
        return Run(), False
    earlier = load_run(log)
    kept = Run([record for record in earlier.rows if record.step <= first_step], earlier.header)
    goes_beyond = len(kept.rows) < len(earlier.rows)
    if not earlier.rows or (not goes_beyond and log.read_bytes().endswith(b"\n")):
        return kept, False
    encoder = LogEncoder()
    lines = [encoder.line(kept.header), *map(encoder.line, kept.rows)]
    with atomic_files.atomic_write(log) as file:
        file.write("".join(lines).encode())
        file.flush()  # on a full disk, raises before the log is archived
        _archive(
            folder,
            log,
            f"goes beyond step {first_step}" if goes_beyond else "ends in the middle of a line",
        )
    return kept, True


def _archive(folder: Path, log: Path, reason: str) -> None:
    numbered = (folder / f"earlier-{number}" for number in itertools.count(1))
    archive = next(path for path in numbered if not path.exists())
    archive.mkdir()
    shutil.copy2(log, archive / log.name)
    for events in _event_files(folder):
        events.rename(archive / events.name)
    logger.warning("Moved an earlier log to %s: it %s.", archive, reason)


def _event_files(folder: Path) -> list[Path]:
    return list(folder.glob(f"events.out.tfevents.*{tensorboard_events.SUFFIX}"))
