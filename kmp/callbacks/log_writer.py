"""Readings to disk: JSON Lines and TensorBoard event files in one folder, shared by the callbacks that write there."""

import contextlib
import dataclasses
import datetime
import importlib.util
import itertools
import logging
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from kmp import records
from kmp.backend import compute_dtypes, float32_variables
from kmp.gradients import paths_of
from kmp.optimizer import LossScaleOptimizer
from kmp.records import FILE_NAME, SCHEMA, to_line
from kmp.utils import atomic_files, user_messages

logger = logging.getLogger("kmp")

_SUFFIX = ".kmp"
_FULL = (OSError, tf.errors.OpError)


class LogWriter:
    """Writes readings into `log_dir`: `kmp.jsonl`, and event files for TensorBoard.

    Use `LogWriter.open`: callbacks that log into the same folder share one writer, because TensorBoard follows one
    event file in a folder, and one log per run is what a reader wants.
    """

    _open: ClassVar[dict[Path, "LogWriter"]] = {}

    def __init__(self, folder: Path, model: keras.Model, optimizer: LossScaleOptimizer, first_step: int) -> None:
        self._folder = folder
        self._model = weakref.ref(model)
        self._optimizer = weakref.ref(optimizer)
        self._first_step = first_step
        self._is_full = False
        self._lines: IO[str] | None = None
        self._events: Any = None
        with self._while_there_is_room():
            first_line = header(model, optimizer)
            carried_over = _take_up(folder, first_step, first_line)
            self._lines = (folder / FILE_NAME).open("a", encoding="utf-8")
            self._events = tf.summary.create_file_writer(str(folder), filename_suffix=_SUFFIX)
            if self._lines.tell() == 0:
                self._lines.write(to_line(first_line))
                self._lines.flush()
            for row in carried_over:
                self._write_events(row)
            self._events.flush()

    @classmethod
    def check(cls, folder: Path) -> None:
        """Makes the folder, and makes sure that it can be written to.

        Raises:
            OSError: If it cannot.
            ImportError: If TensorBoard is missing.
        """
        if importlib.util.find_spec("tensorboard") is None:  # tf.summary fails without naming it
            raise ImportError("Logging to `log_dir` needs TensorBoard: pip install tensorboard")
        try:
            atomic_files.check_writable(folder)
            with (folder / FILE_NAME).open("a"):
                pass
        except OSError as error:
            message = f"`log_dir` cannot be written ({error.strerror or error})"
            raise OSError(error.errno, message, str(folder)) from error

    @classmethod
    def open(cls, folder: Path, model: keras.Model, optimizer: LossScaleOptimizer, first_step: int) -> "LogWriter":
        """Opens the folder's writer, or joins the one that is open for the same training.

        Args:
            folder: The folder, which exists.
            model: The model in training.
            optimizer: Whose readings they are.
            first_step: The step that training goes on from. A log that goes beyond it is set aside, and what it holds
                up to that step is carried over.

        Raises:
            ValueError: If the folder holds a log that is not kmp's, or another optimizer's of the same training.
        """
        folder = folder.absolute()
        for left in [writer for writer in cls._open.values() if writer._optimizer() is None]:
            left._end()
        writer = cls._open.get(folder)
        if writer is None or not writer._belongs_to(optimizer, first_step):
            if writer:
                writer._give_way_to(model)
            writer = cls._open[folder] = cls(folder, model, optimizer, first_step)
        return writer

    def write(self, row: dict[str, Any]) -> None:
        """Writes a reading; see `kmp.records` for its keys. A disk that is full ends the log, with a warning.

        Raises:
            ValueError: If a later training has taken the folder over.
        """
        if self._is_full or self._lines is None:
            return
        if self._lines.closed:
            raise ValueError(f"`log_dir` was taken over by a later training: {self._folder}")
        with self._while_there_is_room():
            self._lines.write(to_line(row))
            self._lines.flush()
            self._write_events(row)
            self._events.flush()

    @contextlib.contextmanager
    def _while_there_is_room(self) -> Iterator[None]:
        try:
            yield
        except _FULL as error:
            self._is_full = True
            user_messages.warn(
                f"Logging to {str(self._folder)!r} stops: {user_messages.first_line(error)}. Training goes on, and the "
                "callbacks' `run` has the readings."
            )

    def _write_events(self, row: dict[str, Any]) -> None:
        with self._events.as_default(step=row["step"]):
            for key, value in records.scalars(row):
                tf.summary.scalar(f"kmp/{key}", value)
            if "sample" in row:
                _write_histograms(row)

    def close(self) -> None:
        """Closes the files, for all that share the writer: callbacks write nothing once training has ended."""
        self._end()

    def _belongs_to(self, optimizer: LossScaleOptimizer, first_step: int) -> bool:
        return self._optimizer() is optimizer and self._first_step == first_step

    def _give_way_to(self, model: keras.Model) -> None:
        """Ends a writer that a training left open when it was interrupted."""
        optimizer = self._optimizer()
        if optimizer and self._model() is model and optimizer.snapshot().step == self._first_step:
            raise ValueError(f"`log_dir` is another optimizer's; give each its own. Received: {str(self._folder)!r}")
        self._end()

    def _end(self) -> None:
        if self._open.get(self._folder) is self:
            del self._open[self._folder]
        for file in (self._lines, self._events):
            with contextlib.suppress(*_FULL):  # told when it was written
                if file is not None:
                    file.close()


def _take_up(folder: Path, first_step: int, first_line: dict[str, Any]) -> list[dict[str, Any]]:
    """Leaves a log in the folder that ends at `first_step`, whole at every moment; what went beyond is set aside.

    Returns:
        The readings that TensorBoard's files have to be given again.
    """
    log = (folder / FILE_NAME).resolve()
    if not log.exists() or not log.stat().st_size:
        return []
    earlier = records.Run.load(log, allow_truncated=True)
    if not earlier.rows:
        log.unlink()
        return []
    kept = [row for row in earlier.rows if row["step"] <= first_step]
    goes_beyond = len(kept) < len(earlier.rows)
    is_older = earlier.header["schema"] != SCHEMA
    if not goes_beyond and not is_older and log.read_bytes().endswith(b"\n"):
        return []
    begin = earlier.header | {"schema": SCHEMA} if kept else first_line
    with atomic_files.whole(log) as partial:
        partial.write_text("".join(to_line(line) for line in (begin, *kept)), encoding="utf-8")
        if goes_beyond:
            why = f"goes beyond step {first_step}"
        else:
            why = f"has schema {earlier.header['schema']}" if is_older else "ends in the middle of a line"
        _set_aside(folder, log, why)
    return kept


def _set_aside(folder: Path, log: Path, why: str) -> None:
    earlier = _unused(folder / "earlier")
    earlier.mkdir()
    shutil.copy2(log, earlier / log.name)
    for events in folder.glob(f"events.out.tfevents.*{_SUFFIX}"):
        events.rename(earlier / events.name)
    logger.warning("Set aside in %s: an earlier log that %s.", earlier, why)


def _unused(path: Path) -> Path:
    return next(name for n in itertools.count(1) if not (name := path.with_name(f"{path.name}-{n}")).exists())


def header(model: keras.Model, optimizer: LossScaleOptimizer) -> dict[str, Any]:
    """Returns a log's first line: when, with what, and how a model trains; see `kmp.records`."""
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    versions = {"keras": keras.__version__, "tensorflow": tf.__version__, "numpy": np.__version__}
    settings = {"rule": type(optimizer.rule).__name__} | dataclasses.asdict(optimizer.rule)
    settings |= {
        "model": model.name,
        "compute_dtypes": sorted(compute_dtypes(model)),
        "optimizer": type(optimizer.inner_optimizer).__name__,
        "replicas": model.distribute_strategy.num_replicas_in_sync,
    }
    variables = model.trainable_variables  # which `fit` will build the optimizer on
    by_path = optimizer.variables_by_path() or dict(zip(paths_of(variables), variables, strict=True))
    wide = float32_variables(model)
    settings["float32_variables"] = [path for path, variable in by_path.items() if id(variable) in wide]
    if model.built:
        settings["parameters"] = model.count_params()
    return {"schema": SCHEMA, "kind": "header", "started": started, **versions, "settings": settings}


def _write_histograms(row: dict[str, Any]) -> None:
    sample = records.Run([row]).samples[0]
    layers = sample.by_layer()
    named = {"kmp/gradient_exponents": sample.histogram} | {f"kmp_by_layer/{name}": layers[name] for name in layers}
    from tensorboard.compat.proto.summary_pb2 import Summary

    # One event for all: writing each with tf.summary.write takes ten times as long.
    summary = Summary(value=[_value(tag, histogram) for tag, histogram in named.items()])
    tf.summary.experimental.write_raw_pb(summary.SerializeToString(), step=row["step"])


def _value(tag: str, histogram: records.ExponentHistogram) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.histogram import metadata
    from tensorboard.util.tensor_util import make_tensor_proto

    # TensorBoard's histograms are rows of left edge, right edge, count; here the edges are binary exponents.
    filled = np.flatnonzero(histogram.by_exponent)
    span = slice(filled[0], filled[-1] + 1) if filled.size else slice(0, 0)
    left = histogram.exponents[span].astype(np.float64)
    buckets = np.stack([left, left + 1, histogram.by_exponent[span]], axis=1)
    plugin = metadata.create_summary_metadata(display_name=None, description="log2 of loss-scaled gradient magnitudes")
    return Summary.Value(tag=tag, tensor=make_tensor_proto(buckets), metadata=plugin)
