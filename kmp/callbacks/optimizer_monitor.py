"""Reads one optimizer for the callbacks of a run and stores their records."""

from pathlib import Path
from typing import Any

import keras

from kmp.backend import compute_dtypes, distribution
from kmp.callbacks.log_writer import LogWriter, header
from kmp.optimizer import LossScaleOptimizer
from kmp.records import Run, Snapshot
from kmp.utils import FLOAT16, FolderLock


class OptimizerMonitor:
    """Holds the records of a run, its log file, and the newest snapshot of the optimizer.

    Callbacks that share a monitor share all three. After a step, only the first callback that reads copies a snapshot
    to the host.

    Args:
        log_dir: Folder for `kmp.jsonl` and TensorBoard's files, or `None` to write no file.
        optimizer: The optimizer to read, or `None` for the model's.
    """

    def __init__(self, log_dir: Path | None = None, optimizer: LossScaleOptimizer | None = None) -> None:
        self.log_dir = log_dir
        self.run = Run()
        self._optimizer = optimizer
        self._newest: Snapshot | None = None
        self._writer: LogWriter | None = None

    def optimizer_of(self, model: keras.Model, callback: str) -> LossScaleOptimizer:
        """Returns the optimizer to read.

        Args:
            model: The model in training.
            callback: The name of the callback that reads it, for the error message.

        Raises:
            ValueError: If it is not a `kmp.LossScaleOptimizer`.
        """
        optimizer = self._optimizer or getattr(model, "optimizer", None)
        if not isinstance(optimizer, LossScaleOptimizer):
            raise ValueError(_wrong_optimizer_message(callback, model, optimizer))
        return optimizer

    def check(self, model: keras.Model) -> FolderLock | None:
        """Checks that `log_dir` is writable, and locks it for this process.

        Returns:
            The lock, or `None`; see `LogWriter.check`.

        Raises:
            OSError: If it is not writable, or another process has locked it.
            ImportError: If TensorBoard is not installed.
        """
        folder = self._writable_folder(model)
        return None if folder is None else LogWriter.check(folder)

    def describe(self, model: keras.Model, optimizer: LossScaleOptimizer) -> None:
        """Sets the run's header: the versions and the settings of a new training."""
        self.run.header = header(model, optimizer)

    def start(self, optimizer: LossScaleOptimizer) -> Snapshot:
        """Returns a new snapshot, even if no step was taken since the last one: weights may have been loaded."""
        self._newest = optimizer.snapshot()
        return self._newest

    def snapshot(self, optimizer: LossScaleOptimizer) -> Snapshot:
        """Returns the newest snapshot. Takes a new one if the optimizer has taken a step since."""
        if self._newest is None or self._newest.step != optimizer.counters.read_steps():
            self._newest = optimizer.snapshot()
        return self._newest

    def open(self, model: keras.Model, optimizer: LossScaleOptimizer, first_step: int) -> None:
        """Opens the log of a training that continues after `first_step`, unless it is open."""
        folder = self._writable_folder(model)
        if folder is not None and (self._writer is None or self._writer.is_closed):
            self._writer = LogWriter.open(folder, model, optimizer, first_step)

    def write(self, record: dict[str, Any]) -> None:
        """Writes a record to the log if it is open."""
        if self._writer:
            self._writer.write(record)

    def close(self) -> None:
        """Closes the log."""
        if self._writer:
            self._writer.close()
            self._writer = None

    def _writable_folder(self, model: keras.Model) -> Path | None:
        """Returns the folder that this process writes to: of several workers, only the chief writes."""
        return self.log_dir if distribution.is_chief(model.distribute_strategy) else None


def _wrong_optimizer_message(callback: str, model: keras.Model, optimizer: Any) -> str:
    optimizer_class = type(optimizer)
    package = optimizer_class.__module__.split(".")[0]
    received = f"{package}'s {optimizer_class.__name__}" if optimizer is not None else "None"
    dtypes = sorted(compute_dtypes(model))
    advice = (
        "Compile the model after kmp.enable() and without auto_scale_loss=False, or with kmp.LossScaleOptimizer(opt)."
        if FLOAT16.name in dtypes
        else "It needs no loss scale: remove kmp's callbacks, or compile with kmp.LossScaleOptimizer(opt, "
        "loss_scale=1.0) to record its gradients. For float16, call kmp.enable() before building the model. "
        "keras.backend.clear_session() and new threads reset the policy to float32: call kmp.enable() again there."
    )
    return (
        f"{callback} needs a kmp.LossScaleOptimizer, but the model's optimizer is {received}. "
        f"The model computes in {' and '.join(dtypes)}. {advice}"
    )
