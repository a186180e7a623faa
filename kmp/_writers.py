"""Readings to disk: JSON Lines and TensorBoard event files in one folder, shared by the callbacks that write there."""

import datetime
import os
from pathlib import Path
from typing import Any, ClassVar, TextIO

import keras
import numpy as np
import tensorflow as tf

from kmp import records


class LogWriter:
    """Writes readings into `log_dir`: `kmp.jsonl`, and event files for TensorBoard.

    Use `LogWriter.open`: callbacks that log into the same folder share one writer, because TensorBoard follows one
    event file in a folder, and one log per run is what a reader wants.
    """

    _open: ClassVar[dict[Path, "LogWriter"]] = {}

    def __init__(self, folder: Path, session: tuple[Any, int]) -> None:
        self._folder = folder
        self._session = session
        self._users = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._lines = _open_log(folder / records.FILE_NAME, first_step=session[1])
        self._events = _open_events(folder)

    @classmethod
    def open(cls, log_dir: str | os.PathLike[str], optimizer: Any, first_step: int) -> "LogWriter":
        """Opens the folder's writer, or joins the one that is open for the same optimizer from the same step.

        Args:
            log_dir: The folder; made if need be.
            optimizer: Whose readings they are.
            first_step: The step that training goes on from. At 0 a log that is there already is kept under another
                name.

        Raises:
            OSError: If the folder cannot be written.
        """
        folder, session = Path(log_dir).absolute(), (optimizer, first_step)
        writer = cls._open.get(folder)
        if writer and writer._session != session:
            writer._end()  # left open by a training that was interrupted
            writer = None
        writer = writer or cls._create(folder, session)
        writer._users += 1
        return writer

    @classmethod
    def _create(cls, folder: Path, session: tuple[Any, int]) -> "LogWriter":
        try:
            cls._open[folder] = cls(folder, session)
        except OSError as error:
            message = f"`log_dir` cannot be written ({error.strerror or error})"
            raise OSError(error.errno, message, str(folder)) from error
        return cls._open[folder]

    def write(self, row: dict[str, Any]) -> None:
        """Writes a reading; see `kmp.records` for its keys."""
        self._lines.write(records.to_line(row))
        self._lines.flush()
        with self._events.as_default(step=row["step"]):
            for key, value in records.scalars(row):
                tf.summary.scalar(f"kmp/{key}", value)
            if "histogram" in row:
                _write_histogram(records.ExponentHistogram.from_dict(row["histogram"]))
        self._events.flush()

    def close(self) -> None:
        """Leaves the writer; the last one to leave closes the files."""
        self._users -= 1
        if self._users == 0:
            self._end()

    def _end(self) -> None:
        if self._open.get(self._folder) is self:
            del self._open[self._folder]
        self._lines.close()
        self._events.close()


def _open_log(path: Path, first_step: int) -> TextIO:
    if first_step == 0 and path.exists() and path.stat().st_size:
        path.rename(_unused(path))
    lines = path.open("a", encoding="utf-8")
    if lines.tell() == 0:
        lines.write(records.to_line(_header()))
        lines.flush()
    return lines


def _unused(path: Path) -> Path:
    numbers = iter(range(1, 1_000_000))
    return next(name for n in numbers if not (name := path.with_stem(f"{path.stem}-{n}")).exists())


def _header() -> dict[str, Any]:
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    versions = {"keras": keras.__version__, "tensorflow": tf.__version__, "numpy": np.__version__}
    return {"schema": records.SCHEMA, "kind": "header", "started": started, **versions}


def _open_events(folder: Path) -> Any:
    try:
        import tensorboard  # noqa: F401  # tf.summary needs it, and fails without naming it
    except ImportError as error:
        raise ImportError("Logging to `log_dir` needs TensorBoard: pip install tensorboard") from error
    return tf.summary.create_file_writer(str(folder))


def _write_histogram(histogram: records.ExponentHistogram) -> None:
    from tensorboard.plugins.histogram import metadata

    # TensorBoard's histograms are rows of left edge, right edge, count; here the edges are binary exponents.
    filled = np.flatnonzero(histogram.by_exponent)
    span = slice(filled[0], filled[-1] + 1) if filled.size else slice(0, 0)
    left = histogram.exponents[span].astype(np.float64)
    buckets = np.stack([left, left + 1, histogram.by_exponent[span]], axis=1)
    plugin = metadata.create_summary_metadata(display_name=None, description="log2 of loss-scaled gradient magnitudes")
    tf.summary.write("kmp/gradient_exponents", buckets, metadata=plugin)
