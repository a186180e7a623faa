"""Writes records to disk: JSON Lines and TensorBoard event files in one folder."""

import contextlib
import importlib.util
import itertools
import logging
import math
import os
import shutil
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

import keras
import tensorflow as tf
from filelock import FileLock

from kmp import records
from kmp.advice import advise
from kmp.callbacks.run_header import header
from kmp.callbacks.tensorboard_events import histograms_by_tag, write_histograms, write_scalars
from kmp.callbacks.training_records import record_size
from kmp.optimizer import LossScaleOptimizer
from kmp.records import FILE_NAME, LogEncoder, to_line
from kmp.utils import atomic_files, lock_folder, user_messages

logger = logging.getLogger("kmp")

_SUFFIX = ".kmp"
_WRITE_ERRORS = (OSError, tf.errors.OpError)


class LogWriter:
    """Writes records into `log_dir`: to `kmp.jsonl`, and to event files for TensorBoard.

    Use `LogWriter.open`. Callbacks that log into the same folder share one writer: TensorBoard reads one event file in
    a folder, and a run has one log.
    """

    _open: ClassVar[dict[Path, "LogWriter"]] = {}

    def __init__(self, folder: Path, model: keras.Model, optimizer: LossScaleOptimizer, first_step: int) -> None:
        self._folder = folder
        self._model = weakref.ref(model)
        self._optimizer = weakref.ref(optimizer)
        self._first_step = first_step
        self._has_failed = self._has_records = False
        self._encoder = LogEncoder()
        self.size = 0  # bytes of the records in the log, see `record_size`, and of the event files
        self._file_size = 0  # bytes of the log after the last record
        self._last_metrics: tuple[int, int] | None = None  # epoch and step
        self.is_closed = False  # by `close`, and not by a later training
        self._lines: IO[str] | None = None
        self._events: Any = None
        with self._stopping_on_write_error():
            first_line = header(model, optimizer)
            self._layers = first_line["settings"].get("layers", {})
            kept, is_rewritten = _continue_log(folder, first_step, first_line)
            self._has_records = bool(kept)
            self.size = sum(map(record_size, kept)) + sum(file.stat().st_size for file in _event_files(folder))
            self._lines = (folder / FILE_NAME).open("a", encoding="utf-8")
            self._events = tf.summary.create_file_writer(str(folder), filename_suffix=_SUFFIX)
            for record in kept if is_rewritten else ():
                self._write_events(record)
            self._events.flush()

    @classmethod
    def check(cls, folder: Path) -> FileLock | None:
        """Creates the folder, checks that it is writable, and locks it for this process.

        Returns:
            The lock, which lasts as long as the object; `None` where folders cannot be locked.

        Raises:
            OSError: If the folder is not writable, or another process has locked it.
            ImportError: If TensorBoard is not installed.
        """
        if importlib.util.find_spec("tensorboard") is None:  # the error of tf.summary does not name it
            raise ImportError("Logging to `log_dir` needs TensorBoard: pip install tensorboard")
        try:
            atomic_files.check_writable(folder)
            with (folder / FILE_NAME).open("a"):
                pass
        except OSError as error:
            message = f"`log_dir` cannot be written ({error.strerror or error})"
            raise OSError(error.errno, message, str(folder)) from error
        return lock_folder("log_dir", folder)

    @classmethod
    def open(cls, folder: Path, model: keras.Model, optimizer: LossScaleOptimizer, first_step: int) -> "LogWriter":
        """Returns the folder's writer: the one that is open for the same training, or a new one.

        Args:
            folder: The folder, which exists.
            model: The model in training.
            optimizer: The optimizer whose records are written.
            first_step: The step that training continues after. If the folder has a log with later records, that log is
                archived and its records up to this step are carried over.

        Raises:
            ValueError: If the folder has a log that is not kmp's, or that of another optimizer in the same training.
        """
        folder = folder.resolve()  # two paths to one folder have one writer
        for stale in [writer for writer in cls._open.values() if writer._optimizer() is None]:
            stale._close_files()
        writer = cls._open.get(folder)
        if writer is None or not writer._is_for(optimizer, first_step):
            if writer:
                writer._close_if_stale(model)
            writer = cls._open[folder] = cls(folder, model, optimizer, first_step)
        return writer

    def write(self, record: dict[str, Any], earlier: Sequence[dict[str, Any]] = ()) -> None:
        """Writes a record; see `kmp.records` for its keys. Stops the log with a warning if the disk is full.

        Args:
            record: The record.
            earlier: The records before it that the caller has. They are written again if the log was deleted, moved or
                truncated, as by a program that cleans a folder.

        Raises:
            ValueError: If a later training uses the folder.
        """
        if self._has_failed or self._lines is None:
            return
        if self._lines.closed:
            raise ValueError(f"`log_dir` is in use by a later training. Received: log_dir={str(self._folder)!r}")
        if "metrics" in record:
            of_epoch = record["epoch"], record["step"]
            if of_epoch == self._last_metrics:
                return  # another callback of the same training has written them
            self._last_metrics = of_epoch
        with self._stopping_on_write_error():
            if self._has_records and not self._is_intact():
                self._write_again(earlier)
            self._write_line(record)
            self._file_size = os.fstat(self._lines.fileno()).st_size
            self.size += record_size(record)
            self._write_events(record)
            self._events.flush()

    def _write_line(self, record: dict[str, Any]) -> None:
        assert self._lines is not None
        if not self._has_records:
            self._write_header()
            self._has_records = True
        self._lines.write(self._encoder.line(record))
        self._lines.flush()

    def _is_intact(self) -> bool:
        """Whether the file at the log's path is the one that is open, and nothing of it was removed."""
        assert self._lines is not None
        own = os.fstat(self._lines.fileno())
        try:
            at_path = (self._folder / FILE_NAME).stat()
        except OSError:
            return False
        return (at_path.st_dev, at_path.st_ino) == (own.st_dev, own.st_ino) and own.st_size >= self._file_size

    def _write_again(self, records: Sequence[dict[str, Any]]) -> None:
        user_messages.warn(
            f"{str(self._folder / FILE_NAME)!r} was deleted, moved or truncated during the training. The records in "
            "memory are written again."
        )
        assert self._lines is not None
        self._lines.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lines = (self._folder / FILE_NAME).open("w", encoding="utf-8")
        self._encoder, self._has_records = LogEncoder(), False
        has_events = bool(_event_files(self._folder))
        if not has_events:
            self._events.close()
            self._events = tf.summary.create_file_writer(str(self._folder), filename_suffix=_SUFFIX)
        for record in records:
            self._write_line(record)
            if not has_events:
                self._write_events(record)

    def _write_header(self) -> None:
        model, optimizer = self._model(), self._optimizer()
        if self._lines is not None and model is not None and optimizer is not None:
            first_line = header(model, optimizer)
            self._layers = first_line["settings"].get("layers", {})
            if self._lines.tell():
                self._lines.truncate(0)  # a header from before the first step, which may have built the model
            self._lines.write(to_line(first_line))

    @contextlib.contextmanager
    def _stopping_on_write_error(self) -> Iterator[None]:
        try:
            yield
        except _WRITE_ERRORS as error:
            self._has_failed = True
            user_messages.warn(
                f"Logging to {str(self._folder)!r} stops: {user_messages.first_line(error)}. Training continues, and "
                "the callbacks' `run` still gets all records."
            )

    def _write_events(self, record: dict[str, Any]) -> None:
        with self._events.as_default(step=record["step"]):
            write_scalars(record["step"], _scalar_tags(record))
            if "fallback" in record:
                layers = ", ".join(map(repr, record["fallback"]))
                text = f"Set to float32: {layers}\n{record.get('fallback_reason', '')}"
                tf.summary.text("kmp/fallback", f"```\n{text}\n```")
            if "sample" in record:
                self.size += write_histograms(record["step"], histograms_by_tag(record["sample"], self._layers))

    def close(self) -> None:
        """Adds the verdict for TensorBoard, and closes the files, for all callbacks that share the writer."""
        self.write_verdict()
        self.is_closed = True
        self._close_files()

    def write_verdict(self) -> None:
        """Writes what `advise` makes of the whole log, for TensorBoard's text tab."""
        if self._lines is None or self._lines.closed or not self._has_records or self._has_failed:
            return
        try:
            run = records.Run.load(self._folder)
            with self._events.as_default(step=run.rows[-1]["step"]):
                tf.summary.text("kmp/verdict", f"```\n{advise(run)}\n```")
            self._events.flush()
        except Exception as error:  # neither the disk nor a log that somebody edited may end training
            user_messages.warn(f"TensorBoard's text tab has no verdict: {user_messages.one_line(error)}.")

    def _is_for(self, optimizer: LossScaleOptimizer, first_step: int) -> bool:
        return self._optimizer() is optimizer and self._first_step == first_step

    def _close_if_stale(self, model: keras.Model) -> None:
        """Closes the files if an interrupted training left them open.

        Raises:
            ValueError: If they belong to another optimizer in the same training.
        """
        optimizer = self._optimizer()
        if optimizer and self._model() is model and optimizer.snapshot().step == self._first_step:
            raise ValueError(
                "`log_dir` is in use for another optimizer; give each optimizer its own folder. "
                f"Received: log_dir={str(self._folder)!r}"
            )
        self._close_files()

    def _close_files(self) -> None:
        if self._open.get(self._folder) is self:
            del self._open[self._folder]
        for file in (self._lines, self._events):
            with contextlib.suppress(*_WRITE_ERRORS):  # the failed write already warned
                if file is not None:
                    file.close()


def _scalar_tags(record: dict[str, Any]) -> dict[str, float]:
    """Returns TensorBoard's scalars of a record by tag. A loss scale is a power of two: its axis is that of log2."""
    values = dict(records.scalars(record))
    values.pop("epoch", None)
    scale = values.pop("loss_scale", 0.0)
    if scale > 0:
        values["log2_loss_scale"] = math.log2(scale)
    return {f"kmp/{key}": value for key, value in values.items()}


def _continue_log(folder: Path, first_step: int, first_line: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """Makes an existing log end at `first_step`, by an atomic write, and archives it if that drops or changes a line.

    Returns:
        The records in the log, and whether it was archived, so that TensorBoard's files need these records again.
    """
    log = (folder / FILE_NAME).resolve()
    if not log.exists() or not log.stat().st_size:
        return [], False
    earlier = records.Run.load(log, allow_truncated=True)
    if not earlier.rows:
        log.unlink()
        return [], False
    kept = [record for record in earlier.rows if record["step"] <= first_step]
    goes_beyond = len(kept) < len(earlier.rows)
    if not goes_beyond and log.read_bytes().endswith(b"\n"):
        return kept, False
    encoder = LogEncoder()
    with atomic_files.atomic_write(log) as file:
        file.write("".join(map(encoder.line, (earlier.header if kept else first_line, *kept))).encode())
        file.flush()  # on a full disk, raises before the log is archived
        _archive(folder, log, f"goes beyond step {first_step}" if goes_beyond else "ends in the middle of a line")
    return kept, True


def _archive(folder: Path, log: Path, reason: str) -> None:
    archive = _unused_path(folder / "earlier")
    archive.mkdir()
    shutil.copy2(log, archive / log.name)
    for events in _event_files(folder):
        events.rename(archive / events.name)
    logger.warning("Moved an earlier log to %s: it %s.", archive, reason)


def _event_files(folder: Path) -> list[Path]:
    return list(folder.glob(f"events.out.tfevents.*{_SUFFIX}"))


def _unused_path(path: Path) -> Path:
    numbered = (path.with_name(f"{path.name}-{n}") for n in itertools.count(1))
    return next(candidate for candidate in numbered if not candidate.exists())
