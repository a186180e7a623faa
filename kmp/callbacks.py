"""Callbacks that read the optimizer at a cadence and put what it knows into `logs`, files and TensorBoard.

They compute nothing: the compiled step counts on the device, and a reading copies a few numbers to the host. List them
before callbacks that use their keys, such as `CSVLogger`; `History` and the progress bar always come after.

With a `log_dir`, readings go to `kmp.jsonl` there (see `kmp.records`) and to TensorBoard event files.
"""

import os
import warnings
from typing import Any

import keras

from kmp import _arguments, _guard
from kmp._writers import LogWriter
from kmp.optimizer import LossScaleOptimizer
from kmp.records import Run, Snapshot

PathLike = str | os.PathLike[str]
Logs = dict[str, Any] | None


class _Reader(keras.callbacks.Callback):
    """Reads the optimizer at its first step, at steps that `every_n_steps` divides, and at each epoch's end."""

    def __init__(
        self,
        log_dir: PathLike | None = None,
        every_n_steps: int = 100,
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
            raise ValueError(_no_loss_scale(type(self).__name__, optimizer))
        return optimizer

    def on_train_begin(self, logs: Logs = None) -> None:
        needs_trace = self._prepare()
        self._stop()
        if self.log_dir is not None:
            LogWriter.check(self.log_dir)
        self._start()
        if needs_trace:
            self.model.make_train_function(force=True)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        if not self._has_trained:
            self._start()  # again: a callback listed later may have restored the optimizer
            self._open()
        self._epoch_start = self._last.step

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._has_trained = True
        # The step is reckoned from the batch, so that nothing is copied from the device between readings.
        if self._is_due(self._epoch_start + batch + 1):
            self._read()
        if logs is not None:
            logs.update(self._keys)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._read()
        if logs is not None:
            _guard.mend_epoch(self.model, logs)
            logs.update(self._keys)

    def on_train_end(self, logs: Logs = None) -> None:
        if self._has_trained and self._last.step == self._first_step:
            warnings.warn(_UNUSED.format(callback=type(self).__name__), stacklevel=2)
        self._stop()

    def _prepare(self) -> bool:
        """Arranges what the compiled step must be able to do; returns whether it has to be traced anew."""
        return self.optimizer is self.model.optimizer and _guard.install(self.model)

    def _start(self) -> None:
        self._last = self.optimizer.snapshot()
        self._first_step = self._epoch_start = self._last.step
        self._keys: dict[str, float] = {}
        self._has_trained = False

    def _stop(self) -> None:
        if self._writer:
            self._writer.close()
            self._writer = None

    def _open(self) -> None:
        if self.log_dir is not None and self._writer is None:
            self._writer = LogWriter.open(self.log_dir, self.model, self.optimizer, self._first_step)

    def _is_due(self, step: int) -> bool:
        last = self._last.step
        return last == self._first_step or step // self.every_n_steps > last // self.every_n_steps

    def _read(self) -> None:
        snapshot = self.optimizer.snapshot()
        if snapshot.step == self._last.step:
            return
        row = self._row(snapshot)
        if row:
            self.run.append(row)
            self._open()
            if self._writer:
                self._writer.write(row)
        self._last = snapshot

    def _row(self, snapshot: Snapshot) -> dict[str, Any] | None:
        """Sets `self._keys` from the reading and returns what to record of it, or `None` for nothing."""
        raise NotImplementedError


class LossScaleLogger(_Reader):
    """Logs the loss scale, as `loss_scale` in `logs`.

    Args:
        log_dir: Folder for `kmp.jsonl` and TensorBoard's files, or `None` to write no file.
        every_n_steps: Integer, at least 1: how often to read, by the optimizer's step counter.
        optimizer: The `kmp.LossScaleOptimizer` to read, for a model that holds several; its own by default.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If `every_n_steps` is below 1; in `on_train_begin`, if the optimizer is not kmp's.
        OSError: In `on_train_begin`, if `log_dir` cannot be written.
    """

    def _row(self, snapshot: Snapshot) -> dict[str, Any] | None:
        self._keys = {"loss_scale": snapshot.loss_scale}
        return {"step": snapshot.step, "loss_scale": snapshot.loss_scale, "clean_steps": snapshot.clean_steps}


class OverflowCounter(_Reader):
    """Counts the steps that were skipped because the loss or a gradient was not finite.

    In `logs`: `overflow_count` (since training began), `overflow_rate` (the share of the steps since the last reading)
    and `nonfinite_loss_count` (those of them whose loss was not finite before it was scaled, where no scale would
    help).

    Args:
        log_dir: Folder for `kmp.jsonl` and TensorBoard's files, or `None` to write no file.
        every_n_steps: Integer, at least 1: how often to read, by the optimizer's step counter.
        optimizer: The `kmp.LossScaleOptimizer` to read, for a model that holds several; its own by default.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If `every_n_steps` is below 1; in `on_train_begin`, if the optimizer is not kmp's.
        OSError: In `on_train_begin`, if `log_dir` cannot be written.
    """

    def _row(self, snapshot: Snapshot) -> dict[str, Any] | None:
        new, steps = snapshot.overflow_count - self._last.overflow_count, snapshot.step - self._last.step
        self._keys = {
            "overflow_count": snapshot.overflow_count,
            "overflow_rate": new / steps,
            "nonfinite_loss_count": snapshot.nonfinite_loss_count,
        }
        details = {
            "overflows_in_a_row": snapshot.overflows_in_a_row,
            "overflows_by_variable": snapshot.overflows_by_variable,
        }
        return {"step": snapshot.step} | self._keys | details


class GradientHistogram(_Reader):
    """Counts gradient elements by binary exponent, in the compiled step, at a cadence.

    In `logs`: `grad_zeros`, the share of elements that are exactly zero: an upper bound on what float16 flushed. The
    histograms are in `run.histograms`, in the log and in TensorBoard; `kmp.plots.gradient_exponents` draws them.

    Args:
        log_dir: Folder for `kmp.jsonl` and TensorBoard's files, or `None` to write no file.
        every_n_steps: Integer, at least 1: the first step of a `fit` is sampled, and each step it divides.
        optimizer: The `kmp.LossScaleOptimizer` to read, for a model that holds several; its own by default.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If `every_n_steps` is below 1; in `on_train_begin`, if the optimizer is not kmp's.
        OSError: In `on_train_begin`, if `log_dir` cannot be written.
    """

    def _prepare(self) -> bool:
        is_new = self.optimizer.prepare_sampling()
        return super()._prepare() or is_new

    def _start(self) -> None:
        super()._start()
        self._sampled = self._last.histogram.step if self._last.histogram else 0
        self.optimizer.start_sampling(self, self.every_n_steps)

    def _stop(self) -> None:
        self.optimizer.stop_sampling(self)
        super()._stop()

    def _row(self, snapshot: Snapshot) -> dict[str, Any] | None:
        histogram = snapshot.histogram
        if histogram is None or histogram.step == self._sampled:
            return None
        self._sampled = histogram.step
        self._keys = {"grad_zeros": histogram.zero_fraction}
        return {"step": histogram.step, "histogram": histogram.to_dict()} | self._keys


def defaults(log_dir: PathLike | None = None, every_n_steps: int = 100) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that a run should have: `LossScaleLogger`, `OverflowCounter` and `GradientHistogram`.

    They share one `run`, a `kmp.records.Run`, which holds what all of them read.

    Args:
        log_dir: Folder for `kmp.jsonl` and TensorBoard's files, or `None` to write no file.
        every_n_steps: Integer, at least 1: how often to read and sample, by the optimizer's step counter.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If `every_n_steps` is below 1.

    Example:
    >>> [type(callback).__name__ for callback in defaults(every_n_steps=50)]
    ['LossScaleLogger', 'OverflowCounter', 'GradientHistogram']
    """
    readers = [kind(log_dir, every_n_steps) for kind in (LossScaleLogger, OverflowCounter, GradientHistogram)]
    for reader in readers:
        reader.run = readers[0].run
    return readers


_UNUSED = (
    "{callback}: the optimizer it reads took no step. A model that trains with optimizers of its own has to have them "
    "wrapped with kmp.wrap, and the callback has to be told which one to read: {callback}(optimizer=...)."
)


def _no_loss_scale(callback: str, optimizer: Any) -> str:
    kind = type(optimizer)
    found = f"{kind.__module__.split('.')[0]}'s {kind.__name__}" if optimizer is not None else "None"
    return (
        f"{callback} reads kmp.LossScaleOptimizer, and the model's optimizer is {found}. Call kmp.enable() "
        "before building and compiling the model, or compile it with kmp.LossScaleOptimizer(optimizer). A model in "
        "float32 or bfloat16 needs no loss scale: leave the callback out, or wrap with loss_scale=1.0 to see its "
        "gradients all the same."
    )
