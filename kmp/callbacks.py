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
from kmp._formats import FLOAT16
from kmp._writers import LogWriter
from kmp.layers import sublayers
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
            raise ValueError(_no_loss_scale(type(self).__name__, self.model, optimizer))
        return optimizer

    def on_train_begin(self, logs: Logs = None) -> None:
        optimizer = self.optimizer
        if self.log_dir is not None:
            LogWriter.check(self.log_dir)
        self._stop()
        if self._prepare(optimizer):
            self.model.make_train_function(force=True)
        self._start()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        if not self._has_trained:
            self._start()  # again: a callback listed later may have restored the optimizer
            self._open()
        self._batches_of_epoch = 0

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._has_trained = True
        self._count_batches(batch)
        if self._last.step + self._steps_per_batch * self._batches_since >= self._due:
            self._read()
        if logs is not None:
            logs.update(self._keys)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._read(is_epoch_end=True)
        if logs is not None:
            _guard.mend_epoch(self.model, logs)
            logs.update(self._keys)

    def on_train_end(self, logs: Logs = None) -> None:
        if self._has_trained and self._last.step == self._first_step:
            warnings.warn(_UNUSED.format(callback=type(self).__name__), stacklevel=2)
        self._stop()

    def _prepare(self, optimizer: LossScaleOptimizer) -> bool:
        """Arranges what the compiled step must be able to do; returns whether it has to be traced anew."""
        return optimizer is self.model.optimizer and _guard.install(self.model)

    def _start(self) -> None:
        self._last = self.optimizer.snapshot()
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
        if self.log_dir is not None and self._writer is None:
            self._writer = LogWriter.open(self.log_dir, self.model, self.optimizer, self._first_step)

    def _count_batches(self, batch: int) -> None:
        # With steps_per_execution the index of an epoch's last call may lie beyond its last batch.
        done = min(batch + 1, (self.params or {}).get("steps") or batch + 1)
        self._batches_since += done - self._batches_of_epoch
        self._batches_of_epoch = done

    def _read(self, is_epoch_end: bool = False) -> None:
        snapshot = self.optimizer.snapshot()
        steps = snapshot.step - self._last.step
        if not is_epoch_end:
            self._steps_per_batch = steps / self._batches_since if steps else self._steps_per_batch / 2
        if steps:
            self._record(snapshot)
            self._last, self._batches_since = snapshot, 0
            self._due = (snapshot.step // self.every_n_steps + 1) * self.every_n_steps

    def _record(self, snapshot: Snapshot) -> None:
        row = self._row(snapshot)
        if row:
            self.run.append(row)
            self._open()
            if self._writer:
                self._writer.write(row)

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

    In `logs`: `overflow_count` (since training began) and `overflow_rate` (the share of the steps since the last
    reading; in an epoch's logs, of the epoch's steps). In an epoch's logs also `nonfinite_loss_count`: those whose loss
    was not finite before it was scaled, where no scale would have helped.

    Args:
        log_dir: Folder for `kmp.jsonl` and TensorBoard's files, or `None` to write no file.
        every_n_steps: Integer, at least 1: how often to read, by the optimizer's step counter.
        optimizer: The `kmp.LossScaleOptimizer` to read, for a model that holds several; its own by default.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If `every_n_steps` is below 1; in `on_train_begin`, if the optimizer is not kmp's.
        OSError: In `on_train_begin`, if `log_dir` cannot be written.
    """

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._at_epoch_begin = self._last

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_end(epoch, logs)
        steps = self._last.step - self._at_epoch_begin.step
        if logs is not None and steps:
            skipped = self._last.overflow_count - self._at_epoch_begin.overflow_count
            logs["overflow_rate"] = skipped / steps
            logs["nonfinite_loss_count"] = self._last.nonfinite_loss_count

    def _row(self, snapshot: Snapshot) -> dict[str, Any] | None:
        new, steps = snapshot.overflow_count - self._last.overflow_count, snapshot.step - self._last.step
        self._keys = {"overflow_count": snapshot.overflow_count, "overflow_rate": new / steps}
        details = {
            "nonfinite_loss_count": snapshot.nonfinite_loss_count,
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
        every_n_steps: Integer, at least 1: sampled are the first step of a `fit`, each step that this divides, and the
            first step of an epoch that would have no sample.
        optimizer: The `kmp.LossScaleOptimizer` to read, for a model that holds several; its own by default.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If `every_n_steps` is below 1; in `on_train_begin`, if the optimizer is not kmp's.
        OSError: In `on_train_begin`, if `log_dir` cannot be written.
    """

    def _prepare(self, optimizer: LossScaleOptimizer) -> bool:
        is_new = optimizer.prepare_sampling()
        return super()._prepare(optimizer) or is_new

    def _start(self) -> None:
        super()._start()
        self._sampled = self._last.histogram.step if self._last.histogram else 0
        self.optimizer.start_sampling(self, self.every_n_steps)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_begin(epoch, logs)
        steps = (self.params or {}).get("steps") or 0
        if (self._last.step + steps) // self.every_n_steps == self._last.step // self.every_n_steps:
            self.optimizer.start_sampling(self, self.every_n_steps)  # or the epoch would have no sample

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


def _no_loss_scale(callback: str, model: keras.Model, optimizer: Any) -> str:
    kind = type(optimizer)
    found = f"{kind.__module__.split('.')[0]}'s {kind.__name__}" if optimizer is not None else "None"
    dtypes = sorted({layer.compute_dtype for layer in sublayers(model)})
    advice = (
        "Compile the model after kmp.enable() and without auto_scale_loss=False, or with kmp.LossScaleOptimizer(opt)."
        if FLOAT16.name in dtypes
        else "That needs no loss scale: leave kmp's callbacks out, or compile with kmp.LossScaleOptimizer(opt, "
        "loss_scale=1.0) to see its gradients all the same. For float16 call kmp.enable() before building the model."
    )
    reads = f"{callback} reads kmp.LossScaleOptimizer, and the model's optimizer is {found}"
    return f"{reads}; the model computes in {' and '.join(dtypes)}. {advice}"
